"""Demonstrations: rows of a dataset that every batch holds beside its rollouts, and the order in which a dataset is
read. Invariant: the rows of step k are a function of the dataset, the seed and k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rftdask.buffer.batches.batch import TrainingBatch, supervised_batch
from rftdask.buffer.batches.ledger import Rows
from rftdask.errors import DataError

ReadRows = Callable[[Sequence[int]], list[tuple[Sequence[int], int, Sequence[bool] | None]]]
"""Row numbers -> (tokens, prompt length, loss mask of the response or None for all of it)."""


class RowOrder:
    """An endless walk over the rows of a dataset: each once in an epoch, every epoch in a new order.

    Example: [order.at(place) for place in range(num_rows)] is the first epoch
    """

    def __init__(self, num_rows: int, seed: int | None) -> None:
        """seed: of the order; None keeps that of the dataset. Raises: DataError: there are no rows."""
        if num_rows < 1:
            raise DataError("the dataset is empty: there is nothing to train")
        self.num_rows = num_rows
        self._seed = seed
        self._epoch = -1
        self._order = np.arange(num_rows)

    def at(self, place: int) -> int:
        """Row number at a place, counted from 0 through all epochs."""
        epoch, within = divmod(place, self.num_rows)
        if self._seed is not None and epoch != self._epoch:
            key = np.array([self._seed % 2**64, epoch], dtype=np.uint64)
            random = np.random.Generator(np.random.Philox(key=key))
            self._epoch, self._order = epoch, random.permutation(self.num_rows)
        return int(self._order[within])


class Demonstrations:
    """`per_batch` rows of a dataset for every step."""

    def __init__(self, read: ReadRows, fingerprint: str, order: RowOrder, per_batch: int) -> None:
        self._read = read
        self._source = f"dataset:{fingerprint}"
        self._order = order
        self._per_batch = per_batch

    def rows(self, step: int) -> Rows:
        """The rows of a step, to be written into the ledger."""
        first = (step - 1) * self._per_batch
        return Rows(self._source, tuple(self._order.at(place) for place in range(first, first + self._per_batch)))

    def batch(self, rows: Rows, step: int, within: Sequence[int] | None = None) -> TrainingBatch:
        """The rows that the ledger names, or those at `within` of them. Raises: DataError: they are of another
        dataset.
        """
        if rows.source != self._source:
            raise DataError(f"the ledger has demonstrations of {rows.source}, the dataset is {self._source} now")
        first = (step - 1) * self._per_batch
        places = range(len(rows.rows)) if within is None else within
        numbers = [rows.rows[i] for i in places]
        uids = [f"{self._source}/{first + i}/{n}" for i, n in zip(places, numbers, strict=True)]
        return supervised_batch(self._read(numbers), uids)
