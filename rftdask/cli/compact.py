"""Compact: the settled shards of a run that nobody works on, merged into few large files.

What is settled is what the ledger has trained or dropped up to its end. Checkpoints do not matter here: a run that is
continued from any of them, or replayed, reads what it needs from the large files.
Invariant: nobody else works on the run meanwhile, and the audit is what it was before.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from rftdask.buffer.batches.audit import Audit
from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.batches.lineage import read_parent
from rftdask.buffer.batches.selection import Cursor
from rftdask.buffer.log.compaction import Compaction
from rftdask.errors import DamagedError, UserError
from rftdask.reports.run_reader import StageReader, open_stages
from rftdask.run.lease import Lease
from rftdask.storage import open_storage

_ROLES = ("trainer", "explorer")


@dataclass(frozen=True)
class CompactedStage:
    """Shards of one stage that were merged, and the audit that did not change."""

    folder: str
    done: Compaction
    num_loose: int
    """Shards that stay as they are: not settled, or alone in their bucket."""
    audit: Audit
    """The same before and after."""

    def render(self) -> str:
        """Some lines for a terminal."""
        done, audit = self.done, self.audit
        dropped = "".join(f", {count:,} {reason}" for reason, count in sorted(audit.dropped.items()))
        merged = (
            f"{done.num_rows:,} experiences of {done.num_shards:,} shards ({done.shard_bytes:,} bytes) "
            f"into {done.num_files:,} files ({done.file_bytes:,} bytes)"
        )
        counts = f"{audit.committed:,} committed, {audit.trained:,} trained, {audit.waiting:,} waiting{dropped}"
        lines = [
            f"compacted   {merged}",
            f"left        {self.num_loose:,} shards as they were",
            f"audit       unchanged: {counts}",
            *(f"PROBLEM     {problem}" for problem in audit.problems),
        ]
        return "\n  ".join([self.folder, *lines])


def compact_run(url: str) -> list[CompactedStage]:
    """Compact every stage of the run at `url` that explored.

    Raises: DataError: it is no run folder; UserError: its log cannot be compacted; FencedError: somebody works on it;
        DamagedError: the audit is another than before.
    """
    storage = open_storage(url)
    if read_parent(storage) is not None:
        raise UserError(f"{storage.url} has no experiences of its own; compact the run that it is in")
    # All refusals before the first stage is touched.
    stages = [s for s in open_stages(url) if s.has_begun and s.config.algorithm.schema_type == "experience"]
    if not stages:
        raise UserError(f"{storage.url} has no experiences of its own: it trained from a dataset")
    for stage in stages:
        kind = stage.config.buffer.trainer_input.experience_buffer.storage_type
        if kind != "queue":
            raise UserError(f"{stage.storage.url}: storage_type {kind} has no Parquet shards, which compact merges")
    return [_compact_stage(stage) for stage in stages]


def settled_before(ledger: Ledger, tasks_per_step: int) -> int:
    """The first explore step of which the ledger has not settled everything."""
    # Folded from the ledger, as a trainer's is: nothing else says what is settled.
    cursor = Cursor()
    for step in range(1, ledger.last_of_run(1) + 1):
        entry = ledger.read(step)
        cursor.settle(entry.positions if entry is not None else (), tasks_per_step)
    return cursor.low


def _compact_stage(stage: StageReader) -> CompactedStage:
    storage, config = stage.storage, stage.config
    with ExitStack() as leases:
        # Both leases before the audit is read, so that it cannot change meanwhile.
        for role in _ROLES:
            leases.enter_context(Lease(storage, role))
        before = stage.audit
        end = settled_before(Ledger(storage), config.buffer.batch_size)
        done = stage.log.compact([name for name in stage.log.loose_shards(0) if name.explore_step < end])
        compacted = StageReader(config, storage)  # which remembers nothing of before
        after = compacted.audit
        assert before is not None and after is not None
        # The promise, looked at before it is told: no row was lost or counted twice.
        if after != before:
            raise DamagedError(f"{storage.url}: the audit was {before} and is {after} after compaction")
        return CompactedStage(storage.url, done, len(compacted.log.loose_shards(0)), after)
