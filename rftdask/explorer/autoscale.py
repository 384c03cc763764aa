"""Autoscale: how many explorer workers a run asks for. A pure rule of counters and times; knows no cluster.

What there is to do decides: a worker runs one work unit at a time, so more workers than units that could run this
moment are of no use. The staleness bound is in that number: a unit that has to wait for newer weights cannot run.
More are asked for at once; fewer only after a time in which nobody missed them, because an engine takes long to load
and because the explorer of a run in lock-step has nothing to do in every other moment. What the cluster gives decides,
too: of workers that were asked for and have not come there are never more than twice as many as have.

Invariant: min_workers <= target <= max_workers, whatever is seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

IDLE_S = 60.0
"""Time without use after which a worker is let go: about what it takes to load an engine again."""
OPEN_REQUESTS = 8
"""Workers that may be asked for and not there, however few have come: a queue that gives nothing is not flooded."""


@dataclass(frozen=True)
class ScaleRule:
    """The number of workers to ask for, from what was seen until now. Immutable: `after` gives the next one.

    Example:
        rule = ScaleRule(min_workers=2, max_workers=16)
        rule = rule.after(at_s=10.0, num_workers=2, backlog=40)
        rule.target == 10   # 8 more than there are
    """

    min_workers: int
    max_workers: int
    idle_s: float = IDLE_S
    asked: int = 0
    """Workers that were asked for last; 0: none yet."""
    needed: int = 0
    """Most workers that were of use at any moment since `since_s`, of those that were asked for."""
    since_s: float = 0.0
    """Last moment at which all that were asked for were of use, or fewer were asked for."""
    seen_s: float = 0.0
    """Time of the last look."""

    def __post_init__(self) -> None:
        if not 0 < self.min_workers <= self.max_workers:
            raise ValueError(f"min_workers {self.min_workers} and max_workers {self.max_workers}: 0 < min <= max")

    @property
    def target(self) -> int:
        """Workers to ask for now."""
        return self._bounded(self.asked)

    def after(self, at_s: float, num_workers: int, backlog: int) -> ScaleRule:
        """The rule once it is known what there is at one moment.

        Args:
            at_s: time on any clock that does not go back.
            num_workers: explorer workers that are there.
            backlog: work units under way or ready to run this moment.
        """
        # Up soon, down late: a worker that waits costs less than one that has to load its model again.
        wanted = self._bounded(backlog)
        if wanted >= self.target:
            # More than the cluster has given are asked for step by step, so that it is not flooded.
            reachable = num_workers + max(OPEN_REQUESTS, num_workers)
            asked = max(self.target, min(wanted, reachable))
            return replace(self, asked=asked, needed=0, since_s=at_s, seen_s=at_s)
        # The most that was of use in the whole time, not what is of use this moment.
        needed = max(self.needed, wanted)
        if at_s - self.since_s < self.idle_s:
            return replace(self, asked=self.target, needed=needed, seen_s=at_s)
        # Down to the most that was of use, in one step: whoever is above it had nothing to do all the time.
        return replace(self, asked=self._bounded(needed), needed=0, since_s=at_s, seen_s=at_s)

    def _bounded(self, count: int) -> int:
        return max(self.min_workers, min(count, self.max_workers))
