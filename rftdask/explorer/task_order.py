"""Tasks of each explore step: a function of its number or, for selectors that learn, of earlier results.

Invariant: the order is a function of the config, the rows, and the results of the steps that it may use, so a resumed
run has the same order. This module does not know weights or workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from rftdask.algorithm.selectors import Selector, make_selector
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
    Example: fixed_order(tasksets, {"gsm8k": 7473}, batch_size=32)(1)
    """
    selectors = [make_selector(taskset.data_selector, plugin_dirs) for taskset in tasksets]
    return partial(
        explore_tasks,
        sizes=tuple(sizes[taskset.name] for taskset in tasksets),
        batch_size=batch_size,
        orders=tuple(
            partial(selector.order, _features(taskset, selector, sizes[taskset.name]))
            for taskset, selector in zip(tasksets, selectors, strict=True)
        ),
        # The checks of the config make sure that these are the same for all tasksets.
        seed=next((t.data_selector.seed for t, s in zip(tasksets, selectors, strict=True) if s.seeded), 0),
        epoch_each_step=any(selector.epoch_each_step for selector in selectors),
    )


def _features(taskset: TasksetConfig, selector: Selector, size: int) -> npt.NDArray[np.float64]:
    # [size, F] numbers of the columns of `feature_keys`; F is 0 for a selector that reads none.
    if not selector.features:
        return np.empty((size, 0))
    return np.array(Taskset(taskset).numbers(taskset.data_selector.feature_keys), np.float64)
