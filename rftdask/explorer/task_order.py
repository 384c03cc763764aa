"""Tasks of each explore step: a function of its number or, for selectors that learn (BOTS), of earlier results.

A resumed run has the same order. What a selector has learned is not stored: it is recomputed from the rows of the log,
in the order of the explore steps. Each of its choices is written once to `schedule/<step>.json`, before the step runs.
Invariant: a choice is a function of the results of steps 1..known and of the number of the step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from rftdask.algorithm.selectors import make_selector
from rftdask.buffer.batches.groups import first_copies
from rftdask.buffer.log.log import ExperienceLog
from rftdask.buffer.log.schema import Status
from rftdask.buffer.log.shard import ShardName, done_units
from rftdask.config import Config
from rftdask.config.plugins import trait
from rftdask.config.schema.buffer import TasksetConfig
from rftdask.data.task_schedule import TaskRef, explore_tasks
from rftdask.data.tasksets import Taskset
from rftdask.errors import DamagedError, NotFoundError, UserError
from rftdask.storage import Storage
from rftdask.storage.checked_json import parse_json

TaskOrder = Callable[[int, int], list[TaskRef] | None]
"""(step, last explore step whose results may influence the choice) -> the `batch_size` tasks of the step. None: lost
results that the choice needs must be made again first."""


def make_task_order(storage: Storage, log: ExperienceLog, config: Config, sizes: Mapping[str, int]) -> TaskOrder:
    """Order of a stage's training tasks. Raises: DataError: a selector does not fit its taskset's columns."""
    tasksets = [taskset for taskset in config.buffer.explorer_input.train_tasksets if taskset.name in sizes]
    if any(trait(taskset.data_selector.selector, "learns") for taskset in tasksets):
        return LearnedOrder(storage, log, config, tasksets[0]).tasks  # the only one, as the config checks
    tasks_of = fixed_order(tasksets, sizes, config.buffer.batch_size, config.explorer.plugin_dirs)
    return lambda step, known: tasks_of(step)


def fixed_order(
    tasksets: Sequence[TasksetConfig], sizes: Mapping[str, int], batch_size: int, plugin_dirs: tuple[str, ...] = ()
) -> Callable[[int], list[TaskRef]]:
    """Tasks by number of the step, a pure function. Reads the rows of tasksets that are ordered by their columns.

    Args: sizes: number of tasks by name of the taskset.
    Raises: DataError: a column of `feature_keys` is missing or is not numeric.
    """
    orders, seed, epoch_each_step = [], 0, False
    for taskset in tasksets:
        selector = make_selector(taskset.data_selector, plugin_dirs)
        # [size, F] numbers of the columns of `feature_keys`; F is 0 for a selector that reads none.
        features = np.empty((sizes[taskset.name], 0))
        if selector.features:
            features = np.array(Taskset(taskset).numbers(taskset.data_selector.feature_keys), np.float64)
        orders.append(partial(selector.order, features))
        # The checks of the config make sure that these are the same for all tasksets.
        seed = taskset.data_selector.seed if selector.seeded else seed
        epoch_each_step |= selector.epoch_each_step
    counts = tuple(sizes[taskset.name] for taskset in tasksets)
    order = partial(explore_tasks, sizes=counts, batch_size=batch_size, orders=tuple(orders))
    return partial(order, seed=seed, epoch_each_step=epoch_each_step)


# ---- selectors that learn


def choice_path(step: int) -> str:
    return f"schedule/{step:08d}.json"


def read_choice(storage: Storage, step: int) -> list[TaskRef] | None:
    """Stored tasks of `step`, or None if they are not chosen yet. Raises: DamagedError: the file cannot be read."""
    path = choice_path(step)
    try:
        tree = parse_json(storage.get(path))
        tasks = [TaskRef(int(taskset), int(epoch), int(index)) for taskset, epoch, index in tree["tasks"]]
        written_for = int(tree["step"])
    except NotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path} is damaged ({error}); restore it from a backup") from error
    # A checksum would not detect a file that is whole, but in the wrong place.
    if written_for != step:
        raise DamagedError(f"{path} is of step {written_for}: files were moved")
    return tasks


def store_choice(storage: Storage, step: int, tasks: Sequence[TaskRef], *, learned_from: int) -> list[TaskRef]:
    """Store a choice. Returns: the stored tasks of the step, which differ if they were chosen before. learned_from:
    last explore step whose results influenced the choice.
    """
    rows = [(task.taskset_number, task.epoch, task.index) for task in tasks]
    storage.put_new(choice_path(step), json.dumps({"step": step, "learned_from": learned_from, "tasks": rows}).encode())
    # Read back even after a successful put, because a resumed run uses the content of the file.
    written = read_choice(storage, step)
    if written is None:
        raise DamagedError(f"{choice_path(step)} was removed during the run; start the run again")
    return written


class LearnedOrder:
    """Task order of one run with a selector that learns; its `tasks` is a `TaskOrder`."""

    def __init__(self, storage: Storage, log: ExperienceLog, config: Config, taskset: TasksetConfig) -> None:
        """Raises: DataError: the columns of `feature_keys` are missing, or an argument of the selector is wrong."""
        # Late: it imports torch, which the driver needs only here.
        import torch

        from rftdask.algorithm.learning_selectors import LearningSelector  # late, as torch

        selector = make_selector(taskset.data_selector, config.explorer.plugin_dirs)
        if not isinstance(selector, LearningSelector):
            raise UserError(f"selector {taskset.data_selector.selector_type!r} learns, but is not a LearningSelector")
        self._selector = selector
        numbers = Taskset(taskset).numbers(taskset.data_selector.feature_keys)
        self._state = selector.initial(torch.tensor(numbers, dtype=torch.float64))
        self._folded = 0
        """Number of explore steps whose results are in the state."""
        self._log, self._config, self._storage = log, config, storage
        self._last: tuple[int, list[TaskRef]] = (0, [])
        """Last step and its tasks, which each work unit of the step needs."""

    def tasks(self, step: int, known: int) -> list[TaskRef] | None:
        """Tasks of `step`: the stored choice, or a new one from the results of steps 1..known. Each step is an epoch,
        so a task that is chosen again is a new task. None: results are missing; their units must run again first.
        """
        if self._last[0] == step:
            return self._last[1]
        tasks = read_choice(self._storage, step)
        if tasks is None:
            if not self._learn(known):
                return None
            indices = self._selector.select(self._state, step, self._config.buffer.batch_size).tolist()
            refs = [TaskRef(0, step - 1, index) for index in indices]
            # Stored before it runs: after a restart more results are known, and the choice would differ.
            tasks = store_choice(self._storage, step, refs, learned_from=self._folded)
        self._last = (step, tasks)
        return tasks

    def _learn(self, known: int) -> bool:
        # Fold the results of the steps up to `known` into the state. False: some are missing.
        import torch  # late, as above

        names = self._log.shards(self._folded + 1) if known > self._folded else []
        for step in range(self._folded + 1, known + 1):
            tables: list[tuple[ShardName, pa.Table]] = []
            for name in [name for name in names if name.explore_step == step]:
                try:
                    tables.append((name, self._log.read(name)))
                except DamagedError as error:
                    # The units of a quarantined shard are not done, so the explorer runs them again.
                    self._log.quarantine(name, str(error))
            if len(done_units(name for name, _ in tables)) < self._config.units_per_step:
                return False
            rates = pass_rates(first_copies(tables), self._config.algorithm.repeat_times)
            # In the order of the rows, on which floating-point sums depend.
            rows, values = torch.tensor(list(rates), dtype=torch.int64), torch.tensor(list(rates.values()))
            self._state = self._selector.updated(self._state, rows, values)
            self._folded = step
        return True


def pass_rates(tables: Iterable[pa.Table], repeat_times: int) -> dict[int, float]:
    """Fraction of passed rollouts by row of the task, ordered by row, for tasks with a scored rollout.

    A rollout passes by its metric accuracy if that is a number, else by a reward above 0. It counts once, however many
    turns it took. Failed rollouts and the greedy one do not count.
    """
    passed: dict[int, list[float]] = {}
    for table in tables:
        names = ("task_index", "rollout", "turn", "status", "reward", "metrics")
        columns = (table.column(name).to_pylist() for name in names)
        for index, rollout, turn, status, reward, metrics in zip(*columns, strict=True):
            # Rollouts that an operator filtered out were scored, and show the difficulty of the task.
            scored = Status(status).trainable or status == Status.FILTERED
            if turn == 0 and rollout < repeat_times and reward is not None and scored:
                accuracy = dict(metrics).get("accuracy", math.nan)
                accuracy = accuracy if math.isfinite(accuracy) else float(reward > 0)
                passed.setdefault(index, []).append(min(1.0, max(0.0, accuracy)))
    return {index: sum(values) / len(values) for index, values in sorted(passed.items())}
