"""Schedule: which tasks an explore step runs. Pure; knows sizes, not tasks.

Invariant: the tasks of a step are a function of the arguments alone, so a resumed or repeated step runs the same tasks
and no cursor has to be kept. No (taskset, epoch, index) ever occurs twice in a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

Selector = Literal["sequential", "shuffle", "random"]
"""sequential: as stored; shuffle: a new order in each epoch; random: a fresh draw without replacement in each step."""

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TaskRef:
    """One task of a run."""

    taskset_number: int
    """Position of the taskset in `sizes`."""
    epoch: int
    index: int
    """Row in the taskset."""


Order = Sequence[int] | _Numbers
"""Rows of a taskset, each once: the order in which every epoch takes them."""


def explore_tasks(
    step: int,
    *,
    sizes: Sequence[int],
    batch_size: int,
    selector: Selector,
    seed: int,
    orders: Sequence[Order | None] | None = None,
) -> list[TaskRef]:
    """The `batch_size` tasks of explore step `step`, counted from 1.

    The steps run through epoch 0, then epoch 1, and so on; a step may end one epoch and begin the next. Several
    tasksets are interleaved in proportion to their sizes, so every step holds about the same mix. With "random" each
    step opens an epoch of its own (several, if it is larger than all tasks together): a task drawn again is another.

    Args:
        sizes: number of tasks in each taskset, all > 0.
        orders: for each taskset an order that takes the place of the selector's, or None; not with "random".
    Raises: ValueError: step, batch_size or a size below 1; an order that is none.
    """
    if step < 1 or batch_size < 1 or not sizes or min(sizes) < 1:
        raise ValueError(f"step {step}, batch_size {batch_size} and sizes {list(sizes)} must all be at least 1")
    if orders is not None and (selector == "random" or len(orders) != len(sizes)):
        raise ValueError(f"orders are for selectors other than random, one for each of {len(sizes)} tasksets")
    given = tuple(None if order is None else np.asarray(order, np.int64).tobytes() for order in orders or ())
    total = sum(sizes)
    epochs_per_step = -(-batch_size // total)
    first = (step - 1) * (epochs_per_step * total if selector == "random" else batch_size)
    tasks = []
    for position in range(first, first + batch_size):
        epoch, slot = divmod(position, total)
        tasksets, indices = _epoch_order(tuple(sizes), selector, seed, epoch, given)
        tasks.append(TaskRef(int(tasksets[slot]), epoch, int(indices[slot])))
    return tasks


def num_explore_steps(sizes: Sequence[int], batch_size: int, total_epochs: int) -> int:
    """Full explore steps in `total_epochs` epochs; the tasks left over are not run."""
    return sum(sizes) * total_epochs // batch_size


@lru_cache(maxsize=8)  # a step needs one or two epochs; one epoch of a million tasks takes 16 MB
def _epoch_order(
    sizes: tuple[int, ...], selector: Selector, seed: int, epoch: int, orders: tuple[bytes | None, ...]
) -> tuple[_Numbers, _Numbers]:
    """Taskset number and row of every slot of an epoch, each [sum(sizes)] int64."""
    if selector == "sequential" and epoch > 0:
        return _epoch_order(sizes, selector, seed, 0, orders)
    rows = [
        _order(size, selector, seed, epoch, number) if order is None else _checked(order, size)
        for number, (size, order) in enumerate(zip(sizes, orders or (None,) * len(sizes), strict=True))
    ]
    # Task j of a taskset of n tasks belongs at (j + 1/2) / n of the epoch.
    places = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes])
    slots = np.argsort(places, kind="stable")
    tasksets = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)[slots]
    return tasksets, np.concatenate(rows)[slots]


def _checked(order: bytes, size: int) -> _Numbers:
    rows = np.frombuffer(order, np.int64)
    if not np.array_equal(np.sort(rows), np.arange(size)):
        raise ValueError(f"an order of {size} tasks must hold each of 0 .. {size - 1} once, got {rows[:10].tolist()}")
    return rows


def _order(size: int, selector: Selector, seed: int, epoch: int, taskset_number: int) -> _Numbers:
    if selector == "sequential":
        return np.arange(size, dtype=np.int64)
    # Raw Philox words, sorted: unlike Generator.permutation, their stream is promised not to change with the version.
    words = np.random.Philox(np.random.SeedSequence((seed % 2**64, epoch, taskset_number))).random_raw(size)
    return np.argsort(words, kind="stable").astype(np.int64)
