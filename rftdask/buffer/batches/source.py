"""Source: where a trainer's batches come from. One rank forms the batch of a step and writes it in the ledger; then, as
a step of its own, every rank reads the rows that the ledger names.

Invariant: the batch of a step is what the ledger says. If it says nothing yet, the batch is formed, written down, and
only then handed out; so a resumed trainer gets the very same batches, and two trainers cannot both form one. The kinds:
log_source.py (rollouts), dataset_source.py (supervised rows), and `ReplayedSource` here (another lineage's batches).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from rftdask.buffer.batches.batch import TrainingBatch
from rftdask.buffer.batches.ledger import Ledger, LedgerEntry
from rftdask.errors import FencedError

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

    def batch(self, step: int) -> tuple[LedgerEntry, TrainingBatch] | None:
        """`entry` and all its rows, for a trainer of one rank."""
        entry = self.entry(step)
        return None if entry is None else (entry, self.read(entry))

    def state_dict(self) -> dict[str, object]:
        """The state that a checkpoint keeps to go on after the last entry handed out; JSON types. Here none."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:  # noqa: B027  # a source without state loads none
        """Go on where `state_dict` was taken."""


class BatchFilter:
    """Drops rows of the selected groups, and makes the rewards they are trained with. This base keeps all.

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
        return np.asarray(table.column("reward").to_numpy(zero_copy_only=False), dtype=np.float32)


def with_rewards(table: pa.Table, rewards: np.ndarray) -> pa.Table:
    """The rows with `rewards` ([N] float32) in place of the recorded ones."""
    column = table.schema.get_field_index("reward")
    return table.set_column(column, table.schema.field(column), pa.array(rewards, pa.float32()))


class ReplayedSource(BatchSource):
    """The batches of `parent`'s ledger, entry by entry, for the lineage of `ledger`.

    Invariant: an entry is copied into the ledger of this lineage before it is handed out, and says the same.
    """

    def __init__(self, parent: Ledger, ledger: Ledger, rows: BatchSource) -> None:
        """rows: reads the rows of entries; it forms none."""
        self._parent = parent
        self._ledger = ledger
        self._rows = rows
        self._known_until: int | None = None
        """The last step that was written down before this trainer came; None until it asks for its first."""

    def entry(self, step: int, patience_s: float = math.inf) -> LedgerEntry | None:
        if self._known_until is None:
            self._known_until = self._ledger.last_of_run(step)
        original = self._parent.read(step)
        if original is None:
            return None
        entry = replace(original, lineage=self._ledger.lineage)
        if step > self._known_until:
            self._ledger.write(entry)
        elif self._ledger.read(step) != entry:
            raise FencedError(
                f"{self._ledger.path(step)} is not what lineage {self._parent.lineage} trained at step {step}; "
                "replay into a lineage of another name"
            )
        return entry

    def read(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> TrainingBatch:
        return self._rows.read(entry, places)
