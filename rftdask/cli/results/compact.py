"""`rftdask compact`: merges the settled shards of an idle run into few large files.

Experiences are settled once the ledger has trained or dropped them. Checkpoints do not matter: a run that continues
from any of them, or a replay, reads its experiences from the large files.
Invariant: no other process works on the run meanwhile, and the audit stays the same.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from rftdask.buffer.batches.audit import Audit
from rftdask.buffer.batches.ledger import Ledger, read_parent
from rftdask.buffer.batches.selection import Cursor
from rftdask.buffer.log.compaction import Compaction
from rftdask.cli.common import Run, say
from rftdask.errors import DamagedError, UserError
from rftdask.reports.run_reader import StageReader, open_stages
from rftdask.run.lease import Lease
from rftdask.storage import open_storage

_ROLES = ("trainer", "explorer")


def compact(run: Run) -> None:
    """Merge the small shards of a run into large files.

    No other process may work on the run. Every experience stays.
    """
    for stage in compact_run(run):
        say(stage.render())


@dataclass(frozen=True)
class CompactedStage:
    """Result of compacting one stage."""

    folder: str
    done: Compaction
    num_loose: int
    """Number of shards that stay: not settled, or the only one in their bucket."""
    audit: Audit
    """Audit, equal before and after."""

    def render(self) -> str:
        """Return lines for a terminal."""
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

    Raises: DataError: `url` is not a run folder; UserError: its log cannot be compacted; FencedError: another process
        works on the run; DamagedError: the audit has changed.
    """
    storage = open_storage(url)
    if read_parent(storage) is not None:
        raise UserError(f"{storage.url} has no experiences of its own; compact the run that contains it")
    # Reject everything that cannot be compacted before changing the first stage.
    stages = [s for s in open_stages(url) if s.has_begun and s.config.algorithm.schema_type == "experience"]
    if not stages:
        raise UserError(f"{storage.url} has no experiences to compact: it trained from a dataset")
    for stage in stages:
        kind = stage.config.buffer.trainer_input.experience_buffer.storage_type
        if kind != "queue":
            raise UserError(
                f"{stage.storage.url}: storage_type {kind} has no Parquet shards to merge; use storage_type queue"
            )
    return [_compact_stage(stage) for stage in stages]


def settled_before(ledger: Ledger, tasks_per_step: int) -> int:
    """Return the first explore step that the ledger has not settled completely."""
    # Computed from the ledger as in a trainer; nothing else records what is settled.
    cursor = Cursor()
    for step in range(1, ledger.last_of_run(1) + 1):
        entry = ledger.read(step)
        cursor.settle(entry.positions if entry is not None else (), tasks_per_step)
    return cursor.low


def _compact_stage(stage: StageReader) -> CompactedStage:
    storage, config = stage.storage, stage.config
    with ExitStack() as leases:
        # Both leases precede the audit, so that it cannot change meanwhile.
        for role in _ROLES:
            leases.enter_context(Lease(storage, role))
        before = stage.audit
        end = settled_before(Ledger(storage), config.buffer.batch_size)
        done = stage.log.compact([name for name in stage.log.loose_shards(0) if name.explore_step < end])
        compacted = StageReader(config, storage)  # a new reader, without cached values
        after = compacted.audit
        assert before is not None and after is not None
        # No row was lost or counted twice.
        if after != before:
            raise DamagedError(f"{storage.url}: compaction changed the audit from {before} to {after}")
        return CompactedStage(storage.url, done, len(compacted.log.loose_shards(0)), after)
