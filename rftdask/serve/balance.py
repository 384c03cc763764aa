"""Balanced: the engines of a server, which may come and go, as one queue. Knows neither processes nor sockets.

A call goes to the engine with the most of its memory free, if there is room for its prompt and its longest answer; it
is refused where none has room. A call whose engine is lost goes to another one, as if it had not been made, unless its
asker was told the beginning of an answer. Used on one event loop.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rftdask.engines.base import GenerateRequest, Generation
from rftdask.engines.client import AskedEngine
from rftdask.errors import RoleError, WaitTimeout
from rftdask.rollouts.concurrency_limits import KvCacheBudget
from rftdask.rollouts.policy.lockstep_queue import RequestQueue, RolloutKey
from rftdask.rollouts.policy.streaming_queue import Streaming, StreamingQueue

MAX_LOSSES = 3
"""Engines in a row that are lost while they have a call, before it is refused: it may be what ends them."""
MAX_UNSIZED = 64
"""Calls that an engine is given at once whose memory is not known."""
_TIMEOUT_S = 600.0
"""Longest silence of an engine that has something to do; then it counts as lost."""
_NEWEST_SHARE = 0.1
"""Of a call in the mean time of calls."""
_MAX_RETRY_AFTER_S = 30

log = logging.getLogger(__name__)


class FullError(RuntimeError):
    """No engine has room for a call. `retry_after_s`: seconds after which one may have."""

    def __init__(self, text: str, retry_after_s: int) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class NoEngineError(RuntimeError):
    """No engine is there at the moment."""


@dataclass(eq=False)
class _Place:
    """An engine, and what it has to do."""

    engine: AskedEngine
    queue: RequestQueue
    room: KvCacheBudget
    """Of which prompts and longest answers are taken that are under way."""
    num_calls: int = 0

    @property
    def is_lost(self) -> bool:
        return self.queue.failure is not None or not self.engine.alive()

    @property
    def share(self) -> float:
        """Of its memory that is taken; of engines that do not say how much they have, tokens."""
        return self.room.taken / (self.room.num_tokens or 1)


class Balanced(RequestQueue):
    """Example:
    balanced = Balanced()
    balanced.add(engine)
    generation = await balanced.generate(key, turn, request)
    """

    def __init__(self, max_unsized: int | None = MAX_UNSIZED, clock: Callable[[], float] = time.monotonic) -> None:
        """max_unsized: calls at once for an engine whose memory is not known; None: any number."""
        super().__init__()
        self._max_unsized, self._clock = max_unsized, clock
        self._places: list[_Place] = []
        self._mean_s = 0.0
        """Of calls, the newest count most."""

    def add(self, engine: AskedEngine) -> None:
        """Ask it from now on."""
        queue = StreamingQueue(Streaming(engine.submit, _TIMEOUT_S, str(engine)))
        self._places.append(_Place(engine, queue, KvCacheBudget(engine.cache_tokens)))

    def take_lost(self) -> list[AskedEngine]:
        """Those that are lost; from here on they are known no more."""
        lost = [place for place in self._places if place.is_lost]
        # Not by asking again: one that is lost in this moment is for the next call.
        self._places = [place for place in self._places if place not in lost]
        return [place.engine for place in lost]

    @property
    def engines(self) -> list[AskedEngine]:
        """Those that are asked."""
        return [place.engine for place in self._places if not place.is_lost]

    async def generate(self, key: RolloutKey, turn: int, request: GenerateRequest) -> Generation:
        """See RequestQueue. Raises: FullError, NoEngineError: it was not asked; RoleError, WaitTimeout: engines were
        lost while they had it.
        """
        needed, was_told = len(request.prompt_tokens) + request.sampling.max_tokens, False
        tell = request.on_tokens
        if tell is not None:

            def on_tokens(tokens: tuple[int, ...]) -> None:
                nonlocal was_told
                was_told = True
                tell(tokens)

            request = replace(request, on_tokens=on_tokens)
        num_losses = 0
        while True:
            place = self._choose(needed)
            place.room.take(needed)
            place.num_calls += 1
            began_s = self._clock()
            try:
                return await place.queue.generate(key, turn, request)
            except (RoleError, WaitTimeout) as error:
                num_losses += 1
                # What was told cannot be taken back, and another engine would draw another answer.
                if was_told or num_losses >= MAX_LOSSES:
                    raise
                log.info("a call goes to another engine: %s", error)
            finally:
                place.room.give(needed)
                place.num_calls -= 1
                self._mean_s += _NEWEST_SHARE * (self._clock() - began_s - self._mean_s)

    def _choose(self, needed: int) -> _Place:
        """The engine for a call that may need so many tokens. Raises: FullError, NoEngineError."""
        there = [place for place in self._places if not place.is_lost]
        if not there:
            raise NoEngineError("no engine is there at the moment; come again")
        most = self._max_unsized
        free = [
            place
            for place in there
            if place.room.has_room(needed)
            and (place.room.num_tokens is not None or most is None or place.num_calls < most)
        ]
        if free:
            return min(free, key=lambda place: place.share)
        missing, place = min(((place.room.missing(needed), place) for place in there), key=lambda each: each[0])
        if place.room.num_tokens is None:
            raise FullError(f"an engine is given {most} requests at once, and has as many; come again", 1)
        raise FullError(
            f"the request may need {needed} tokens of an engine's memory, of whose {place.room.num_tokens} "
            f"{place.room.taken} are taken; come again, or ask for fewer max_tokens",
            self._retry_after_s(missing, place),
        )

    def _retry_after_s(self, missing: int, place: _Place) -> int:
        """Seconds in which so many tokens become free there, if each call keeps its own as long as calls did lately."""
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(missing / max(1, place.room.taken) * self._mean_s)))

    async def close(self) -> None:
        """See RequestQueue."""
        for place in self._places:
            await place.queue.close()
