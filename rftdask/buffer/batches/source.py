"""Source: where a trainer's batches come from. One rank forms the batch of a step and writes it in the ledger; then, as
a step of its own, every rank reads the rows that the ledger names.

Invariant: the batch of a step is what the ledger says. If it says nothing yet, the batch is formed, written down, and
only then handed out; so a resumed trainer gets the very same batches, and two trainers cannot both form one. The kinds:
log_source.py (rollouts), and here `ReplayedSource` (another lineage's batches) and `DatasetSource` (supervised rows).

The supervised rows of step k are a function of the dataset, the seed and k, so no cursor has to be kept. A function
gives them as tokens (data/supervised.py); neither files nor tokenizers are known here.
"""

from __future__ import annotations

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
from rftdask.buffer.log.schema import SCHEMA
from rftdask.errors import DataError, FencedError

BASELINE = "baseline"
"""Reason of rows that are not trained because their reward is the baseline of their group."""


class NotYet(Exception):
    """The batch that was asked for is not there yet; ask again."""


class BatchSource(ABC):
    """Forms the batch of each step and reads it.

    Example:
        entry = source.entry(7)  # formed and written down, by one rank
        batch = source.read(entry)  # on every rank, of the rows it trains
    """

    @abstractmethod
    def entry(self, step: int, patience_s: float = math.inf) -> LedgerEntry | None:
        """Return the ledger's entry of `step` (1-based; steps are asked for in order), formed and written down now if
        there is none yet; None when there will be no more.

        What is written survives a crash: the next life gets the same entry.
        Raises: NotYet: it did not come in `patience_s`, so that the caller may do something meanwhile; WaitTimeout: it
        did not come in time; FencedError: another trainer works on this lineage.
        """

    @abstractmethod
    def read(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> TrainingBatch:
        """Read the rows that the entry trains, or those at `places` of its `use`, counted through from 0, ascending.

        It needs no entry to have been formed here. Raises: DamagedError; DataError: they are of another dataset.
        """

    def look_ahead(self, step: int) -> LedgerEntry | None:
        """Take up what has come since for the batch of `step`, the next to be formed; what it would train of what is
        there, before filters, as nothing has said yet. None: it is not there.

        It decides nothing. From any thread while no other call is under way. Raises: as `entry`, but for its time.
        """
        return None

    def read_ahead(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> None:  # noqa: B027
        """Keep what `read` will need of such an entry, while there is room. From any thread; raises: as `read`."""

    def state_dict(self) -> dict[str, object]:
        """The state that a checkpoint keeps to go on after the last entry handed out; JSON types. Here none."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:  # noqa: B027  # a source without state loads none
        """Go on where `state_dict` was taken."""


class BatchFilter:
    """Drops rows of the selected groups, masks others, and makes their rewards. This base keeps all as it is.

    A filter is pure: what it says of rows follows from the rows and the step, so that a replay of the ledger trains the
    same numbers. Invariant: a row's reward does not depend on which other rows are there.
    """

    columns: tuple[str, ...] = ()
    """Columns of the rows that it looks at beside `BATCH_COLUMNS` and their status."""

    def reasons(self, table: pa.Table, step: int) -> list[str]:
        """Why each row of whole groups (schema of experiences, trainable rows) is dropped at this step; "" keeps it."""
        return [""] * len(table)

    def rewards(self, table: pa.Table) -> np.ndarray:
        """[N] float32 rewards to train with."""
        return numbers_of(table.column("reward"))

    def masked(self, table: pa.Table) -> np.ndarray:
        """[N] bool: rows of which no token is trained, while their rewards count."""
        return np.zeros(len(table), bool)


def with_masks(table: pa.Table, masked: np.ndarray) -> pa.Table:
    """The rows, those that are `masked` ([N] bool) without a token to train."""
    if not masked.any():
        return table
    column = table.schema.get_field_index("loss_mask_runs")
    # Of the responses, whose tokens the runs count.
    lengths = pc.subtract(pc.list_value_length(table.column("tokens")), table.column("prompt_length"))
    # The first run is trained, so it is empty, and the second is the whole response.
    whole = [[0, length] for length in lengths.to_pylist()]
    # Only the masked rows change: what others had masked of themselves stays.
    runs = [
        own if is_masked else was for own, is_masked, was in zip(whole, masked, table[column].to_pylist(), strict=True)
    ]
    field = table.schema.field(column)
    return table.set_column(column, field, pa.array(runs, field.type))


def with_rewards(table: pa.Table, rewards: np.ndarray) -> pa.Table:
    """The rows with `rewards` ([N] float32) in place of the recorded ones."""
    column = table.schema.get_field_index("reward")
    return table.set_column(column, table.schema.field(column), column_of(rewards.astype(np.float32, copy=False)))


class ReplayedSource(BatchSource):
    """The batches of `parent`'s ledger, entry by entry, for the lineage of `ledger`.

    Invariant: an entry is copied into the ledger of this lineage before it is handed out, and says the same.
    """

    def __init__(self, parent: Ledger, ledger: Ledger, rows: BatchSource) -> None:
        """rows: reads the rows of entries; it forms none."""
        self._parent = parent
        self._ledger = ledger
        self._fence = Fence(ledger)
        self._rows = rows

    def entry(self, step: int, patience_s: float = math.inf) -> LedgerEntry | None:
        """See BatchSource; the parent's entry under this lineage's name. Raises: FencedError: this lineage trained
        others.
        """
        # None at its end: the replay trains what the parent has, and not a step more.
        original = self._parent.read(step)
        if original is None:
            return None
        # The numbers of the steps are the same in both lineages, so schedules of the learning rate are too.
        entry = replace(original, lineage=self._ledger.lineage)
        known = self._fence.read(step)
        if known is None:
            self._ledger.write(entry)
        elif known != entry:
            raise FencedError(
                f"{self._ledger.path(step)} is not what lineage {self._parent.lineage} trained at step {step}; "
                "replay into a lineage of another name"
            )
        return entry

    def read(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> TrainingBatch:
        """See BatchSource."""
        return self._rows.read(entry, places)

    def look_ahead(self, step: int) -> LedgerEntry | None:
        """See BatchSource; the parent's entry."""
        return self._parent.read(step)

    def read_ahead(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> None:
        """See BatchSource."""
        self._rows.read_ahead(entry, places)


# ---- supervised rows

ReadRows = Callable[[Sequence[int]], Sequence[SupervisedRow]]
"""Row numbers -> the sequences that they are."""


def random_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """[num_rows] int64: the numbers of all rows in an order drawn for this epoch."""
    # Keyed by the epoch and not drawn on: a resumed run jumps into any epoch without walking the ones before.
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(num_rows)


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
        # One order is kept, that of the epoch asked for last: places are asked for in order.
        epoch, within = divmod(place, self.num_rows)
        if self._seed is not None and epoch != self._epoch:
            self._epoch, self._order = epoch, random_order(self.num_rows, self._seed, epoch)
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
        # A function of the step: a resumed run goes on at the same row without any cursor.
        first = (step - 1) * self._per_batch
        return Rows(self.source, tuple(self._order.at(place) for place in range(first, first + self._per_batch)))

    def batch(self, rows: Rows, step: int, places: Sequence[int] | None = None) -> TrainingBatch:
        """Read the rows that the ledger names, or those at `places` of them. Raises: DataError: of another dataset."""
        if rows.source != self.source:
            raise DataError(f"the ledger has demonstrations of {rows.source}, the dataset is {self.source} now")
        first = (step - 1) * self._per_batch  # a row of another epoch is another uid
        places = range(len(rows.rows)) if places is None else places
        numbers = [rows.rows[i] for i in places]
        # By the place in the walk, not by the row: a row that comes again in another epoch is another experience.
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
        total_steps: int | None = None,
    ) -> None:
        """`shuffle_seed` None keeps the order of the dataset; group_size: sequences that `rows` gives for each row;
        total_steps: batches in all, over as many epochs as they take, in place of `total_epochs`.
        """
        self._rows = Demonstrations(rows, fingerprint, RowOrder(num_rows, shuffle_seed), batch_size, group_size)
        self._ledger = ledger
        self._fence = Fence(ledger)
        self._num_steps = num_rows * total_epochs // batch_size if total_steps is None else total_steps
        # (use, step, places) of rows that were read ahead, and what they are.
        self._ahead: tuple[object, TrainingBatch] | None = None

    def state_dict(self) -> dict[str, object]:
        """The dataset's fingerprint: a checkpoint does not go on with another one."""
        return {"source": self._rows.source}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """See BatchSource. Raises: DataError: the dataset is another one now."""
        now = self._rows.source
        if state["source"] != now:
            raise DataError(f"the dataset has changed since the checkpoint: was {state['source']}, is {now}")

    def entry(self, step: int, patience_s: float = math.inf) -> LedgerEntry | None:
        """See BatchSource; never waits: the rows of a step are known from its number."""
        # Also a batch that follows from its number is written down first: two trainers must not both make the step.
        entry = self._fence.read(step)
        if entry is None and step <= self._num_steps:
            entry = LedgerEntry(step, self._ledger.lineage, (self._rows.rows(step),))
            self._ledger.write(entry)
        return entry

    def read(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> TrainingBatch:
        """`places`: of rows of the dataset; each gives `group_size` sequences."""
        # The entry stands for ever, so rows of another dataset under the same numbers must not be trained for it.
        if any(rows.source != self._rows.source for rows in entry.use):
            path, was = self._ledger.path(entry.step), entry.use[0].source
            raise DataError(f"{path} was written for {was}, the dataset is {self._rows.source} now")
        if not entry.use:  # the step was skipped
            return batch_from_table(SCHEMA.empty_table())
        wanted, ahead = (entry.use, entry.step, places), self._ahead
        self._ahead = None
        return (
            ahead[1] if ahead is not None and ahead[0] == wanted else self._rows.batch(entry.use[0], entry.step, places)
        )

    def look_ahead(self, step: int) -> LedgerEntry | None:
        """See BatchSource; the rows of a step are known from its number."""
        if step > self._num_steps:
            return None
        return LedgerEntry(step, self._ledger.lineage, (self._rows.rows(step),))

    def read_ahead(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> None:
        """See BatchSource."""
        batch = self._rows.batch(entry.use[0], entry.step, places)
        self._ahead = ((entry.use, entry.step, places), batch)
