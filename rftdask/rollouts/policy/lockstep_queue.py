"""LockstepQueue: gathers what many rollouts ask of the engine into few calls. Knows no text, tasks or rewards.

For runs that are to be the same bit by bit; others pass requests on as they come (StreamingQueue), which is quicker.
A call goes out when every live rollout waits for the engine, or `max_wait_s` after the last change when some are busy
elsewhere; those are then waited for no more until they ask again. One call is in flight at a time. Requests are ordered
by (task, rollout, turn). So as long as workflows wait for nothing but the policy, or not for longer than `max_wait_s`,
which requests share a call is the same in every run, whatever the timing. One event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from rftdask.engines.base import GenerateRequest, Generation
from rftdask.errors import RoleError

GenerateBatch = Callable[[list[GenerateRequest]], Awaitable[list[Generation]]]
"""Generates for each request, in their order. Whatever it raises ends the whole work unit."""


class RolloutKey(NamedTuple):
    """Identity of a rollout within its work unit; keys sort in the order of the unit."""

    task_number: int
    rollout: int


class RequestQueue(ABC):
    """A queue in which the rollouts of one work unit ask one engine."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        """Error of the engine, once it has raised one: every later request raises it again."""
        self.busy_s = 0.0
        """Seconds in which the engine had something to do."""

    def enter(self, key: RolloutKey) -> None:  # noqa: B027 -- not every queue waits for somebody
        """Announce a rollout that has a place and will ask. Here nobody waits for it."""

    def leave(self, key: RolloutKey) -> None:  # noqa: B027 -- as above
        """Say that the rollout has ended. Idempotent."""

    @abstractmethod
    async def generate(self, key: RolloutKey, turn: int, request: GenerateRequest) -> Generation:
        """The engine's answer to `request`. Raises: what the engine raised."""

    @abstractmethod
    async def close(self) -> None:
        """Cancel what is under way. Idempotent."""


class _Waiting(NamedTuple):
    rollout: RolloutKey
    turn: int
    request: GenerateRequest
    answer: asyncio.Future[Generation]


class LockstepQueue(RequestQueue):
    """The rollouts of one work unit in front of one engine.

    Example:
        queue = LockstepQueue(generate_batch)
        for key in rollouts:
            queue.enter(key)  # all of them first, so that the first call holds all of them
        ...  # each rollout: await queue.generate(key, turn, request), and in the end queue.leave(key)
        await queue.close()
    """

    def __init__(self, generate_batch: GenerateBatch, max_wait_s: float = 0.02) -> None:
        super().__init__()
        self._generate_batch = generate_batch
        self._max_wait_s = max_wait_s
        self._live: set[RolloutKey] = set()
        self._busy: set[RolloutKey] = set()
        """Live rollouts that do not wait for the engine, and that calls wait for."""
        self._waiting: list[_Waiting] = []
        self._in_flight: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last_change_s = 0.0

    def enter(self, key: RolloutKey) -> None:
        """Let calls wait for this rollout from now on."""
        self._live.add(key)
        self._busy.add(key)

    def leave(self, key: RolloutKey) -> None:
        """Let calls no longer wait for the rollout, which has ended. Idempotent."""
        self._live.discard(key)
        self._busy.discard(key)
        self._changed()

    async def generate(self, key: RolloutKey, turn: int, request: GenerateRequest) -> Generation:
        """Sent with all others that wait, once no live rollout is busy or those that are have had their time."""
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
        """Cancel the call in flight. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._in_flight is not None:
            self._in_flight.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._in_flight

    def _resume(self, key: RolloutKey) -> None:
        # Count the rollout as busy: it has an answer, or wants none; it may have asked for several things at once.
        if key in self._live and all(waiting.rollout != key for waiting in self._waiting):
            self._busy.add(key)

    def _changed(self) -> None:
        # Schedule the next call: soon if all wait, else when the busy ones have had their time.
        loop = asyncio.get_running_loop()
        self._last_change_s = loop.time()
        if self._in_flight is not None or not self._waiting:
            return
        if not self._busy:
            # Not at once: a rollout that asks for several things asks for all of them in this pass of the event loop.
            loop.call_soon(self._send_if_all_wait)
        elif self._timer is None:
            self._timer = loop.call_later(self._max_wait_s, self._on_timer)

    def _send_if_all_wait(self) -> None:
        if self._in_flight is not None or not self._waiting:
            return
        if self._busy:  # somebody has stopped waiting meanwhile
            self._changed()
        else:
            self._send()

    def _on_timer(self) -> None:
        # Counting from the last change keeps a long pass of the event loop from splitting a call in two.
        self._timer = None
        if self._in_flight is not None or not self._waiting:
            return
        loop = asyncio.get_running_loop()
        remaining_s = self._last_change_s + self._max_wait_s - loop.time()
        if remaining_s > 0:
            self._timer = loop.call_later(remaining_s, self._on_timer)
        else:
            self._busy.clear()  # one that is slow holds up one call, not all of them
            self._send()

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # By identity and not by arrival: the place of a row in its batch decides how sums are rounded.
        batch = sorted(self._waiting, key=lambda waiting: (waiting.rollout, waiting.turn))
        self._waiting = []
        self._in_flight = asyncio.create_task(self._run(batch))

    async def _run(self, batch: Sequence[_Waiting]) -> None:
        began = time.perf_counter()
        try:
            generations = await self._generate_batch([waiting.request for waiting in batch])
            if len(generations) != len(batch):
                raise RoleError(f"engine gave {len(generations)} generations for {len(batch)} requests")
        except Exception as error:  # not caught but handed on, to every rollout: none can go on without the engine
            self.failure = error
            for waiting in (*batch, *self._waiting):
                if not waiting.answer.done():
                    waiting.answer.set_exception(error)
        else:
            for waiting, generation in zip(batch, generations, strict=True):
                if not waiting.answer.done():  # done: its rollout was cancelled meanwhile
                    waiting.answer.set_result(generation)
                    self._resume(waiting.rollout)
        finally:
            # `_changed` below finds those that were answered busy (`_resume`): their coroutines have not run yet.
            self._in_flight = None
            self.busy_s += time.perf_counter() - began
        self._changed()
