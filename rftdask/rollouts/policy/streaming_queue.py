"""StreamingQueue: hands requests of rollouts on to the engine as they come, and each answer back once it is finished.

The other one is `LockstepQueue`, whose calls do not depend on timing. Here what is asked in one pass of the event loop
reaches the engine together, so that the siblings of a group share the work on their prompt; what comes later enters
beside it. A request whose rollout is cancelled leaves the engine. One event loop.

Invariant: nobody waits for an engine that has gone silent. When something has been under way for `timeout_s` seconds
since the last answer, everybody who waits gets a WaitTimeout. Cancelled requests are no answers: an engine that hangs
is found out however often its rollouts give up and try again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from rftdask.engines.base import GenerateRequest, Generation
from rftdask.errors import WaitTimeout
from rftdask.rollouts.policy.lockstep_queue import RequestQueue, RolloutKey

Submit = Callable[[list[GenerateRequest]], Sequence[Future[Generation]]]
"""Returns futures of the answers, in the order of the requests, without blocking. A cancelled one's request leaves the
engine. What they raise ends the whole work unit."""


@dataclass(frozen=True)
class Streaming:
    """An engine that takes requests while others are under way."""

    submit: Submit
    timeout_s: float
    """Longest silence while something is under way."""
    name: str = "the engine"
    answered_s: Callable[[], float] = lambda: -math.inf
    """Time of its last answer to anybody, by the monotonic clock."""


class StreamingQueue(RequestQueue):
    """The rollouts of one work unit in front of one engine.

    Example:
        stream = StreamingQueue(Streaming(client.submit, timeout_s=1800))
        ...  # each rollout: await stream.generate(key, turn, request)
        await stream.close()
    """

    def __init__(self, engine: Streaming) -> None:
        super().__init__()
        self._engine = engine
        self._outbox: list[tuple[GenerateRequest, asyncio.Future[Generation]]] = []
        self._under_way: dict[asyncio.Future[Generation], Future[Generation]] = {}
        """Future that a rollout waits for -> future that the engine will set."""
        self._silent_s = 0.0
        """Seconds of `busy_s` since the last answer."""
        self._counted_until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def generate(self, key: RolloutKey, turn: int, request: GenerateRequest) -> Generation:
        """Goes to the engine in this pass of the event loop, with what others ask in it."""
        if self.failure is not None:
            raise self.failure
        loop = asyncio.get_running_loop()
        if not self._outbox:
            # Not at once: siblings ask for the same prompt in this pass of the event loop.
            loop.call_soon(self._flush)
        answer: asyncio.Future[Generation] = loop.create_future()
        self._outbox.append((request, answer))
        return await answer

    async def close(self) -> None:
        """Cancel what is under way, so that it leaves the engine. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        for future in self._under_way.values():
            future.cancel()
        for answer in (*self._under_way, *(answer for _, answer in self._outbox)):
            answer.cancel()

    def _flush(self) -> None:
        asked = [(request, answer) for request, answer in self._outbox if not answer.done()]
        if not asked:  # all of them were cancelled
            self._outbox = []
            return
        self._count()
        try:
            sent = self._engine.submit([request for request, _ in asked])
        except Exception as error:  # not caught but handed on, to every rollout
            self._fail(error)
            return
        self._outbox = []
        for (_, answer), future in zip(asked, sent, strict=True):
            self._under_way[answer] = future
            # The engine sets its futures from another thread; wrapped, they call back on this loop.
            asyncio.wrap_future(future).add_done_callback(partial(self._answered, answer))
            answer.add_done_callback(self._left)
        if self._timer is None:
            self._watch()

    def _answered(self, answer: asyncio.Future[Generation], found: asyncio.Future[Generation]) -> None:
        if found.cancelled():  # nobody wanted it any more
            return
        self._count()
        self._silent_s = 0.0
        error = found.exception()
        if isinstance(error, Exception):
            self._fail(error)
        elif not answer.done():  # done: its rollout was cancelled meanwhile
            answer.set_result(found.result())

    def _left(self, answer: asyncio.Future[Generation]) -> None:
        self._count()
        # Also of an answered one: so every way out of waiting goes through here.
        self._under_way.pop(answer).cancel()  # which of what was answered does nothing

    def _count(self) -> None:
        # Add the time until now to `busy_s` and to the silence, if something was under way.
        now_s = asyncio.get_running_loop().time()
        if self._under_way:
            self.busy_s += now_s - self._counted_until_s
            self._silent_s += now_s - self._counted_until_s
        self._counted_until_s = now_s

    def _watch(self) -> None:
        # Look again when the engine may have been silent for too long.
        self._timer = None
        if not self._under_way:
            return
        self._count()
        # Also other units' answers show that it lives.
        self._silent_s = min(self._silent_s, time.monotonic() - self._engine.answered_s())
        remaining_s = self._engine.timeout_s - self._silent_s
        if remaining_s > 0:
            self._timer = asyncio.get_running_loop().call_later(remaining_s, self._watch)
        else:
            silent = (
                f"{self._engine.name} gave no answer for {self._silent_s:.0f} s, with {len(self._under_way)} requests "
                "under way"
            )
            self._fail(WaitTimeout(silent))

    def _fail(self, error: Exception) -> None:
        # Fail everybody who waits: none can go on without the engine.
        self.failure = self.failure or error
        for answer in (*self._under_way, *(answer for _, answer in self._outbox)):
            if not answer.done():
                answer.set_exception(error)
