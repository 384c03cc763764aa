"""StreamingQueue: forwards requests of rollouts to the engine as they arrive, and returns each answer when finished.

`LockstepQueue` is the alternative whose calls do not depend on timing. Requests of one pass of the event loop reach the
engine together, so that sibling rollouts share the work on their prompt; later requests join the running ones. The
request of a cancelled rollout is removed from the engine. Used on one event loop.

Invariant: no request waits for a silent engine. If requests have been running for `timeout_s` since the last answer,
all waiting requests raise WaitTimeout. Cancelled requests do not count as answers, so a hung engine is detected even if
rollouts keep giving up and retrying.
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
"""Returns futures of the answers in the order of the requests, without blocking. Cancelling a future removes its
request from the engine. Errors of the futures fail the whole work unit."""


@dataclass(frozen=True)
class Streaming:
    submit: Submit
    timeout_s: float
    """Longest silence while requests are running."""
    name: str = "the engine"
    answered_s: Callable[[], float] = lambda: -math.inf
    """Returns the monotonic time of its last answer to any work unit."""


class StreamingQueue(RequestQueue):
    def __init__(self, engine: Streaming) -> None:
        super().__init__()
        self._engine = engine
        self._outbox: list[tuple[GenerateRequest, asyncio.Future[Generation]]] = []
        self._running: dict[asyncio.Future[Generation], Future[Generation]] = {}
        """Future that a rollout awaits -> future that the engine sets."""
        self._silent_s = 0.0
        """Part of `busy_s` since the last answer."""
        self._counted_until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def generate(self, key: RolloutKey, turn: int, request: GenerateRequest) -> Generation:
        if self.failure is not None:
            raise self.failure
        loop = asyncio.get_running_loop()
        if not self._outbox:
            # Later in this pass of the event loop, because siblings send the same prompt in it.
            loop.call_soon(self._flush)
        answer: asyncio.Future[Generation] = loop.create_future()
        self._outbox.append((request, answer))
        return await answer

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for future in self._running.values():
            future.cancel()
        for answer in (*self._running, *(answer for _, answer in self._outbox)):
            answer.cancel()

    def _flush(self) -> None:
        waiting = [(request, answer) for request, answer in self._outbox if not answer.done()]
        if not waiting:  # all were cancelled
            self._outbox = []
            return
        self._count()
        try:
            futures = self._engine.submit([request for request, _ in waiting])
        except Exception as error:  # passed to every rollout
            self._fail(error)
            return
        self._outbox = []
        for (_, answer), future in zip(waiting, futures, strict=True):
            self._running[answer] = future
            # The engine sets its futures from another thread; wrapped, they call back on this loop.
            asyncio.wrap_future(future).add_done_callback(partial(self._answered, answer))
            answer.add_done_callback(self._left)
        if self._timer is None:
            self._watch()

    def _answered(self, answer: asyncio.Future[Generation], future: asyncio.Future[Generation]) -> None:
        if future.cancelled():
            return
        self._count()
        self._silent_s = 0.0
        error = future.exception()
        if isinstance(error, Exception):
            self._fail(error)
        elif not answer.done():  # done if its rollout was cancelled
            answer.set_result(future.result())

    def _left(self, answer: asyncio.Future[Generation]) -> None:
        self._count()
        # Called however the wait ends; cancelling an answered request does nothing.
        self._running.pop(answer).cancel()

    def _count(self) -> None:
        # Add the time since the last count to `busy_s` and to the silence, if requests were running.
        now_s = asyncio.get_running_loop().time()
        if self._running:
            self.busy_s += now_s - self._counted_until_s
            self._silent_s += now_s - self._counted_until_s
        self._counted_until_s = now_s

    def _watch(self) -> None:
        # Check the silence now, and again at the earliest time at which it may be too long.
        self._timer = None
        if not self._running:
            return
        self._count()
        # Answers to other work units also show that the engine is alive.
        self._silent_s = min(self._silent_s, time.monotonic() - self._engine.answered_s())
        remaining_s = self._engine.timeout_s - self._silent_s
        if remaining_s > 0:
            self._timer = asyncio.get_running_loop().call_later(remaining_s, self._watch)
        else:
            silent = f"{self._engine.name} gave no answer for {self._silent_s:.0f} s"
            self._fail(WaitTimeout(f"{silent}, with {len(self._running)} requests running"))

    def _fail(self, error: Exception) -> None:
        # Fail all waiting requests, because none can continue without the engine.
        self.failure = self.failure or error
        for answer in (*self._running, *(answer for _, answer in self._outbox)):
            if not answer.done():
                answer.set_exception(error)
