"""Back-pressure: how far explorers may be ahead of what the trainer has read. A pure rule, and the count it needs.

How much lies unread is known without any message: the schedule says how many groups come before a work unit, and
the ledger how many are settled. Bytes are estimated by the mean size of the experiences committed so far.
Invariant: what the next train batch may need is always let through, so nobody waits for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from rftdask.buffer.batches.ledger import Ledger
from rftdask.config import Config

SETTLED_NOTE = "settled_groups"
"""Note of a ledger entry: groups that it and all entries before it settle."""


@dataclass(frozen=True)
class UnreadLimit:
    """Example: UnreadLimit(max_experiences=4096, max_bytes=None, always=512).admits(4000, mean_bytes=0.0)"""

    max_experiences: int | None
    max_bytes: int | None
    always: int
    """Experiences that may be unread whatever the limits say: those of a train batch."""

    def admits(self, unread: int, mean_bytes: float) -> bool:
        """True if a work unit may begin before which `unread` experiences are unread or still under way.

        mean_bytes: of an experience; 0 while none is known, which lets it begin.
        """
        # Without this the trainer might wait for a batch that the limit keeps from being filled.
        if unread < self.always:
            return True
        if self.max_experiences is not None and unread >= self.max_experiences:
            return False
        return self.max_bytes is None or unread * mean_bytes < self.max_bytes


def unread_limit(config: Config) -> UnreadLimit | None:
    """The limit of unread experiences that the config sets; None: only the sync style holds explorers back."""
    section = config.buffer.trainer_input.experience_buffer
    if config.mode != "both" or (section.capacity is None and section.max_unread_bytes is None):
        return None
    return UnreadLimit(section.capacity, section.max_unread_bytes, always=config.num_own_rollouts)


class Backpressure:
    """The unread limit of one explorer, with what it takes to apply it.

    Example:
        backpressure = Backpressure(config, Ledger(storage))
        backpressure.add(num_rollouts=64, num_bytes=250_000)      # as work units are committed
        if backpressure.has_room(num_groups=512): ...             # may the unit after 512 groups begin?
    """

    def __init__(self, config: Config, ledger: Ledger) -> None:
        self._limit = unread_limit(config)
        self._repeat_times = config.algorithm.repeat_times
        self._settled = SettledGroups(ledger)
        self._num_settled = 0
        self._num_rollouts = self._num_bytes = 0

    def add(self, num_rollouts: int, num_bytes: int) -> None:
        """Rollouts were committed; they say how large one is in the mean."""
        self._num_rollouts += num_rollouts
        self._num_bytes += num_bytes

    def has_room(self, num_groups: int) -> bool:
        """True if a work unit may begin before which the schedule has so many groups."""
        if self._limit is None:
            return True
        # Of what this explorer has committed; a resumed one begins without, and lets units begin until it knows.
        mean_bytes = self._num_bytes / max(1, self._num_rollouts)
        # What was settled when the ledger was last read may be enough, and saves another look.
        if self._limit.admits((num_groups - self._num_settled) * self._repeat_times, mean_bytes):
            return True
        self._num_settled = self._settled.count()
        return self._limit.admits((num_groups - self._num_settled) * self._repeat_times, mean_bytes)


class SettledGroups:
    """Counts the groups that the ledger has settled. Reading on costs one look at the next entry."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._step: int | None = None  # The last entry that is counted; None before the first look.
        self._count = 0

    def count(self) -> int:
        """Count up to the last entry there is now."""
        if self._step is None:
            self._step = step = self._ledger.last_step()
            # From the newest entry back to one that notes the count, or to the first: most runs read one.
            while step > 0:
                entry = self._ledger.read(step)
                if entry is not None and SETTLED_NOTE in entry.notes:
                    self._count += int(entry.notes[SETTLED_NOTE])
                    break
                self._count += len(entry.positions) if entry is not None else 0
                step -= 1
        while (entry := self._ledger.read(self._step + 1)) is not None:
            self._step += 1
            self._count += len(entry.positions)
        return self._count
