"""Schedule: which tasks an explore step runs. Pure; knows sizes, not tasks.

Invariant: the tasks of a step are a function of the arguments alone, so a resumed or repeated step runs the same tasks
and no cursor has to be kept. No (taskset, epoch, index) ever occurs twice in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TaskRef:
    """One task of a run."""

    taskset_number: int
    """Position of the taskset in `sizes`."""
    epoch: int
    index: int
    """Row in the taskset."""


EpochOrder = Callable[[int, np.random.BitGenerator], _Numbers]
"""(epoch, random) -> the rows of a taskset, each once, in the order in which the epoch takes them."""


def explore_tasks(
    step: int,
    *,
    sizes: Sequence[int],
    batch_size: int,
    orders: Sequence[EpochOrder],
    seed: int,
    epoch_each_step: bool = False,
) -> list[TaskRef]:
    """The `batch_size` tasks of explore step `step`, counted from 1.

    The steps run through epoch 0, then epoch 1, and so on; a step may end one epoch and begin the next. Several
    tasksets are interleaved in proportion to their sizes, so every step holds about the same mix.

    Args:
        sizes: number of tasks in each taskset, all > 0.
        orders: one for each taskset. They are functions of their arguments: what they return is kept for a while.
        epoch_each_step: each step opens an epoch of its own (several, if it is larger than all tasks together): a task
            drawn again is another.
    Raises: ValueError: step, batch_size or a size below 1; an order that is none.
    """
    if step < 1 or batch_size < 1 or not sizes or min(sizes) < 1:
        raise ValueError(f"step {step}, batch_size {batch_size} and sizes {list(sizes)} must all be at least 1")
    total = sum(sizes)
    # Rounded up: a step larger than all tasks together takes as many epochs.
    epochs_per_step = -(-batch_size // total)
    # Positions of the whole run, epoch after epoch: a step is a window on them.
    first = (step - 1) * (epochs_per_step * total if epoch_each_step else batch_size)
    tasks = []
    for position in range(first, first + batch_size):
        # A step may end one epoch and begin the next.
        epoch, slot = divmod(position, total)
        tasksets, indices = _epoch_order(tuple(sizes), tuple(orders), seed, epoch)
        tasks.append(TaskRef(int(tasksets[slot]), epoch, int(indices[slot])))
    return tasks


@lru_cache(maxsize=8)  # a step needs one or two epochs; one epoch of a million tasks takes 16 MB
def _epoch_order(
    sizes: tuple[int, ...], orders: tuple[EpochOrder, ...], seed: int, epoch: int
) -> tuple[_Numbers, _Numbers]:
    """Taskset number and row of every slot of an epoch, each [sum(sizes)] int64."""
    rows = []
    for number, (size, order) in enumerate(zip(sizes, orders, strict=True)):
        # Philox, whose stream is promised not to change with the version of numpy.
        random = np.random.Philox(np.random.SeedSequence((seed % 2**64, epoch, number)))
        rows.append(np.asarray(order(epoch, random), np.int64))
        # Checked, since a plug-in's order that left a task out would go unseen for ever.
        if not np.array_equal(np.sort(rows[-1]), np.arange(size)):
            found = rows[-1][:10].tolist()
            raise ValueError(f"an order of {size} tasks must hold each of 0 .. {size - 1} once, got {found}")
    # Task j of a taskset of n tasks belongs at (j + 1/2) / n of the epoch.
    places = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes])
    # Stable: tasks that belong at the same place come in the order of their tasksets.
    slots = np.argsort(places, kind="stable")
    tasksets = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)[slots]
    return tasksets, np.concatenate(rows)[slots]
