"""LoadBalancer: one request queue over the engines of a server, which may come and go. No processes, no sockets.

A call goes to the engine with the largest free share of its memory that can hold the prompt and the longest answer; if
none can, the call is refused. A call whose engine is lost is sent to another engine, unless part of its answer was
already streamed. Used on one event loop.
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
from rftdask.rollouts.policy.request_queues import RequestQueue, RolloutKey, Streaming, StreamingQueue

MAX_LOSSES = 3
"""Consecutive engines that a call may lose before it is refused, because the call itself may crash them."""
MAX_UNSIZED = 64
_TIMEOUT_S = 600.0
"""Longest silence of a busy engine before it counts as lost."""
_NEWEST_SHARE = 0.1
"""Weight of the newest call in the running mean of call times."""
_MAX_RETRY_AFTER_S = 30

log = logging.getLogger(__name__)


class FullError(RuntimeError):
    """No engine has memory for a call. `retry_after_s`: estimated seconds until one has."""

    def __init__(self, text: str, retry_after_s: int) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class NoEngineError(RuntimeError):
    """No engine is available at the moment."""


@dataclass(eq=False)
class _Slot:
    engine: AskedEngine
    queue: RequestQueue
    num_taken: int = 0
    """Tokens of its KV cache that are reserved for the prompts and longest answers of running calls."""
    num_calls: int = 0

    @property
    def is_lost(self) -> bool:
        return self.queue.failure is not None or not self.engine.alive()

    @property
    def load(self) -> float:
        """Fraction of its memory in use; for engines of unknown size, the tokens in use."""
        return self.num_taken / (self.engine.cache_tokens or 1)

    def num_missing(self, needed: int) -> int:
        """Tokens to be freed before a call of `needed` tokens fits. 0 or less: it fits, or the size is unknown."""
        capacity = self.engine.cache_tokens
        return 0 if capacity is None else self.num_taken + needed - capacity


class LoadBalancer(RequestQueue):
    def __init__(self, max_unsized: int | None = MAX_UNSIZED, clock: Callable[[], float] = time.monotonic) -> None:
        """max_unsized: concurrent calls for an engine of unknown memory size; None: unlimited."""
        super().__init__()
        self._max_unsized, self._clock = max_unsized, clock
        self._slots: list[_Slot] = []
        self._mean_s = 0.0
        """Running mean duration of calls, weighted toward the newest."""

    def add(self, engine: AskedEngine) -> None:
        self._slots.append(_Slot(engine, StreamingQueue(Streaming(engine.submit, _TIMEOUT_S, str(engine)))))

    def take_lost(self) -> list[AskedEngine]:
        lost = [slot for slot in self._slots if slot.is_lost]
        # `is_lost` is read once: an engine that is lost from here on is returned by the next call.
        self._slots = [slot for slot in self._slots if slot not in lost]
        return [slot.engine for slot in lost]

    @property
    def engines(self) -> list[AskedEngine]:
        return [slot.engine for slot in self._slots if not slot.is_lost]

    async def generate(self, key: RolloutKey, turn: int, request: GenerateRequest) -> Generation:
        """See RequestQueue. Raises: FullError, NoEngineError: no engine took the request; RoleError, WaitTimeout:
        engines were lost while they had it.
        """
        num_tokens, has_streamed = len(request.prompt_tokens) + request.sampling.max_tokens, False
        if (forward := request.on_tokens) is not None:

            def on_tokens(tokens: tuple[int, ...]) -> None:
                nonlocal has_streamed
                has_streamed = True
                forward(tokens)

            request = replace(request, on_tokens=on_tokens)
        num_losses = 0
        while True:
            slot = self._choose(num_tokens)
            slot.num_taken += num_tokens
            slot.num_calls += 1
            began_s = self._clock()
            try:
                return await slot.queue.generate(key, turn, request)
            except (RoleError, WaitTimeout) as error:
                num_losses += 1
                # Streamed tokens cannot be retracted, and another engine would sample different ones.
                if has_streamed or num_losses >= MAX_LOSSES:
                    raise
                log.info("retrying a call on another engine: %s", error)
            finally:
                slot.num_taken -= num_tokens
                slot.num_calls -= 1
                self._mean_s += _NEWEST_SHARE * (self._clock() - began_s - self._mean_s)

    def _choose(self, num_tokens: int) -> _Slot:
        """The engine for a call that may need `num_tokens`. Raises: FullError, NoEngineError."""
        slots, limit = [slot for slot in self._slots if not slot.is_lost], self._max_unsized
        if not slots:
            raise NoEngineError("no engine is available at the moment; try again later")
        free = [
            slot
            for slot in slots
            # An idle engine takes a call of any size.
            if (not slot.num_taken or slot.num_missing(num_tokens) <= 0)
            and (slot.engine.cache_tokens is not None or limit is None or slot.num_calls < limit)
        ]
        if free:
            return min(free, key=lambda slot: slot.load)
        slot = min(slots, key=lambda slot: slot.num_missing(num_tokens))
        if slot.engine.cache_tokens is None:
            raise FullError(f"every engine has its limit of {limit} concurrent requests; try again later", 1)
        # Seconds until the missing tokens become free, if calls keep theirs for the recent mean duration.
        retry_after_s = math.ceil(slot.num_missing(num_tokens) / max(1, slot.num_taken) * self._mean_s)
        raise FullError(
            f"the request may need {num_tokens} tokens of engine memory, and {slot.num_taken} of "
            f"{slot.engine.cache_tokens} are in use; try again later, or request fewer max_tokens",
            min(_MAX_RETRY_AFTER_S, max(1, retry_after_s)),
        )

    async def close(self) -> None:
        for slot in self._slots:
            await slot.queue.close()
