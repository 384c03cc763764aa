"""Limits on how many rollouts of a kind run at once, also across work units, and the KV cache budget of an engine.

A rollout takes one slot of each of its kinds, all of them or none: holding one while waiting for another could
deadlock. An engine's slots are such a kind (`SLOT`). Work units that overlap in one engine share a `SharedSlots`, so
the next unit takes the slots that the long responses of one unit leave free. The KV cache bounds the requests of a
server one by one (`KvCacheBudget`), and an explorer's rollouts by their mean length (`slots_by_memory`).

Invariant: rollouts are admitted in the order in which they entered, except that one that waits for a full kind does not
hold up later ones that need other kinds. So who runs depends on who has ended, not on timing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
SLOT = "slot"
"""Kind of an engine's slots. A rollout has one from its beginning to its end."""


class KvCacheBudget:
    """Tokens of keys and values that an engine's memory holds, and those in use.

    Example:
        budget = KvCacheBudget(100)
        budget.take(60); budget.has_room(50), budget.has_room(40)  ->  False, True
        budget.give(60); budget.has_room(300)  ->  True, because an empty engine takes any request
    """

    def __init__(self, num_tokens: int | None) -> None:
        """num_tokens: capacity. None: unknown, so there is always room."""
        self.num_tokens = num_tokens
        self.taken = 0

    def has_room(self, needed: int) -> bool:
        """True if a request of `needed` tokens may enter now."""
        return self.num_tokens is None or not self.taken or self.missing(needed) <= 0

    def missing(self, needed: int) -> int:
        """Tokens to be freed before a request of `needed` tokens fits. 0 or less: it fits."""
        return 0 if self.num_tokens is None else self.taken + needed - self.num_tokens

    def take(self, num_tokens: int) -> None:
        """Count a request that entered."""
        self.taken += num_tokens

    def give(self, num_tokens: int) -> None:
        """Free the tokens of a request that ended."""
        self.taken -= num_tokens


def slots_by_memory(cache_tokens: int, mean_tokens: float, fewest: int) -> int:
    """Slots of an engine whose KV cache holds `cache_tokens`.

    The maximum length of rollouts would leave most of the cache unused: many rollouts run, most of them before their
    end. If the slots turn out to be too many, the engine lets requests wait.

    Args: mean_tokens: mean length of a rollout at its end, its longest sequence; fewest: lower bound of the result.
    Example: slots_by_memory(400_000, 1_600.0, fewest=64) == 250
    """
    return max(fewest, int(cache_tokens / max(1.0, mean_tokens)))


class ConcurrencyLimiter(Generic[Key]):
    """Decides who may run. Not thread-safe.

    Example:
        limiter = ConcurrencyLimiter({"sandbox": 2})
        [limiter.enter(key, ("sandbox",)) for key in "abc"]  ->  [True, True, False]
        limiter.leave("b")  ->  ["c"]
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        """limits: slots by kind. Other kinds are unlimited."""
        self._free = dict(limits)
        self._running: dict[Key, tuple[str, ...]] = {}
        self._waiting: dict[Key, tuple[str, ...]] = {}

    def limit(self, limits: Mapping[str, int]) -> None:
        """Limit more kinds, of which nothing runs yet. Existing limits stay."""
        self._free = {**limits, **self._free}

    def change(self, kind: str, by: int) -> list[Key]:
        """Add slots to a limited kind, or remove slots as their holders leave. Returns: keys that run from now on."""
        self._free[kind] += by
        return self._admit_all()

    def enter(self, key: Key, kinds: tuple[str, ...]) -> bool:
        """Request a slot of each of `kinds`. Returns: True if `key` runs at once; else a later `leave` returns it."""
        self._waiting[key] = kinds
        return bool(self._admit(key))

    def leave(self, key: Key) -> list[Key]:
        """Free the slots of `key`. Returns: keys that run from now on. Idempotent."""
        self._waiting.pop(key, None)
        for kind in self._running.pop(key, ()):
            if kind in self._free:
                self._free[kind] += 1
        return self._admit_all()

    def _admit_all(self) -> list[Key]:
        # In the order of entry; a copy, because admitted keys leave the dict.
        return [waiting for waiting in list(self._waiting) if self._admit(waiting)]

    def has_slot(self, kind: str) -> bool:
        """True if a slot of the kind is free."""
        return self._free.get(kind, 1) > 0

    def _admit(self, key: Key) -> bool:
        kinds = self._waiting[key]
        if not all(map(self.has_slot, kinds)):
            return False
        for kind in kinds:
            if kind in self._free:
                self._free[kind] -= 1
        self._running[key] = self._waiting.pop(key)
        return True


class SharedSlots:
    """Slots of one engine, shared by work units on several threads and event loops. Thread-safe.

    Example:
        slots = SharedSlots({SLOT: 8})
        slots.enter((unit, key), (SLOT,), admit=lambda: ...)   # calls `admit` now, or when another rollout leaves
        slots.leave((unit, key))
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        """limits: slots by kind. Other kinds are unlimited."""
        self._limiter: ConcurrencyLimiter[Hashable] = ConcurrencyLimiter(limits)
        self._admit: dict[Hashable, Callable[[], None]] = {}
        """Callbacks of waiting keys."""
        self._changed = threading.Condition(threading.RLock())

    def limit(self, limits: Mapping[str, int]) -> None:
        """Limit more kinds. Existing limits stay."""
        with self._changed:
            self._limiter.limit(limits)

    def enter(self, key: Hashable, kinds: tuple[str, ...], admit: Callable[[], None]) -> None:
        """Request a slot of each of `kinds`. admit: called from any thread once `key` has them; must not block."""
        with self._changed:
            self._admit[key] = admit
            if self._limiter.enter(key, kinds):
                self._admit.pop(key)()

    def change(self, kind: str, by: int) -> None:
        """Add slots to a limited kind, or remove slots as their holders leave."""
        with self._changed:
            self._admit_keys(self._limiter.change(kind, by))

    def leave(self, key: Hashable) -> None:
        """Free the slots of `key` and admit the next keys. Idempotent."""
        with self._changed:
            self._admit.pop(key, None)
            self._admit_keys(self._limiter.leave(key))

    def _admit_keys(self, keys: list[Hashable]) -> None:
        for key in keys:
            self._admit.pop(key)()
        self._changed.notify_all()

    def wait_for_slot(self, kind: str, timeout_s: float) -> bool:
        """Wait until a slot of the kind is free; False after `timeout_s`. Only one thread may be about to take it."""
        with self._changed:
            return self._changed.wait_for(lambda: self._limiter.has_slot(kind), timeout_s)
