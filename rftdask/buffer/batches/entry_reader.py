"""Reader: the rows that a ledger entry names, as a batch. Any rank may have one; it forms nothing and decides nothing.

Invariant: what it returns follows from the entry, the log and the curation alone, so every rank and every replay trains
the same numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence

import pyarrow as pa

from rftdask.buffer.batches.batch import BATCH_COLUMNS, TrainingBatch, batch_from_table, join_batches
from rftdask.buffer.batches.demonstrations import Demonstrations
from rftdask.buffer.batches.filters import BASELINE, Curation, with_rewards
from rftdask.buffer.batches.groups import take_rows
from rftdask.buffer.batches.ledger import LedgerEntry, Rows
from rftdask.buffer.log.log import ExperienceLog
from rftdask.buffer.log.shard import ShardName
from rftdask.errors import DamagedError, DataError

MAX_KEPT_BYTES = 1 << 30
"""Of shards kept in memory between indexing and training; others are read again, so a long log costs no more memory.
The shards that one batch is made of are held beside them while it is read."""


class EntryReader:
    """Reads the rows of ledger entries.

    Example: EntryReader(log, curation=curation).read(entry, places=[0, 1, 2])
    """

    def __init__(
        self,
        log: ExperienceLog,
        *,
        curation: Curation | None = None,
        demonstrations: Demonstrations | None = None,
    ) -> None:
        self._log = log
        self._curation = curation or Curation()
        self.columns = (*BATCH_COLUMNS, "status", "error", *self._curation.columns)
        """Of a shard, what the trainer takes: texts stay where they are."""
        self._demonstrations = demonstrations
        self._tables: dict[str, pa.Table] = {}
        self._num_bytes = 0

    def read(self, entry: LedgerEntry, places: Sequence[int] | None = None) -> TrainingBatch:
        """The rows that the entry trains, or those at `places` of its `use`, counted through from 0, ascending.

        Raises: DamagedError: a shard it names; DataError: rows of a dataset that is not there.
        """
        parts = _parts_at(entry.use, places)
        own = self._trained_rows([Rows(rows.source, at) for rows, at, _ in parts if not rows.of_dataset])
        baselines = [rows for rows in entry.drop if rows.reason == BASELINE]
        batch = batch_from_table(own, self._trained_rows(baselines) if baselines else None)
        for rows, _, within in parts:
            if rows.of_dataset:
                batch = join_batches(batch, self._demonstrated(entry, rows, within))
        return batch

    def rows(self, parts: Sequence[Rows]) -> pa.Table:
        """The rows of the log as recorded, one after another."""
        return take_rows(parts, self.table)

    def min_policy_version(self, rows: Rows) -> int:
        """Over some rows of the log."""
        versions = self.table(rows.source).column("min_policy_version").to_numpy()
        return int(versions[list(rows.rows)].min())

    def table(self, source: str) -> pa.Table:
        """All rows of the shard that a ledger calls `source`, of `columns` at least. Raises: DamagedError."""
        if source not in self._tables:
            name = ShardName.try_parse(source)
            if name is None:
                raise DamagedError(f"the ledger names {source!r}, which is no shard")
            self._add(source, self._log.read(name, self.columns))
        return self._tables[source]

    def keep(self, name: ShardName, table: pa.Table) -> None:
        """A shard that was read for another reason and will be needed, while there is room."""
        if name.text not in self._tables and self._num_bytes + table.nbytes <= MAX_KEPT_BYTES:
            self._add(name.text, table)

    def _add(self, source: str, table: pa.Table) -> None:
        self._tables[source] = table
        self._num_bytes += table.nbytes

    def forget_all_but(self, sources: Collection[str]) -> None:
        for source in [source for source in self._tables if source not in sources]:
            self._num_bytes -= self._tables.pop(source).nbytes

    def _trained_rows(self, parts: Sequence[Rows]) -> pa.Table:
        """The rows of the log with the rewards they are trained with."""
        table = self.rows(parts)
        return with_rewards(table, self._curation.rewards(table))

    def _demonstrated(self, entry: LedgerEntry, rows: Rows, within: Sequence[int]) -> TrainingBatch:
        if self._demonstrations is None:
            raise DataError(f"ledger entry {entry.step} names {rows.source}, and no demonstrations are configured")
        return self._demonstrations.batch(rows, entry.step, within)


def _parts_at(use: Sequence[Rows], places: Sequence[int] | None) -> list[tuple[Rows, tuple[int, ...], Sequence[int]]]:
    """(part, its rows at `places`, where in the part these are), without the parts that have none."""
    if places is None:
        return [(rows, rows.rows, range(len(rows.rows))) for rows in use]
    found: list[tuple[Rows, tuple[int, ...], Sequence[int]]] = []
    begin = 0
    for rows in use:
        end = begin + len(rows.rows)
        within = [place - begin for place in places[bisect_left(places, begin) : bisect_left(places, end)]]
        if within:
            found.append((rows, tuple(rows.rows[i] for i in within), within))
        begin = end
    return found
