"""ConcurrencyLimiter: which rollouts may run now, under limits on how many of a kind run at once. No clock, no tasks.

Invariant: rollouts are admitted in the order of the batch, except that one that waits for a full kind does not hold up
those behind it that need another. So who runs depends on who has ended, not on timing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class ConcurrencyLimiter(Generic[Key]):
    """Example:
    limiter = ConcurrencyLimiter({"sandbox": 2})
    [limiter.enter(key, ("sandbox",)) for key in "abc"]  ->  [True, True, False]
    limiter.leave("b")  ->  ["c"]
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        """limits: places of each kind; a kind without one has any number."""
        self._free = dict(limits)
        self._running: dict[Key, tuple[str, ...]] = {}
        self._waiting: dict[Key, tuple[str, ...]] = {}

    def enter(self, key: Key, kinds: tuple[str, ...]) -> bool:
        """Ask for a place of each of `kinds`. Returns: True if `key` runs at once; else a later `leave` names it."""
        self._waiting[key] = kinds
        return bool(self._admit(key))

    def leave(self, key: Key) -> list[Key]:
        """Give up the places of `key`. Returns: those that run in its place. Idempotent."""
        self._waiting.pop(key, None)
        for kind in self._running.pop(key, ()):
            if kind in self._free:
                self._free[kind] += 1
        return [waiting for waiting in list(self._waiting) if self._admit(waiting)]

    def _admit(self, key: Key) -> bool:
        kinds = self._waiting[key]
        if any(self._free.get(kind, 1) <= 0 for kind in kinds):
            return False
        for kind in kinds:
            if kind in self._free:
                self._free[kind] -= 1
        self._running[key] = self._waiting.pop(key)
        return True
