"""Queues from the rollouts of a work unit to an engine. No text, tasks or rewards. Used on one event loop.

`StreamingQueue` forwards requests as they arrive. Requests of one pass of the event loop reach the engine together, so
that sibling rollouts share the work on their prompt. The request of a cancelled rollout is removed from the engine.
Invariant: no request waits for a silent engine. If requests have been running for `timeout_s` since the last answer,
all waiting requests raise WaitTimeout. Cancelled requests do not count as answers, so a hung engine is detected even if
rollouts keep giving up and retrying.

`LockstepQueue` batches requests into few calls, for runs that must be bit-identical. A call is sent when every live
rollout waits for the engine, or `max_wait_s` after the last change if some rollouts are busy elsewhere; later calls do
not wait for those until they send a request again. Only one call is in flight. Requests are ordered by (task, rollout,
turn). If workflows wait only for the policy, or for other things less than `max_wait_s`, the same requests share a call
in every run, whatever the timing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from rftdask.engines.base import GenerateRequest, Generation
from rftdask.errors import RoleError, WaitTimeout

GenerateBatch = Callable[[list[GenerateRequest]], Awaitable[list[Generation]]]
"""Generates an answer for each request, in order. Its errors fail the whole work unit."""


class RolloutKey(NamedTuple):
    """Identity of a rollout in its work unit; keys sort in the unit's order."""

    task_number: int
    rollout: int


class RequestQueue(ABC):
    """Queue from the rollouts of one work unit to one engine."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        """First error of the engine; every later request raises it."""
        self.busy_s = 0.0
        """Seconds during which the engine had requests."""

    def enter(self, key: RolloutKey) -> None:  # noqa: B027 -- not every queue waits for rollouts
        """Announce a rollout that will send requests."""

    def leave(self, key: RolloutKey) -> None:  # noqa: B027 -- as above
        """Announce that the rollout has ended. Idempotent."""

    @abstractmethod
    async def generate(self, key: RolloutKey, turn: int, request: GenerateRequest) -> Generation:
        """The engine's answer to `request`. Raises: the engine's error."""

    @abstractmethod
    async def close(self) -> None:
        """Cancel running requests. Idempotent."""


class _Waiting(NamedTuple):
    rollout: RolloutKey
    turn: int
    request: GenerateRequest
    answer: asyncio.Future[Generation]


class LockstepQueue(RequestQueue):
    """See the module. All rollouts enter before any request, so that the first call includes them."""

    def __init__(self, generate_batch: GenerateBatch, max_wait_s: float = 0.02) -> None:
        super().__init__()
        self._generate_batch, self._max_wait_s = generate_batch, max_wait_s
        self._live: set[RolloutKey] = set()
        self._busy: set[RolloutKey] = set()
        """Live rollouts that calls wait for, because they have no request in the queue."""
        self._waiting: list[_Waiting] = []
        self._in_flight: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last_change_s = 0.0

    def enter(self, key: RolloutKey) -> None:
        self._live.add(key)
        self._busy.add(key)

    def leave(self, key: RolloutKey) -> None:
        self._live.discard(key)
        self._busy.discard(key)
        self._changed()

    async def generate(self, key: RolloutKey, turn: int, request: GenerateRequest) -> Generation:
        if self.failure is not None:
            raise self.failure
        waiting = _Waiting(key, turn, request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._busy.discard(key)
        self._changed()
        try:
            return await waiting.answer
        finally:
            if waiting in self._waiting:  # cancelled before it was sent
                self._waiting.remove(waiting)
            self._resume(key)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._in_flight is not None:
            self._in_flight.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._in_flight

    def _resume(self, key: RolloutKey) -> None:
        if key in self._live and all(waiting.rollout != key for waiting in self._waiting):
            self._busy.add(key)

    def _changed(self) -> None:
        loop = asyncio.get_running_loop()
        self._last_change_s = loop.time()
        if not self._busy:
            # Later in this pass of the event loop, because a rollout may send several requests in it.
            loop.call_soon(self._send_if_due)
        elif self._timer is None:
            self._timer = loop.call_later(self._max_wait_s, self._send_if_due)

    def _send_if_due(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._in_flight is not None or not self._waiting:
            return
        loop = asyncio.get_running_loop()
        # The wait is measured from the last change, so that a long pass of the event loop does not split a call.
        remaining_s = self._last_change_s + self._max_wait_s - loop.time()
        if self._busy and remaining_s > 0:
            self._timer = loop.call_later(remaining_s, self._send_if_due)
            return
        self._busy.clear()  # a slow rollout delays only one call
        # Ordered by identity, not arrival: the position of a row in its batch affects rounding.
        batch = sorted(self._waiting, key=lambda waiting: (waiting.rollout, waiting.turn))
        self._waiting = []
        self._in_flight = asyncio.create_task(self._run(batch))

    async def _run(self, batch: Sequence[_Waiting]) -> None:
        began = time.perf_counter()
        try:
            generations = await self._generate_batch([waiting.request for waiting in batch])
            if len(generations) != len(batch):
                raise RoleError(f"engine returned {len(generations)} generations for {len(batch)} requests")
        except Exception as error:  # passed to every rollout, because none can continue without the engine
            self.failure = error
            for waiting in (*batch, *self._waiting):
                if not waiting.answer.done():
                    waiting.answer.set_exception(error)
        else:
            for waiting, generation in zip(batch, generations, strict=True):
                if not waiting.answer.done():  # done if its rollout was cancelled
                    waiting.answer.set_result(generation)
                    self._resume(waiting.rollout)
        finally:
            # `_resume` has marked answered rollouts as busy for `_changed`, because their coroutines have not run yet.
            self._in_flight = None
            self.busy_s += time.perf_counter() - began
        self._changed()


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
        now_s = asyncio.get_running_loop().time()
        if self._running:
            self.busy_s += now_s - self._counted_until_s
            self._silent_s += now_s - self._counted_until_s
        self._counted_until_s = now_s

    def _watch(self) -> None:
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
        self.failure = self.failure or error
        for answer in (*self._running, *(answer for _, answer in self._outbox)):
            if not answer.done():
                answer.set_exception(error)
