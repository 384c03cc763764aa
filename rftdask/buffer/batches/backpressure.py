"""Back-pressure: how far explorers may be ahead of the trainer. A pure rule, and the count that it needs.

The number of unread groups is known without messages: the schedule gives the number of groups before a work unit, and
the ledger the number of settled groups. Bytes are estimated from the mean size of the experiences committed so far.
Invariant: work that the next training batch may need is always admitted, so explorer and trainer cannot deadlock.
"""

from __future__ import annotations

from dataclasses import dataclass

from rftdask.buffer.batches.ledger import Ledger
from rftdask.config import Config

SETTLED_NOTE = "settled_groups"
"""Note of a ledger entry: number of groups that it and all entries before it settle."""


@dataclass(frozen=True)
class UnreadLimit:
    """Example: UnreadLimit(max_experiences=4096, max_bytes=None, always=512).admits(4000, mean_bytes=0.0)"""

    max_experiences: int | None
    max_bytes: int | None
    always: int
    """Number of experiences that may be unread regardless of the limits: those of a training batch."""

    def admits(self, unread: int, mean_bytes: float) -> bool:
        """Return True if a work unit may begin while `unread` experiences before it are unread or being sampled.

        mean_bytes: mean size of an experience; 0 while unknown, which admits the unit.
        """
        # Without this the trainer might wait for a batch that the limit prevents from being filled.
        if unread < self.always:
            return True
        if self.max_experiences is not None and unread >= self.max_experiences:
            return False
        return self.max_bytes is None or unread * mean_bytes < self.max_bytes


def unread_limit(config: Config) -> UnreadLimit | None:
    """Return the limit of unread experiences in the config; None if only the sync style holds explorers back."""
    section = config.buffer.trainer_input.experience_buffer
    if config.mode != "both" or (section.capacity is None and section.max_unread_bytes is None):
        return None
    return UnreadLimit(section.capacity, section.max_unread_bytes, always=config.num_own_rollouts)


class Backpressure:
    """Applies the unread limit in one explorer.

    Example:
        backpressure = Backpressure(config, Ledger(storage))
        backpressure.add(num_rollouts=64, num_bytes=250_000)      # when a work unit was committed
        if backpressure.has_room(num_groups=512): ...             # may the unit after 512 groups begin?
    """

    def __init__(self, config: Config, ledger: Ledger) -> None:
        self._limit = unread_limit(config)
        self._repeat_times = config.algorithm.repeat_times
        self._settled = SettledGroups(ledger)
        self._num_settled = 0
        self._num_rollouts = self._num_bytes = 0

    def add(self, num_rollouts: int, num_bytes: int) -> None:
        """Add committed rollouts to the mean size of a rollout."""
        self._num_rollouts += num_rollouts
        self._num_bytes += num_bytes

    def has_room(self, num_groups: int) -> bool:
        """Return True if the work unit that follows `num_groups` groups of the schedule may begin."""
        if self._limit is None:
            return True
        # Counts only what this explorer has committed: a resumed one starts at 0, which admits units.
        mean_bytes = self._num_bytes / max(1, self._num_rollouts)
        # The count of the last reading may be enough, which saves reading the ledger again.
        if self._limit.admits((num_groups - self._num_settled) * self._repeat_times, mean_bytes):
            return True
        self._num_settled = self._settled.count()
        return self._limit.admits((num_groups - self._num_settled) * self._repeat_times, mean_bytes)


class SettledGroups:
    """Counts the groups that the ledger has settled. An update reads only the new entries and tries one more."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._step: int | None = None  # The last entry counted; None before the first call.
        self._count = 0

    def count(self) -> int:
        """Return the number of groups settled up to the newest entry."""
        if self._step is None:
            self._step = step = self._ledger.last_step()
            # Backwards from the newest entry to one that notes the count, or to the first: most runs read one.
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
