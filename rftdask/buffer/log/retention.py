"""Retention: which trained shards are removed or compacted, and the order of writing that keeps the books.

Invariants: a shard is removed only if all its groups are settled in every checkpoint that is kept and no ledger entry
after the oldest of them names it, so whatever is resumed or replayed finds its rows; what is removed is written down
first, so that counts still add up. A pass that was killed is finished by the next.
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
    """The oldest checkpoint that is kept, from which a run may be resumed."""

    step: int
    """The last optimizer step it has trained."""
    explore_step: int
    """Every explore step before this one is settled there."""


def removable(
    names: Sequence[ShardName], section: RetentionConfig, before: int, needed: Collection[str]
) -> list[ShardName]:
    """Select the shards of explore steps < `before` that may go.

    Units that ran twice stay where rows are lost: only their rows tell what is a repeat.
    Args: needed: names of shards that must stay, as the ledger has them.
    """
    if section.keep == "all":
        return []
    repeated = set() if section.keep == "compact" else set(repeated_shards(names))
    share_kept = section.keep_fraction if section.keep == "thin" else 0.0
    # Drawn by its numbers alone, so that every pass and every process draws the same.
    drawn = {name: zlib.crc32(f"{name.explore_step}/{name.unit}".encode()) / 2**32 for name in names}
    old = [name for name in names if name.explore_step < before and drawn[name] >= share_kept]
    # A shard that the ledger names is needed for a replay, however old its explore step is.
    return [name for name in old if name not in repeated and name.text not in needed]


def apply_retention(
    storage: Storage,
    log: ExperienceLog,
    ledger: Ledger,
    section: RetentionConfig,
    oldest: ResumePoint,
    should_stop: Callable[[], bool] = lambda: False,
) -> int:
    """Remove or compact the shards that `section` does not keep as they are; return how many.

    Lists only what no earlier pass has gone through. A pass that was killed is made again by the next.
    """
    # Counted from the oldest checkpoint, not from the newest step: a resume may begin there.
    before = oldest.explore_step - section.keep_steps
    if section.keep == "compact":
        before -= before % STEPS_PER_BUCKET  # whole buckets, each once
    try:
        done = int(load_checked(storage.get(_DONE))["explore_step"])
    except (NotFoundError, ValueError, KeyError, TypeError):
        done = 1  # every pass may be made again
    if section.keep == "all" or before <= done:
        return 0
    # What a resumed trainer replays: the entries after the checkpoint, with the shards that they name.
    later_steps = range(oldest.step + 1, ledger.last_of_run(oldest.step + 1) + 1)
    entries = [entry for step in later_steps if (entry := ledger.read(step)) is not None]
    needed = {rows.source for entry in entries for rows in (*entry.use, *entry.drop)}
    doomed = removable(log.loose_shards(done), section, before, needed)
    if section.keep == "compact":
        log.compact(doomed, should_stop)
        if should_stop():
            return 0  # perhaps not all of it; the next pass sees
    else:
        log.remove(doomed)
    # Last: a kill before it repeats the pass, which finds less to do.
    storage.put(_DONE, dump_checked({"explore_step": before}))
    return len(doomed)
