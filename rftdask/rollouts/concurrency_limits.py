"""Places: which rollouts may run now, under limits on how many of a kind run at once; also over several work units.
And what an engine's memory of keys and values has room for, which limits the calls of a server one by one
(`TokenRoom`), and the rollouts of an explorer by their mean (`slots_by_memory`).

A rollout takes one place of each of its kinds, all of them or none: holding one while waiting for another could block
two for ever. A *slot* of an engine is such a kind: work units that overlap in one engine share a `SharedPlaces`, so
that what the long responses of one unit leave free is taken by the next. No clock, no engine.

Invariant: rollouts are admitted in the order in which they entered, except that one that waits for a full kind does not
hold up those behind it that need another. So who runs depends on who has ended, not on timing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
SLOT = "slot"
"""Kind of place of an engine's slots; a rollout has one from its beginning to its end."""


class TokenRoom:
    """The memory of an engine for keys and values, in tokens: what may enter it, beside what is in it. The pure rule.

    Example:
        room = TokenRoom(100)
        room.take(60); room.has_room(50), room.has_room(40)  ->  False, True
        room.give(60); room.has_room(300)  ->  True, for one by itself is never too large
    """

    def __init__(self, num_tokens: int | None) -> None:
        """num_tokens: that it has room for; None: not known, so there is room for any."""
        self.num_tokens = num_tokens
        self.taken = 0

    def has_room(self, needed: int) -> bool:
        """True if what needs so many tokens may enter now."""
        return self.num_tokens is None or not self.taken or self.missing(needed) <= 0

    def missing(self, needed: int) -> int:
        """Tokens that have to be given before there is room for so many; 0 or less: none."""
        return 0 if self.num_tokens is None else self.taken + needed - self.num_tokens

    def take(self, num_tokens: int) -> None:
        """Something has entered."""
        self.taken += num_tokens

    def give(self, num_tokens: int) -> None:
        """It has left."""
        self.taken -= num_tokens


def slots_by_memory(cache_tokens: int, mean_tokens: float, fewest: int) -> int:
    """Slots of an engine that has room for the keys and values of so many tokens.

    Not by the longest that rollouts may become, of which they would leave most unused: they are many, and most of them
    under way are not at their end; where it was too many all the same, the engine lets requests wait.

    Args: mean_tokens: of a rollout at its end, its longest sequence; fewest: slots in any case.
    Example: slots_by_memory(400_000, 1_600.0, fewest=64) == 250
    """
    return max(fewest, int(cache_tokens / max(1.0, mean_tokens)))


class ConcurrencyLimiter(Generic[Key]):
    """The pure rule.

    Example:
    limiter = ConcurrencyLimiter({"sandbox": 2})
    [limiter.enter(key, ("sandbox",)) for key in "abc"]  ->  [True, True, False]
    limiter.leave("b")  ->  ["c"]
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        """limits: places of each kind; a kind without one has any number."""
        self._free = dict(limits)
        self._running: dict[Key, tuple[str, ...]] = {}
        self._waiting: dict[Key, tuple[str, ...]] = {}

    def limit(self, limits: Mapping[str, int]) -> None:
        """Limit more kinds, of which nothing runs yet; those that are limited stay as they are."""
        self._free = {**limits, **self._free}

    def change(self, kind: str, by: int) -> list[Key]:
        """Have more places of a kind that is limited, or fewer, which those that run give up as they leave. Returns:
        those that run from now on.
        """
        self._free[kind] += by
        return self._admit_all()

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
        return self._admit_all()

    def _admit_all(self) -> list[Key]:
        # In the order in which they came; a copy, because those that are admitted leave.
        return [waiting for waiting in list(self._waiting) if self._admit(waiting)]

    def has_room(self, kind: str) -> bool:
        """True if a place of the kind is free."""
        return self._free.get(kind, 1) > 0

    def _admit(self, key: Key) -> bool:
        kinds = self._waiting[key]
        if any(self._free.get(kind, 1) <= 0 for kind in kinds):
            return False
        for kind in kinds:
            if kind in self._free:
                self._free[kind] -= 1
        # The places are kept by name, since a rollout gives back the very ones that it took.
        self._running[key] = self._waiting.pop(key)
        return True


class SharedPlaces:
    """The places of one engine, for work units on threads and event loops of their own. Used from any thread.

    Example:
        places = SharedPlaces({SLOT: 8})
        places.enter((unit, key), (SLOT,), admit=lambda: ...)   # calls `admit` now, or when somebody else leaves
        places.leave((unit, key))
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        """limits: places of each kind; a kind without one has any number."""
        self._limiter: ConcurrencyLimiter[Hashable] = ConcurrencyLimiter(limits)
        self._admit: dict[Hashable, Callable[[], None]] = {}
        """What to call for those that wait."""
        self._changed = threading.Condition(threading.RLock())

    def limit(self, limits: Mapping[str, int]) -> None:
        """Limit more kinds; those that are limited stay as they are."""
        with self._changed:
            self._limiter.limit(limits)

    def enter(self, key: Hashable, kinds: tuple[str, ...], admit: Callable[[], None]) -> None:
        """Ask for a place of each of `kinds`. admit: called once they are there, from any thread; must not block."""
        with self._changed:
            self._admit[key] = admit
            if self._limiter.enter(key, kinds):
                self._admit.pop(key)()

    def change(self, kind: str, by: int) -> None:
        """Have more places of a kind that is limited, or fewer, and admit those that run then."""
        with self._changed:
            for admitted in self._limiter.change(kind, by):
                self._admit.pop(admitted)()
            self._changed.notify_all()

    def leave(self, key: Hashable) -> None:
        """Give up the places of `key`, and admit those that run in its place. Idempotent."""
        with self._changed:
            self._admit.pop(key, None)
            for admitted in self._limiter.leave(key):
                self._admit.pop(admitted)()
            self._changed.notify_all()

    def wait_for_room(self, kind: str, timeout_s: float) -> bool:
        """Wait until a place of the kind is free; False: not in `timeout_s`. Nobody else may be about to take it."""
        with self._changed:
            return self._changed.wait_for(lambda: self._limiter.has_room(kind), timeout_s)
