"""Dataset source: batches of rows of a dataset, and the demonstrations that batches of rollouts hold beside them.

It knows neither files nor tokenizers: a function gives the rows as tokens (data/supervised.py). Invariant: the rows of
step k are a function of the dataset, the seed and k, so no cursor has to be kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rftdask.buffer.batches.batch import TrainingBatch, supervised_batch
from rftdask.buffer.batches.ledger import Fence, Ledger, LedgerEntry, Rows
from rftdask.buffer.batches.source import BatchSource
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
            # Keyed by the epoch and not drawn on: a resumed run jumps into any epoch without walking the ones before.
            key = np.array([self._seed % 2**64, epoch], dtype=np.uint64)
            random = np.random.Generator(np.random.Philox(key=key))
            self._epoch, self._order = epoch, random.permutation(self.num_rows)
        return int(self._order[within])


class Demonstrations:
    """`per_batch` rows of a dataset for every step, trained beside the rollouts (sample strategy mix) or alone."""

    def __init__(
        self, read: ReadRows, fingerprint: str, order: RowOrder, per_batch: int, sequences_per_row: int = 1
    ) -> None:
        """sequences_per_row: those that `read` gives for each row; 2 for pairs."""
        self.source = f"dataset:{fingerprint}"
        self._read = read
        self._order = order
        self._per_batch = per_batch
        self._sequences_per_row = sequences_per_row

    def rows(self, step: int) -> Rows:
        """The rows of a step, to be written into the ledger."""
        first = (step - 1) * self._per_batch
        return Rows(self.source, tuple(self._order.at(place) for place in range(first, first + self._per_batch)))

    def batch(self, rows: Rows, step: int, places: Sequence[int] | None = None) -> TrainingBatch:
        """Read the rows that the ledger names, or those at `places` of them. Raises: DataError: of another dataset."""
        if rows.source != self.source:
            raise DataError(f"the ledger has demonstrations of {rows.source}, the dataset is {self.source} now")
        first = (step - 1) * self._per_batch  # a row of another epoch is another uid
        places = range(len(rows.rows)) if places is None else places
        numbers = [rows.rows[i] for i in places]
        uids = [f"{self.source}/{first + i}/{n}" for i, n in zip(places, numbers, strict=True)]
        count = self._sequences_per_row
        if count > 1:
            uids = [f"{uid}/{sequence}" for uid in uids for sequence in range(count)]
        return supervised_batch(self._read(numbers), uids, count)


class DatasetSource(BatchSource):
    """Batches of supervised rows: batch k is the k-th run of `batch_size` rows of the walk over the dataset.

    Rows that do not fill a last batch are not trained.
    """

    def __init__(
        self,
        rows: ReadRows,
        num_rows: int,
        fingerprint: str,
        ledger: Ledger,
        *,
        batch_size: int,
        total_epochs: int,
        shuffle_seed: int | None,
        group_size: int = 1,
    ) -> None:
        """`shuffle_seed` None keeps the order of the dataset; group_size: sequences that `rows` gives for each row."""
        self._rows = Demonstrations(rows, fingerprint, RowOrder(num_rows, shuffle_seed), batch_size, group_size)
        self._ledger = ledger
        self._fence = Fence(ledger)
        self._num_steps = num_rows * total_epochs // batch_size

    def state_dict(self) -> dict[str, object]:
        """The dataset's fingerprint: a checkpoint does not go on with another one."""
        return {"source": self._rows.source}

    def load_state_dict(self, state: dict[str, object]) -> None:
        now = self._rows.source
        if state["source"] != now:
            raise DataError(f"the dataset has changed since the checkpoint: was {state['source']}, is {now}")

    def entry(self, step: int, patience_s: float = math.inf) -> LedgerEntry | None:
        entry = self._fence.read(step)
        if entry is None and step <= self._num_steps:
            entry = LedgerEntry(step, self._ledger.lineage, (self._rows.rows(step),))
            self._ledger.write(entry)
        return entry

    def read(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> TrainingBatch:
        """`places`: of rows of the dataset; each gives `group_size` sequences."""
        if any(rows.source != self._rows.source for rows in entry.use):
            path, was = self._ledger.path(entry.step), entry.use[0].source
            raise DataError(f"{path} was written for {was}, the dataset is {self._rows.source} now")
        return self._rows.batch(entry.use[0], entry.step, places)
