"""Source: supplies the batches of a trainer. One rank forms the batch of a step and records it in the ledger; all ranks
then read the rows that the ledger names.

Invariant: the batch of a step is its ledger entry. If there is none yet, the batch is formed and recorded before it is
returned. So a resumed trainer gets exactly the same batches, and two trainers cannot both form one. The sources are
log_source.py (rollouts), and here `ReplayedSource` (batches of another lineage) and `DatasetSource` (supervised rows).

The supervised rows of step k are a function of the dataset, the seed and k, so no cursor is stored. A function
tokenizes them (data/supervised.py); this module knows neither files nor tokenizers.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rftdask.buffer.batches.batch import (
    SupervisedRow,
    TrainingBatch,
    batch_from_table,
    column_of,
    numbers_of,
    supervised_batch,
)
from rftdask.buffer.batches.ledger import Fence, Ledger, LedgerEntry, Rows
from rftdask.buffer.log.columns import SCHEMA
from rftdask.errors import DataError, EmptyBatchError, FencedError

log = logging.getLogger(__name__)

BASELINE = "baseline"
"""Reason of rows that are not trained because their reward is the baseline of their group."""
BAD_ROW = "bad_row"
"""Beginning of the reason of rows of a dataset that cannot be used; the error follows."""


class BatchNotReady(Exception):
    """The requested batch is not complete yet; try again."""


class BatchSource(ABC):
    """Forms the batch of each step and reads it.

    Example:
        entry = source.entry(7)  # formed and recorded, by one rank
        batch = source.read(entry)  # on every rank, the rows that it trains
    """

    @abstractmethod
    def entry(self, step: int, patience_s: float = math.inf) -> LedgerEntry | None:
        """Return the ledger entry of `step` (1-based, requested in order); form and record it if it does not exist.

        None: no more batches will come. A recorded entry survives a crash: the next trainer gets the same one.
        Raises: BatchNotReady: not ready after `patience_s` seconds, so that the caller can do something else meanwhile;
        WaitTimeout: the source's own deadline passed; FencedError: another trainer works on this lineage.
        """

    @abstractmethod
    def read(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> TrainingBatch:
        """Read the rows that the entry trains, or those at `places` of its `use` (counted across it from 0, ascending).

        The entry may have been formed by another process. Raises: DamagedError; DataError: another dataset.
        """

    def look_ahead(self, step: int) -> LedgerEntry | None:
        """Take in new data for the batch of `step`, the next to be formed, and return what it would train now.

        The result is a forecast, before filters; None: the batch is not complete. Decides nothing. May be called from
        any thread while no other call is running. Raises: as `entry`, except timeouts.
        """
        return None

    def read_ahead(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> None:  # noqa: B027
        """Load what `read` will need for this entry, while there is room. From any thread. Raises: as `read`."""

    def state_dict(self) -> dict[str, object]:
        """Return the state for a checkpoint, after the last entry returned, as JSON types. The base has none."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:  # noqa: B027  # a source without state loads none
        """Continue from a `state_dict`."""


class BatchFilter:
    """Drops rows of the selected groups, masks others, and sets rewards. This base changes nothing.

    A filter is pure: its results depend only on the rows and the step, so that a replay of the ledger trains the same
    numbers. Invariant: the reward of a row does not depend on the other rows.
    """

    columns: tuple[str, ...] = ()
    """Columns that the filter reads in addition to `BATCH_COLUMNS` and the status."""

    def reasons(self, table: pa.Table, step: int) -> list[str]:
        """Return the drop reason of each row at this step; "" keeps it.

        table: trainable rows of whole groups, schema of experiences.
        """
        return [""] * len(table)

    def rewards(self, table: pa.Table) -> np.ndarray:
        """Return the rewards to train with, [N] float32."""
        return numbers_of(table.column("reward"))

    def masked(self, table: pa.Table) -> np.ndarray:
        """Return the rows whose tokens are not trained although their rewards count, [N] bool."""
        return np.zeros(len(table), bool)


def with_masks(table: pa.Table, masked: np.ndarray) -> pa.Table:
    """Return the rows with all tokens of the `masked` ones ([N] bool) masked."""
    if not masked.any():
        return table
    column = table.schema.get_field_index("loss_mask_runs")
    lengths = pc.subtract(pc.list_value_length(table.column("tokens")), table.column("prompt_length"))
    # The first run is trained, so it is empty; the second run is the whole response.
    runs = [
        [0, length] if is_masked else old_runs
        for length, is_masked, old_runs in zip(lengths.to_pylist(), masked, table[column].to_pylist(), strict=True)
    ]
    field = table.schema.field(column)
    return table.set_column(column, field, pa.array(runs, field.type))


