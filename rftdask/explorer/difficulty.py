"""Tasks chosen by what was learned of their difficulty (selector difficulty_based, BOTS).

The posterior is nowhere stored: it is the log's rows, folded in the order of the explore steps. What it makes of them
is written down before it is run. Knows nothing of weights or of the cluster. Invariant: a choice is a function of the
results of steps 1..known and of the step's number, so where `known` is one of the step, a run repeats itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import torch

from rftdask.algorithm.names import build
from rftdask.algorithm.selectors import DifficultyRule
from rftdask.buffer.batches.groups import first_copies
from rftdask.buffer.log.log import ExperienceLog
from rftdask.buffer.log.schema import Status
from rftdask.buffer.log.shard import ShardName, done_batches
from rftdask.config.schema.buffer import DataSelectorConfig, TasksetConfig
from rftdask.data.task_schedule import TaskRef
from rftdask.data.tasksets import Taskset
from rftdask.errors import DamagedError, DataError
from rftdask.explorer.chosen_tasks import Choices
from rftdask.explorer.task_order import taskset_spec
from rftdask.storage import Storage


def difficulty_rule(selector: DataSelectorConfig) -> DifficultyRule:
    """The rule with the selector's arguments. Raises: DataError: one that it does not take."""
    args = {"seed": selector.seed, **selector.kwargs}
    try:
        return build("selector", "difficulty_based", {"difficulty_based": DifficultyRule}, args)
    except ValueError as error:
        raise DataError(f"data_selector.kwargs: {error}") from error


class LearnedOrder:
    """Chooses the tasks of each explore step of one run.

    Example:
        order = LearnedOrder(storage, log, taskset, batch_size=32, batches_per_step=4, repeat_times=8)
        order.tasks(step=5, known=3)
    """

    def __init__(
        self,
        storage: Storage,
        log: ExperienceLog,
        config: TasksetConfig,
        *,
        batch_size: int,
        batches_per_step: int,
        repeat_times: int,
    ) -> None:
        """Raises: DataError: the columns of the pass rates are missing, or an argument of the selector is wrong."""
        self._rule = difficulty_rule(config.data_selector)
        numbers = Taskset(taskset_spec(config)).numbers(config.data_selector.feature_keys)
        self._state = self._rule.initial(torch.tensor(numbers, dtype=torch.float64))
        self._folded = 0
        """Explore steps whose results are in the state."""
        self._log = log
        self._choices = Choices(storage)
        self._batch_size = batch_size
        self._batches_per_step = batches_per_step
        self._repeat_times = repeat_times
        self._last: tuple[int, list[TaskRef]] = (0, [])

    def tasks(self, step: int, known: int) -> list[TaskRef] | None:
        """The tasks of `step`, chosen by the results of steps 1..known unless it is chosen already.

        Each step is an epoch of its own: a task chosen again is another. None: results have gone missing; their rollout
        batches run again first.
        """
        if self._last[0] == step:
            return self._last[1]
        tasks = self._choices.read(step)
        if tasks is None:
            if not self._learn(known):
                return None
            chosen = self._rule.select(self._state, step, self._batch_size).tolist()
            refs = [TaskRef(0, step - 1, index) for index in chosen]
            tasks = self._choices.settle(step, refs, learned_from=self._folded)
        self._last = (step, tasks)
        return tasks

    def _learn(self, known: int) -> bool:
        """Fold the results of the steps up to `known`; whether they are all there."""
        shards: dict[int, list[ShardName]] = {}
        if known > self._folded:
            for name in self._log.shards(self._folded + 1):
                shards.setdefault(name.explore_step, []).append(name)
        for step in range(self._folded + 1, known + 1):
            read = [(name, table) for name in shards.get(step, []) if (table := self._read(name)) is not None]
            if len(done_batches(name for name, _ in read)) < self._batches_per_step:
                return False
            whole = first_copies(read)
            rates = pass_rates(whole, self._repeat_times)
            self._state = self._rule.updated(
                self._state, torch.tensor(list(rates), dtype=torch.int64), torch.tensor(list(rates.values()))
            )
            self._folded = step
        return True

    def _read(self, name: ShardName) -> pa.Table | None:
        try:
            return self._log.read(name)
        except DamagedError as error:
            self._log.quarantine(name, str(error))
            return None


def pass_rates(tables: Iterable[pa.Table], repeat_times: int) -> dict[int, float]:
    """Share of passed rollouts by row of the task, in order of the row; tasks without a scored rollout are not there.

    A rollout passes by its metric accuracy, else by a reward above 0. Failed rollouts and the greedy one do not count.
    """
    passed: dict[int, list[float]] = {}
    for table in tables:
        columns = (table.column(name).to_pylist() for name in ("task_index", "rollout", "status", "reward", "metrics"))
        for index, rollout, status, reward, metrics in zip(*columns, strict=True):
            known = Status(status).trainable or status == Status.FILTERED  # an operator's verdict hides no answer
            if rollout < repeat_times and reward is not None and known:
                accuracy = dict(metrics).get("accuracy", float(reward > 0))
                passed.setdefault(index, []).append(min(1.0, max(0.0, accuracy)))
    return {index: sum(values) / len(values) for index, values in sorted(passed.items())}
