"""Protections: what keeps the promises, taken away one at a time. The same tests must then find something broken; a
test that finds nothing would prove nothing.

They are taken away by what stands in their place at a seam: another disk, storage, log or ledger. Invariant: in a run
that nothing disturbs, what stands there changes nothing; else a test would find itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from rftdask.buffer.batches.ledger import Ledger, LedgerEntry
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.shard import ShardName
from rftdask.errors import DamagedError
from rftdask.testing.crashtest.damage import damage_files
from rftdask.testing.crashtest.figures import Figures, ProtectionFigures
from rftdask.testing.crashtest.power import lose_power
from rftdask.testing.crashtest.rivals import meet_rivals
from rftdask.testing.crashtest.workload import Parts, Plan
from rftdask.testing.storage_faults import FaultyStorage

_PLAN = Plan(6, ordered=False)


class CheckThenWrite(FaultyStorage):
    """`put_new` as one would write it without create-only: look whether it is there, then write."""

    def put_new(self, path: str, data: bytes) -> bool:
        if self.inner.exists(path):
            return False
        self.inner.put(path, data)
        return True


class TrustingLog(ParquetLog):
    """Reads what is there, whatever its checksum says."""

    def _decode(self, name: ShardName, data: bytes, columns: Sequence[str] | None) -> pa.Table:
        try:
            chosen = None if columns is None else list(columns)
            return pq.read_table(pa.BufferReader(data), columns=chosen, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise DamagedError(f"shard {name.text}: {error}") from error


class LateLedger(Ledger):
    """Writes the entry of a step when it was trained, and not before."""

    _late: LedgerEntry | None = None

    def write(self, entry: LedgerEntry) -> None:
        self._late = entry
        if not entry.use:
            self.write_late()  # nothing will be trained

    def write_late(self) -> None:
        """Called after every optimizer step."""
        if self._late is not None:
            super().write(self._late)
            self._late = None


PROTECTIONS: dict[str, Callable[[int], Figures]] = {
    "fsync of files": lambda every: lose_power(_PLAN, range(1), every=every, sync_files=False),
    "fsync of folders": lambda every: lose_power(_PLAN, range(1), every=every, sync_folders=False),
    "create-only": lambda every: meet_rivals(
        _PLAN,
        range(3),
        every=max(1, every // 6),
        where="before put.* ledger/.*",
        wrap=lambda storage: CheckThenWrite(storage, lambda *call: None),
    ),
    "checksums of shards": lambda every: damage_files(
        Plan(6), 0, num_flips=16, kinds="shard", parts=Parts(log=TrustingLog), every=max(1, every // 6)
    ),
    "the ledger before training": lambda every: lose_power(
        _PLAN, range(3), where="create .*/ledger/.*", parts=Parts(ledger=LateLedger)
    ),
}
"""Name -> the test without it, trying every n-th place; where only few places matter, these, and less thinly."""


def take_away(name: str, every: int = 1) -> ProtectionFigures:
    """Run the test of a protection without it; `every` as in `PROTECTIONS`."""
    figures = PROTECTIONS[name](every)
    return ProtectionFigures(name, figures.num_tried, len(figures.problems), next(iter(figures.problems), ""))