def with_rewards(table: pa.Table, rewards: np.ndarray) -> pa.Table:
    """Return the rows with `rewards` ([N] float32) instead of the recorded ones."""
    column = table.schema.get_field_index("reward")
    return table.set_column(column, table.schema.field(column), column_of(rewards.astype(np.float32, copy=False)))


class ReplayedSource(BatchSource):
    """Batches of the ledger of `parent`, entry by entry, for the lineage of `ledger`.

    Invariant: an entry is copied unchanged into the ledger of this lineage before it is returned.
    """

    def __init__(self, parent: Ledger, ledger: Ledger, rows: BatchSource) -> None:
        """rows: used only to read the rows of entries; its method `entry` is never called."""
        self._parent = parent
        self._ledger = ledger
        self._fence = Fence(ledger)
        self._rows = rows

    def entry(self, step: int, patience_s: float = math.inf) -> LedgerEntry | None:
        """Return the parent's entry under this lineage's name; None at its end.

        Raises: FencedError: this lineage trained another batch at this step.
        """
        original = self._parent.read(step)
        if original is None:
            return None
        # Steps have the same numbers in both lineages, so learning rate schedules agree.
        entry = replace(original, lineage=self._ledger.lineage)
        known = self._fence.read(step)
        if known is None:
            self._ledger.write(entry)
        elif known != entry:
            raise FencedError(
                f"{self._ledger.path(step)} differs from what lineage {self._parent.lineage} trained at step {step}; "
                "replay into a lineage of another name"
            )
        return entry

    def read(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> TrainingBatch:
        return self._rows.read(entry, places)

    def look_ahead(self, step: int) -> LedgerEntry | None:
        return self._parent.read(step)

    def read_ahead(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> None:
        self._rows.read_ahead(entry, places)


# ---- supervised rows

ReadRows = Callable[[Sequence[int]], Sequence[SupervisedRow]]
"""Row numbers -> their token sequences."""


def random_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return all row numbers in an order drawn for this epoch, [num_rows] int64."""
    # Keyed by the epoch: a resumed run enters any epoch without drawing those before it.
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(num_rows)


class RowOrder:
    """Endless order of the rows of a dataset: each row once per epoch, every epoch shuffled anew.

    Example: [order.at(place) for place in range(num_rows)] is the first epoch
    """

    def __init__(self, num_rows: int, seed: int | None) -> None:
        """seed: seed of the shuffle; None keeps the order of the dataset. Raises: DataError: there are no rows."""
        if num_rows < 1:
            raise DataError("the dataset is empty: there is nothing to train")
        self.num_rows = num_rows
        self._seed = seed
        self._epoch = -1
        self._order = np.arange(num_rows)

    def at(self, place: int) -> int:
        """Return the row number at `place`, counted from 0 across all epochs."""
        # Only the order of the last epoch is cached: places are requested in order.
        epoch, within = divmod(place, self.num_rows)
        if self._seed is not None and epoch != self._epoch:
            self._epoch, self._order = epoch, random_order(self.num_rows, self._seed, epoch)
        return int(self._order[within])


class Demonstrations:
    """`per_batch` rows of a dataset for every step, trained with rollouts (sample strategy mix) or without."""

    def __init__(
        self, read: ReadRows, fingerprint: str, order: RowOrder, per_batch: int, sequences_per_row: int = 1
    ) -> None:
        """sequences_per_row: number of sequences that `read` returns per row; 2 for pairs."""
        self.source = f"dataset:{fingerprint}"
        self._read = read
        self._order = order
        self._per_batch = per_batch
        self._sequences_per_row = sequences_per_row
        self._formed = 0, tuple[Rows, ...](), tuple[Rows, ...]()  # the last step, and its rows
        self._sequences: dict[int, Sequence[SupervisedRow]] = {}  # of rows of this step, until `batch` returns them

    def rows(self, step: int) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
        """Read the rows of a step. Returns: those to train and those to drop, to be recorded in the ledger."""
        if self._formed[0] != step:
            self._sequences, errors = {}, dict[int, str]()
            first = (step - 1) * self._per_batch
            numbers = [self._order.at(place) for place in range(first, first + self._per_batch)]
            for number in dict.fromkeys(numbers):
                try:
                    self._sequences[number] = self._read([number])
                except DataError as error:
                    errors[number] = str(error)
                    log.warning("step %d does not train a row that cannot be used: %s", step, error)
            usable = tuple(number for number in numbers if number not in errors)
            drop = (Rows(self.source, (n,), f"{BAD_ROW}: {errors[n]}") for n in numbers if n in errors)
            self._formed = step, (Rows(self.source, usable),) if usable else (), tuple(drop)
        return self._formed[1:]

    def batch(self, rows: Rows, step: int, places: Sequence[int] | None = None) -> TrainingBatch:
        """Read the rows that the ledger names, or those at `places` of them. Raises: DataError: another dataset."""
        if rows.source != self.source:
            raise DataError(f"the ledger has demonstrations of {rows.source}, the dataset is now {self.source}")
        first = (step - 1) * self._per_batch
        places = range(len(rows.rows)) if places is None else places
        numbers = [rows.rows[i] for i in places]
        # The uid contains the place in the order: a row in another epoch is another experience.
        uids = [f"{self.source}/{first + i}/{n}" for i, n in zip(places, numbers, strict=True)]
        count = self._sequences_per_row
        if count > 1:
            uids = [f"{uid}/{sequence}" for uid in uids for sequence in range(count)]
        sequences = [row for n in numbers for row in self._sequences.pop(n, None) or self._read([n])]
        return supervised_batch(sequences, uids, count)


class DatasetSource(BatchSource):
    """Batches of supervised rows: batch k is the k-th run of `batch_size` rows of a `RowOrder`.

    Rows that do not fill a last batch are not trained. Rows that cannot be used leave their batch smaller.
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
        total_steps: int | None = None,
        max_bad_rows: int = 0,
    ) -> None:
        """
        Args:
            shuffle_seed: None keeps the order of the dataset.
            group_size: number of sequences that `rows` returns per row.
            total_steps: number of batches, over as many epochs as needed; replaces `total_epochs`. None: by epochs.
            max_bad_rows: largest number of rows of a batch that trains nothing because none of them can be used.
        """
        self._rows = Demonstrations(rows, fingerprint, RowOrder(num_rows, shuffle_seed), batch_size, group_size)
        self._ledger = ledger
        self._fence = Fence(ledger)
        self._max_bad_rows = max_bad_rows
        self._num_steps = num_rows * total_epochs // batch_size if total_steps is None else total_steps
        # (use, step, places) of the rows that were read ahead, and their batch.
        self._ahead: tuple[object, TrainingBatch] | None = None

    def state_dict(self) -> dict[str, object]:
        """Return the fingerprint of the dataset: a checkpoint cannot be resumed with another one."""
        return {"source": self._rows.source}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """See BatchSource. Raises: DataError: the dataset has changed."""
        now = self._rows.source
        if state["source"] != now:
            raise DataError(f"the dataset has changed since the checkpoint: was {state['source']}, is {now}")

    def entry(self, step: int, patience_s: float = math.inf) -> LedgerEntry | None:
        """See BatchSource; never waits: the rows of a step are known from its number.

        Raises: EmptyBatchError: no row of the step can be used.
        """
        # Recorded although it follows from its number: two trainers must not both train the step.
        entry = self._fence.read(step)
        if entry is None and step <= self._num_steps:
            use, drop = self._rows.rows(step)
            if not use and len(drop) > self._max_bad_rows:
                raise EmptyBatchError(
                    f"batch {step} has nothing to train: none of its {len(drop)} rows can be used; the first one: "
                    f"{drop[0].reason}; fix the data"
                )
            entry = LedgerEntry(step, self._ledger.lineage, use, drop)
            self._ledger.write(entry)
        return entry

    def read(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> TrainingBatch:
        """See BatchSource; `places` count rows of the dataset, each of which gives `group_size` sequences."""
        # The same numbers of another dataset must not be trained for this entry.
        if any(rows.source != self._rows.source for rows in entry.use):
            path, was = self._ledger.path(entry.step), entry.use[0].source
            raise DataError(f"{path} was written for {was}, the dataset is now {self._rows.source}")
        if not entry.use:  # the step was skipped
            return batch_from_table(SCHEMA.empty_table())
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == (entry.use, entry.step, places):
            return ahead[1]
        return self._rows.batch(entry.use[0], entry.step, places)

    def look_ahead(self, step: int) -> LedgerEntry | None:
        if step > self._num_steps:
            return None
        return LedgerEntry(step, self._ledger.lineage, *self._rows.rows(step))

    def read_ahead(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> None:
        if not entry.use or (places is not None and not len(places)):
            return
        batch = self._rows.batch(entry.use[0], entry.step, places)
        self._ahead = ((entry.use, entry.step, places), batch)
