"""Replayed batches: those of another lineage, entry by entry, as they were trained.

Invariant: an entry is copied into the ledger of this lineage before it is handed out, and says the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rftdask.buffer.batches.batch import TrainingBatch
from rftdask.buffer.batches.ledger import Ledger, LedgerEntry
from rftdask.buffer.batches.source import BatchSource
from rftdask.errors import FencedError


class ReplayedSource(BatchSource):
    """The batches of `parent`'s ledger, for the lineage of `ledger`."""

    def __init__(self, parent: Ledger, ledger: Ledger, rows: BatchSource) -> None:
        """rows: reads the rows of entries; it forms none."""
        self._parent = parent
        self._ledger = ledger
        self._rows = rows
        self._known_until: int | None = None
        """The last step that was written down before this trainer came; None until it asks for its first."""

    def entry(self, step: int) -> LedgerEntry | None:
        if self._known_until is None:
            self._known_until = self._ledger.last_of_run(step)
        theirs = self._parent.read(step)
        if theirs is None:
            return None
        entry = copied_entry(theirs, self._ledger.lineage)
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

    def state_dict(self) -> dict[str, object]:
        """Nothing: the next batch follows from the step alone."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        pass


def copied_entry(entry: LedgerEntry, lineage: str) -> LedgerEntry:
    """The same batch in the ledger of another lineage."""
    return replace(entry, lineage=lineage)
