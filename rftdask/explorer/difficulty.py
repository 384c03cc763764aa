"""Tasks chosen by what was learned of their difficulty (selectors that learn, as BOTS), and where the choice is kept.

The posterior is nowhere stored: it is the log's rows, folded in the order of the explore steps. What it makes of them
is written to `schedule/<step>.json`, which is created only once and before the step is run. If that file exists, it is
the choice for ever: a resumed explorer replays it. This module knows nothing of weights or of the cluster. Invariant: a
choice is a function of the results of steps 1..known and of the step's number, so where `known` is a function of the
step (style fixed), a run repeats itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import pyarrow as pa
import torch

from rftdask.algorithm.learning_selectors import LearningSelector
from rftdask.algorithm.selectors import make_selector
from rftdask.buffer.batches.groups import first_copies
from rftdask.buffer.log.log import ExperienceLog
from rftdask.buffer.log.schema import Status
from rftdask.buffer.log.shard import ShardName, done_units
from rftdask.config import Config
from rftdask.config.schema.buffer import TasksetConfig
from rftdask.data.task_schedule import TaskRef
from rftdask.data.tasksets import Taskset
from rftdask.errors import DamagedError, NotFoundError, UserError
from rftdask.storage import Storage
from rftdask.storage.checked_json import parse_json


class ChosenTasks:
    """The choices of one run: which tasks an explore step runs, where that is no function of its number.

    Example: tasks = chosen.read(7) or chosen.put_if_absent(7, tasks, learned_from=5)
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def path(self, step: int) -> str:
        """File of the choice of `step`."""
        return f"schedule/{step:08d}.json"

    def read(self, step: int) -> list[TaskRef] | None:
        """The tasks of `step`, or None if they are not chosen yet. Raises: DamagedError: the file cannot be read; it is
        never guessed, for some of its tasks may have been run.
        """
        try:
            tree = parse_json(self._storage.get(self.path(step)))
            tasks = [TaskRef(int(taskset), int(epoch), int(index)) for taskset, epoch, index in tree["tasks"]]
            written_for = int(tree["step"])
        except NotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{self.path(step)} is damaged ({error}); restore it from a backup") from error
        # A checksum of content would not see it: each file is whole, and in the wrong place.
        if written_for != step:
            raise DamagedError(f"{self.path(step)} is of step {written_for}: files were moved")
        return tasks

    def put_if_absent(self, step: int, tasks: Sequence[TaskRef], *, learned_from: int) -> list[TaskRef]:
        """Write the choice down; returns the tasks of the step, which are others if they were chosen before.

        Args: learned_from: last explore step whose results had a part in the choice.
        """
        # Numbers alone: a task is found again by its place in its taskset.
        rows = [(task.taskset_number, task.epoch, task.index) for task in tasks]
        tree = {"step": step, "learned_from": learned_from, "tasks": rows}
        self._storage.put_new(self.path(step), json.dumps(tree).encode())
        # Read back also after a put that won: what is replayed later is what the file says.
        written = self.read(step)
        if written is None:
            raise DamagedError(f"{self.path(step)} was removed while the run was at work; start it again")
        return written


class LearnedOrder:
    """Chooses the tasks of each explore step of one run; see `task_order.TaskOrder`.

    Example:
        order = LearnedOrder(storage, log, config, taskset)
        order.tasks(step=5, known=3)
    """

    def __init__(self, storage: Storage, log: ExperienceLog, config: Config, taskset: TasksetConfig) -> None:
        """Raises: DataError: the columns of `feature_keys` are missing, or an argument of the selector is wrong."""
        selector = make_selector(taskset.data_selector, config.explorer.plugin_dirs)
        if not isinstance(selector, LearningSelector):
            raise UserError(f"selector {taskset.data_selector.selector_type!r} learns, and is no LearningSelector")
        self._selector = selector
        numbers = Taskset(taskset).numbers(taskset.data_selector.feature_keys)
        self._state = selector.initial(torch.tensor(numbers, dtype=torch.float64))
        self._folded = 0
        """Explore steps whose results are in the state."""
        self._log = log
        self._config = config
        self._chosen = ChosenTasks(storage)
        self._last: tuple[int, list[TaskRef]] = (0, [])
        """The step that was asked for last, and its tasks: each work unit of a step asks again."""

    def tasks(self, step: int, known: int) -> list[TaskRef] | None:
        """The tasks of `step`, chosen by the results of steps 1..known unless it is chosen already.

        Each step is an epoch of its own: a task chosen again is another. None: results have gone missing; their work
        units run again first.
        """
        if self._last[0] == step:
            return self._last[1]
        tasks = self._chosen.read(step)
        if tasks is None:
            if not self._learn(known):
                return None
            indices = self._selector.select(self._state, step, self._config.buffer.batch_size).tolist()
            refs = [TaskRef(0, step - 1, index) for index in indices]
            # Written before it is run: after a restart more is known, and another choice would be made.
            tasks = self._chosen.put_if_absent(step, refs, learned_from=self._folded)
        self._last = (step, tasks)
        return tasks

    def _learn(self, known: int) -> bool:
        # Fold the results of the steps up to `known`; False if some of them are missing.
        names = self._log.shards(self._folded + 1) if known > self._folded else []
        for step in range(self._folded + 1, known + 1):
            tables: list[tuple[ShardName, pa.Table]] = []
            for name in [name for name in names if name.explore_step == step]:
                try:
                    tables.append((name, self._log.read(name)))
                except DamagedError as error:
                    # Set aside, its units are not done any more: the explorer runs them again,
                    # and this step is asked for again.
                    self._log.quarantine(name, str(error))
            if len(done_units(name for name, _ in tables)) < self._config.units_per_step:
                return False
            rates = pass_rates(first_copies(tables), self._config.algorithm.repeat_times)
            # In the order of the rows, since floating-point sums over tasks depend on it.
            rows, values = torch.tensor(list(rates), dtype=torch.int64), torch.tensor(list(rates.values()))
            self._state = self._selector.updated(self._state, rows, values)
            self._folded = step
        return True


def pass_rates(tables: Iterable[pa.Table], repeat_times: int) -> dict[int, float]:
    """Share of passed rollouts by row of the task, in order of the row; tasks without a scored rollout are not there.

    A rollout passes by its metric accuracy, else by a reward above 0, and counts once, however many turns it took.
    Failed rollouts and the greedy one do not count.
    """
    passed: dict[int, list[float]] = {}
    for table in tables:
        names = ("task_index", "rollout", "turn", "status", "reward", "metrics")
        columns = (table.column(name).to_pylist() for name in names)
        for index, rollout, turn, status, reward, metrics in zip(*columns, strict=True):
            # An operator's verdict (filtered) hides no answer: the task was as hard as its rollouts say.
            scored = Status(status).trainable or status == Status.FILTERED
            if turn == 0 and rollout < repeat_times and reward is not None and scored:
                accuracy = dict(metrics).get("accuracy", float(reward > 0))
                passed.setdefault(index, []).append(min(1.0, max(0.0, accuracy)))
    return {index: sum(values) / len(values) for index, values in sorted(passed.items())}
