"""Task order: which tasks an explore step runs, as a function of its number or, for one selector, of what was learned.

Knows neither weights nor workers. Invariant: the order is a function of the config and of the rows (and of the results
of the steps that it may know of), so a resumed run has the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from rftdask.buffer.log.log import ExperienceLog
from rftdask.config import Config
from rftdask.config.schema.buffer import TasksetConfig
from rftdask.data.task_schedule import Order, Selector, TaskRef, explore_tasks
from rftdask.data.tasksets import Taskset
from rftdask.storage import Storage


class TaskOrder(Protocol):
    """Chooses the tasks of explore steps."""

    def tasks(self, step: int, known: int) -> list[TaskRef] | None:
        """The `batch_size` tasks of `step`; None: they cannot be chosen before results that went missing are back.

        known: last explore step whose results may have a part in the choice.
        """
        ...


class FixedOrder:
    """The order of training tasksets whose selectors go together: a pure function of the step's number.

    Example: FixedOrder(tasksets, {"gsm8k": 7473}, batch_size=32).tasks(step=1, known=0)
    """

    def __init__(self, tasksets: Sequence[TasksetConfig], sizes: Mapping[str, int], batch_size: int) -> None:
        """Reads the rows of tasksets that are ordered by their columns.

        Args: sizes: tasks by name of the taskset.
        Raises: DataError: a column of `feature_keys` is missing or holds something else than numbers.
        """
        self._batch_size = batch_size
        self._sizes = tuple(sizes[taskset.name] for taskset in tasksets)
        self._selector: Selector = "sequential"
        self._seed = 0
        self._orders: tuple[Order | None, ...] | None = None
        """For each taskset an order that takes the place of the selector's, or None."""
        selectors = [taskset.data_selector for taskset in tasksets]
        if any(selector.selector_type == "random" for selector in selectors):
            self._selector, self._seed = "random", selectors[0].seed  # which goes with no other, see the config's rules
            return
        shuffle_seeds = [selector.seed for selector in selectors if selector.selector_type == "shuffle"]
        if shuffle_seeds:
            self._selector, self._seed = "shuffle", shuffle_seeds[0]
        self._orders = tuple(
            None if taskset.data_selector.selector_type == self._selector else _own_order(taskset, sizes[taskset.name])
            for taskset in tasksets
        )

    def tasks(self, step: int, known: int) -> list[TaskRef]:
        return explore_tasks(
            step,
            sizes=self._sizes,
            batch_size=self._batch_size,
            selector=self._selector,
            seed=self._seed,
            orders=self._orders,
        )


def make_task_order(storage: Storage, log: ExperienceLog, config: Config, sizes: Mapping[str, int]) -> TaskOrder:
    """The order of a stage's training tasks. Raises: DataError: a selector does not fit its taskset's columns."""
    tasksets = [taskset for taskset in config.buffer.explorer_input.train_tasksets if taskset.name in sizes]
    if any(taskset.data_selector.selector_type == "difficulty_based" for taskset in tasksets):
        # Late: it needs torch, which the driver does without otherwise.
        from rftdask.explorer.difficulty import LearnedOrder

        return LearnedOrder(
            storage,
            log,
            tasksets[0],  # the only one, by the config's rules
            batch_size=config.buffer.batch_size,
            units_per_step=config.units_per_step,
            repeat_times=config.algorithm.repeat_times,
        )
    return FixedOrder(tasksets, sizes, config.buffer.batch_size)


def _own_order(config: TasksetConfig, size: int) -> Order:
    selector = config.data_selector
    if selector.selector_type == "sequential":
        return np.arange(size)
    # Late: torch takes seconds to import, and most runs need none of it here.
    import torch

    from rftdask.algorithm.selectors import easy_to_hard

    numbers = Taskset(config).numbers(selector.feature_keys)
    order: Order = easy_to_hard(torch.tensor(numbers, dtype=torch.float64)).numpy()
    return order
