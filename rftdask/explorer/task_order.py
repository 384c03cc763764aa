"""Tasks of each explore step: a function of its number or, for selectors that learn, of earlier results.

Invariant: a resumed run has the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from rftdask.algorithm.selectors import make_selector
from rftdask.buffer.log.log import ExperienceLog
from rftdask.config import Config
from rftdask.config.plugins import trait
from rftdask.config.schema.buffer import TasksetConfig
from rftdask.data.task_schedule import TaskRef, explore_tasks
from rftdask.data.tasksets import Taskset
from rftdask.storage import Storage

TaskOrder = Callable[[int, int], list[TaskRef] | None]
"""(step, last explore step whose results may influence the choice) -> the `batch_size` tasks of the step. None: lost
results that the choice needs must be made again first."""


def make_task_order(storage: Storage, log: ExperienceLog, config: Config, sizes: Mapping[str, int]) -> TaskOrder:
    """Order of a stage's training tasks. Raises: DataError: a selector does not fit its taskset's columns."""
    tasksets = [taskset for taskset in config.buffer.explorer_input.train_tasksets if taskset.name in sizes]
    if any(trait(taskset.data_selector.selector, "learns") for taskset in tasksets):
        # Late: it imports torch, which the driver needs only here.
        from rftdask.explorer.difficulty import LearnedOrder

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
