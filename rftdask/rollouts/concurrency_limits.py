"""Limits on how many rollouts of a kind run at once, also across work units.

A rollout takes one slot of each of its kinds, all of them or none: holding one while waiting for another could
deadlock. Work units that overlap in one engine share a `SharedSlots`, so the next unit takes the slots that the long
responses of one unit leave free.

Invariant: rollouts are admitted in the order in which they entered, except that one that waits for a full kind does not
hold up later ones that need other kinds. So the order of admission does not depend on timing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping

SLOT = "slot"
"""Kind of an engine's slots. A rollout has one from its beginning to its end."""


def slots_by_memory(cache_tokens: int, mean_tokens: float, fewest: int) -> int:
    """Slots of an engine whose KV cache holds `cache_tokens`, at least `fewest`. mean_tokens: mean length of a rollout.

    The maximum length would leave most of the cache unused, because most rollouts are before their end. If the slots
    are too many, the engine lets requests wait.
    """
    return max(fewest, int(cache_tokens / max(1.0, mean_tokens)))


class SharedSlots:
    """Slots by kind, shared by work units on several threads and event loops. Thread-safe."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        """limits: slots by kind. Other kinds are unlimited."""
        self._free = dict(limits)
        self._running: dict[Hashable, tuple[str, ...]] = {}
        self._waiting: dict[Hashable, tuple[tuple[str, ...], Callable[[], None]]] = {}
        self._changed = threading.Condition(threading.RLock())

    def limit(self, limits: Mapping[str, int]) -> None:
        """Limit more kinds, of which nothing runs yet. Existing limits stay."""
        with self._changed:
            self._free = {**limits, **self._free}

    def enter(self, key: Hashable, kinds: tuple[str, ...], admit: Callable[[], None]) -> None:
        """Request a slot of each of `kinds`. admit: called from any thread once `key` has them; must not block."""
        with self._changed:
            self._waiting[key] = kinds, admit
            self._admit(key)

    def change(self, kind: str, by: int) -> None:
        """Add slots to a limited kind, or remove slots as their holders leave."""
        with self._changed:
            self._free[kind] += by
            self._admit_all()

    def leave(self, key: Hashable) -> None:
        """Free the slots of `key` and admit the next keys. Idempotent."""
        with self._changed:
            self._waiting.pop(key, None)
            for kind in self._running.pop(key, ()):
                if kind in self._free:
                    self._free[kind] += 1
            self._admit_all()

    def wait_for_slot(self, kind: str, timeout_s: float) -> bool:
        """Wait until a slot of the kind is free; False after `timeout_s`. Only one thread may be about to take it."""
        with self._changed:
            return self._changed.wait_for(lambda: self._has_slot(kind), timeout_s)

    def _has_slot(self, kind: str) -> bool:
        return self._free.get(kind, 1) > 0

    def _admit_all(self) -> None:
        for key in list(self._waiting):  # in the order of entry
            self._admit(key)
        self._changed.notify_all()

    def _admit(self, key: Hashable) -> None:
        kinds, admit = self._waiting[key]
        if all(map(self._has_slot, kinds)):
            for kind in kinds:
                if kind in self._free:
                    self._free[kind] -= 1
            del self._waiting[key]
            self._running[key] = kinds
            admit()
