"""Schedule: which tasks an explore step runs. Pure; knows the sizes of tasksets, not their tasks.

Invariant: the tasks of a step depend only on the arguments, so a resumed or repeated step runs the same tasks and no
cursor is stored. No (taskset, epoch, index) occurs twice in a run.
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
"""(epoch, random) -> all rows of a taskset, each once, in their order in the epoch."""


def explore_tasks(
    step: int,
    *,
    sizes: Sequence[int],
    batch_size: int,
    orders: Sequence[EpochOrder],
    seed: int,
    epoch_each_step: bool = False,
) -> list[TaskRef]:
    """Return the `batch_size` tasks of explore step `step`, counted from 1.

    The steps run through epoch 0, then epoch 1, and so on; a step may end one epoch and begin the next. Several
    tasksets are interleaved in proportion to their sizes, so every step has about the same mix.

    Args:
        sizes: number of tasks in each taskset, all > 0.
        orders: one pure function per taskset; results are cached.
        epoch_each_step: each step begins a new epoch (several, if it is larger than all tasks together), so that a task
            drawn again counts as another task.
    Raises: ValueError: step, batch_size or a size below 1; an order that is not a permutation.
    """
    if step < 1 or batch_size < 1 or not sizes or min(sizes) < 1:
        raise ValueError(f"step {step}, batch_size {batch_size} and sizes {list(sizes)} must all be at least 1")
    total = sum(sizes)
    epochs_per_step = -(-batch_size // total)  # rounded up
    # A step is a window on the positions of all epochs, one after another.
    first = (step - 1) * (epochs_per_step * total if epoch_each_step else batch_size)
    tasks = []
    for position in range(first, first + batch_size):
        epoch, slot = divmod(position, total)
        tasksets, indices = _epoch_order(tuple(sizes), tuple(orders), seed, epoch)
        tasks.append(TaskRef(int(tasksets[slot]), epoch, int(indices[slot])))
    return tasks


@lru_cache(maxsize=8)  # a step needs one or two epochs; one epoch of a million tasks takes 16 MB
def _epoch_order(
    sizes: tuple[int, ...], orders: tuple[EpochOrder, ...], seed: int, epoch: int
) -> tuple[_Numbers, _Numbers]:
    """Return the taskset number and the row of every slot of an epoch, each [sum(sizes)] int64."""
    rows = []
    for number, (size, order) in enumerate(zip(sizes, orders, strict=True)):
        # numpy guarantees that the stream of Philox does not change between versions.
        random = np.random.Philox(np.random.SeedSequence((seed % 2**64, epoch, number)))
        rows.append(np.asarray(order(epoch, random), np.int64))
        # Otherwise nobody would notice that the order of a plug-in leaves out a task.
        if not np.array_equal(np.sort(rows[-1]), np.arange(size)):
            first_rows = rows[-1][:10].tolist()
            raise ValueError(f"an order of {size} tasks must hold each of 0 .. {size - 1} once, got {first_rows}")
    # Task j of a taskset of n tasks belongs at (j + 1/2) / n of the epoch.
    places = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes])
    # Stable: ties are in the order of the tasksets.
    slots = np.argsort(places, kind="stable")
    tasksets = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)[slots]
    return tasksets, np.concatenate(rows)[slots]
