"""Retention: which trained shards are removed or compacted, and the order of writing that keeps the books.

Invariants: a shard is removed only if all its groups are settled in every checkpoint that is kept and no ledger entry
after the oldest of them names it, so whatever is resumed or replayed finds its rows; what is removed is written down
first, so that counts still add up. A pass that was killed is finished by the next.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.log.file_log import STEPS_PER_BUCKET
from rftdask.buffer.log.log import EXPERIENCES, ExperienceLog
from rftdask.buffer.log.shard import ShardName, repeated_shards
from rftdask.errors import NotFoundError
from rftdask.storage import Storage
from rftdask.storage.checked_json import dump_checked, load_checked

_DONE = f"{EXPERIENCES}/removed/UNTIL.json"


@dataclass(frozen=True)
class RetentionRule:
    """What stays of the shards that nothing needs any more."""

    keep: Literal["all", "compact", "thin", "none"] = "all"
    keep_steps: int = 0
    """So many explore steps stay whole before those that are needed."""
    keep_share: float = 0.1
    """thin: share of the rollout batches that stay, chosen by their numbers alone."""

    def stays(self, name: ShardName) -> bool:
        drawn = zlib.crc32(f"{name.explore_step}/{name.batch}".encode()) / 2**32
        return self.keep == "all" or (self.keep == "thin" and drawn < self.keep_share)


@dataclass(frozen=True)
class ResumePoint:
    """Of the oldest checkpoint that is kept."""

    step: int
    """The last it has trained."""
    explore_step: int
    """Before which everything is settled."""


def removable(names: Sequence[ShardName], rule: RetentionRule, before: int, needed: Collection[str]) -> list[ShardName]:
    """The shards of explore steps < `before` that may go. Batches that ran twice stay where rows are lost: only their
    rows tell what is a repeat.
    """
    repeated = set() if rule.keep == "compact" else set(repeated_shards(names))
    return [
        name
        for name in names
        if name.explore_step < before and not rule.stays(name) and name not in repeated and name.text not in needed
    ]


def apply_retention(
    storage: Storage,
    log: ExperienceLog,
    ledger: Ledger,
    rule: RetentionRule,
    oldest: ResumePoint,
    should_stop: Callable[[], bool] = lambda: False,
) -> int:
    """Remove or compact what the rule does not keep as it is; how many shards. Lists only what was not gone through
    before.
    """
    before = oldest.explore_step - rule.keep_steps
    if rule.keep == "compact":
        before -= before % STEPS_PER_BUCKET  # whole buckets, each once
    done = _done_until(storage)
    if rule.keep == "all" or before <= done:
        return 0
    doomed = removable(log.loose_shards(done), rule, before, _needed(ledger, oldest.step))
    if rule.keep == "compact":
        log.compact(doomed, should_stop)
        if should_stop():
            return 0  # perhaps not all of it; the next pass sees
    else:
        log.remove(doomed)
    storage.put(_DONE, dump_checked({"explore_step": before}))
    return len(doomed)


def _needed(ledger: Ledger, step: int) -> set[str]:
    """Shards named by the entries after `step`."""
    entries = (ledger.read(later) for later in range(step + 1, ledger.last_of_run(step + 1) + 1))
    return {rows.source for entry in entries if entry is not None for rows in (*entry.use, *entry.drop)}


def _done_until(storage: Storage) -> int:
    """The first explore step that no pass has gone through."""
    try:
        return int(load_checked(storage.get(_DONE))["explore_step"])
    except (NotFoundError, ValueError, KeyError, TypeError):
        return 1  # every pass may be made again
