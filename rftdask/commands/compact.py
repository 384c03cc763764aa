"""Compact: the settled shards of a run that nobody works on, merged into few large files.

What is settled is what the ledger has trained or dropped up to its end. Checkpoints do not matter here: a run that is
continued from any of them, or replayed, reads what it needs from the large files.
Invariant: nobody else works on the run meanwhile, and the audit is what it was before.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from rftdask.buffer.batches.audit import Audit, audit_log
from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.batches.replay_priority import max_uses
from rftdask.buffer.batches.selection import Cursor
from rftdask.buffer.lineage import read_parent
from rftdask.buffer.log import open_log
from rftdask.buffer.log.compaction import Compaction
from rftdask.buffer.log.log import ExperienceLog
from rftdask.config import Config, load_config
from rftdask.errors import DamagedError, UserError
from rftdask.run.run_folder import Lease, read_run
from rftdask.storage import Storage, open_storage

_ROLES = ("trainer", "explorer")


@dataclass(frozen=True)
class CompactedStage:
    """What was done for one stage."""

    folder: str
    done: Compaction
    num_loose: int
    """Shards that stay as they are: not settled, or alone in their bucket."""
    audit: Audit
    """The same before and after."""

    def render(self) -> str:
        done, audit = self.done, self.audit
        dropped = "".join(f", {count:,} {reason}" for reason, count in sorted(audit.dropped.items()))
        return "\n".join(
            [
                self.folder,
                f"  compacted   {done.num_rows:,} experiences of {done.num_shards:,} shards "
                f"({done.shard_bytes:,} bytes) into {done.num_files:,} files ({done.file_bytes:,} bytes)",
                f"  left        {self.num_loose:,} shards as they were",
                f"  audit       unchanged: {audit.committed:,} committed, {audit.trained:,} trained, "
                f"{audit.waiting:,} waiting{dropped}",
                *(f"  PROBLEM     {problem}" for problem in audit.problems),
            ]
        )


def compact_run(url: str) -> list[CompactedStage]:
    """Compact every stage of the run at `url` that explored.

    Raises: DataError: it is no run folder; UserError: its log cannot be compacted; FencedError: somebody works on it;
        DamagedError: the audit is another than before.
    """
    storage = open_storage(url)
    if read_parent(storage) is not None:
        raise UserError(f"{storage.url} has no experiences of its own; compact the run that it is in")
    config = load_config(read_run(storage)["config"])
    stages = []
    for stage in config.stage_configs():
        folder = _folder(storage, config, stage)
        if stage.algorithm.schema_type == "experience" and folder.exists("run.json"):
            kind = stage.buffer.trainer_input.experience_buffer.storage_type
            if kind != "queue":
                raise UserError(f"{folder.url}: storage_type {kind} has no Parquet shards, which compact merges")
            stages.append((folder, load_config(read_run(folder)["config"])))
    if not stages:
        raise UserError(f"{storage.url} has no experiences of its own: it trained from a dataset")
    return [_compact_stage(folder, stage) for folder, stage in stages]


def settled_before(ledger: Ledger, tasks_per_step: int) -> int:
    """The first explore step of which the ledger has not settled everything."""
    cursor = Cursor()
    for step in range(1, ledger.last_of_run(1) + 1):
        entry = ledger.read(step)
        cursor.settle(entry.positions if entry is not None else (), tasks_per_step)
    return cursor.low


def _folder(storage: Storage, config: Config, stage: Config) -> Storage:
    """Of a stage: below the run's, which may have been moved."""
    return open_storage(f"{storage.url.rstrip('/')}/{stage.name.rpartition('/')[2]}") if config.stages else storage


def _compact_stage(storage: Storage, config: Config) -> CompactedStage:
    with ExitStack() as leases:
        for role in _ROLES:
            leases.enter_context(Lease(storage, role))
        log, ledger = open_log(storage, config), Ledger(storage)
        before = _audit(log, ledger, config)
        end = settled_before(ledger, config.buffer.batch_size)
        done = log.compact([name for name in log.loose_shards(0) if name.explore_step < end])
        log = open_log(storage, config)  # one that remembers nothing
        after = _audit(log, ledger, config)
        if after != before:
            raise DamagedError(f"{storage.url}: the audit was {before} and is {after} after compaction")
        return CompactedStage(storage.url, done, len(log.loose_shards(0)), after)


def _audit(log: ExperienceLog, ledger: Ledger, config: Config) -> Audit:
    return audit_log(log, ledger, config.tasks_per_unit, max_uses(config))
