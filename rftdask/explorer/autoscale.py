"""Number of explorer workers that a run requests. A pure rule of counters and times, which does not know the cluster.

More workers than runnable units are useless. The rule requests more workers at once, but fewer only after a time
without need for them, because loading an engine takes long, and because the explorer of a run in lockstep is idle half
of the time. At most as many requested workers may be missing as have joined, or `OPEN_REQUESTS`.

Invariant: min_workers <= target <= max_workers, whatever is observed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

IDLE_S = 60.0
"""Idle time after which a worker is released: about the time to load an engine again."""
OPEN_REQUESTS = 8
"""Requested workers that may be missing, however few have joined, so that a full queue is not flooded."""


@dataclass(frozen=True)
class ScaleRule:
    """Number of workers to request, from past observations. Immutable: `after` returns the next rule."""

    min_workers: int
    max_workers: int
    idle_s: float = IDLE_S
    asked: int = 0
    """Number of workers in the last request. 0: no request yet."""
    needed: int = 0
    """Largest number of requested workers that were useful at one time since `since_s`."""
    since_s: float = 0.0
    """Last time at which all requested workers were useful, or fewer were requested."""
    seen_s: float = 0.0
    """Time of the last observation."""

    def __post_init__(self) -> None:
        if not 0 < self.min_workers <= self.max_workers:
            raise ValueError(f"min_workers {self.min_workers} and max_workers {self.max_workers}: 0 < min <= max")

    @property
    def target(self) -> int:
        return self._bounded(self.asked)

    def after(self, at_s: float, num_workers: int, backlog: int) -> ScaleRule:
        """Rule after an observation at a monotonic time. num_workers: workers that have joined; backlog: work units
        that run or could run now.
        """
        wanted = self._bounded(backlog)
        if wanted >= self.target:
            # Request many workers step by step, so that the cluster is not flooded.
            reachable = num_workers + max(OPEN_REQUESTS, num_workers)
            asked = max(self.target, min(wanted, reachable))
            return replace(self, asked=asked, needed=0, since_s=at_s, seen_s=at_s)
        needed = max(self.needed, wanted)
        if at_s - self.since_s < self.idle_s:
            return replace(self, asked=self.target, needed=needed, seen_s=at_s)
        # Shrink in one step to the largest useful number: the workers above it were idle all the time.
        return replace(self, asked=self._bounded(needed), needed=0, since_s=at_s, seen_s=at_s)

    def _bounded(self, count: int) -> int:
        return max(self.min_workers, min(count, self.max_workers))
