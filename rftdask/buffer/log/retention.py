"""Retention: which trained shards are removed or compacted, in a write order that keeps the counts consistent.

Invariants: a shard is removed only if all its groups are settled in every kept checkpoint and no ledger entry after the
oldest of them names it, so every resume and replay finds its rows. Names are recorded before shards are removed, so
that counts still add up. The next pass finishes a pass that was killed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.log.file_log import STEPS_PER_BUCKET
from rftdask.buffer.log.log import EXPERIENCES, ExperienceLog
from rftdask.buffer.log.shard import ShardName, repeated_shards
from rftdask.config.schema.buffer import RetentionConfig
from rftdask.errors import NotFoundError
from rftdask.storage import Storage
from rftdask.storage.checked_json import dump_checked, load_checked

_DONE = f"{EXPERIENCES}/removed/UNTIL.json"


@dataclass(frozen=True)
class ResumePoint:
    """The oldest kept checkpoint, from which a run may be resumed."""

    step: int
    """The last optimizer step that it has trained."""
    explore_step: int
    """First explore step that is not settled in it."""


def removable(
    names: Sequence[ShardName], section: RetentionConfig, before: int, needed: Collection[str]
) -> list[ShardName]:
    """Select the shards of explore steps < `before` that may be removed or compacted.

    Shards of units that ran twice are never removed: their rows are needed to find the repeats.
    Args: needed: names of shards that must stay, as in the ledger.
    """
    if section.keep == "all":
        return []
    repeated = set() if section.keep == "compact" else set(repeated_shards(names))
    share_kept = section.keep_fraction if section.keep == "thin" else 0.0
    # A hash of the unit instead of a random number: every pass and every process draws the same.
    drawn = {name: zlib.crc32(f"{name.explore_step}/{name.unit}".encode()) / 2**32 for name in names}
    old = [name for name in names if name.explore_step < before and drawn[name] >= share_kept]
    # The ledger may name a shard of an old explore step, which a replay then needs.
    return [name for name in old if name not in repeated and name.text not in needed]


def apply_retention(
    storage: Storage,
    log: ExperienceLog,
    ledger: Ledger,
    section: RetentionConfig,
    oldest: ResumePoint,
    should_stop: Callable[[], bool] = lambda: False,
) -> int:
    """Remove or compact the shards that `section` does not keep as they are; return their number.

    Lists only the steps that no earlier pass has finished.
    """
    # Counted from the oldest checkpoint, not from the newest step: a resume may begin there.
    before = oldest.explore_step - section.keep_steps
    if section.keep == "compact":
        before -= before % STEPS_PER_BUCKET  # whole buckets, each once
    try:
        done = int(load_checked(storage.get(_DONE))["explore_step"])
    except (NotFoundError, ValueError, KeyError, TypeError):
        done = 1  # passes can be repeated
    if section.keep == "all" or before <= done:
        return 0
    # A resumed trainer replays the entries after the checkpoint, and needs the shards that they name.
    later_steps = range(oldest.step + 1, ledger.last_of_run(oldest.step + 1) + 1)
    entries = [entry for step in later_steps if (entry := ledger.read(step)) is not None]
    needed = {rows.source for entry in entries for rows in (*entry.use, *entry.drop)}
    names = removable(log.loose_shards(done), section, before, needed)
    if section.keep == "compact":
        log.compact(names, should_stop)
        if should_stop():
            return 0  # perhaps incomplete; the next pass continues
    else:
        log.remove(names)
    # Written last: if killed before, the next pass repeats the work.
    storage.put(_DONE, dump_checked({"explore_step": before}))
    return len(names)
