"""Promises of the load balancer: a call goes to the engine with most free memory, or is refused with a time to retry; a
call of a lost engine goes to another, unless part of it was streamed or it has lost several engines; engines come and
go.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.engines.client import AskedEngine
from rftdask.errors import ProcessLostError
from rftdask.rollouts.policy.request_queues import RolloutKey
from rftdask.serve.load_balancer import FullError, LoadBalancer, NoEngineError
from rftdask.storage import Storage
from rftdask.synchronizer.published import Published
from tests.unit.rollouts.rollout_cases import generation

KEY = RolloutKey(0, 0)


class TalkingEngine(AskedEngine):
    """Answers with the number of the call; while `is_held`, only after `let_go`."""

    def __init__(self, cache_tokens: int | None = None) -> None:
        super().__init__()
        self.cache_tokens = cache_tokens
        self.asked: list[tuple[GenerateRequest, Future[Generation]]] = []
        self.is_held = self.is_lost = False

    def submit(self, requests: Sequence[GenerateRequest]) -> list[Future[Generation]]:
        for request in requests:
            self.asked.append((request, Future()))
            if not self.is_held:
                self._answer(len(self.asked))
        return [future for _, future in self.asked[-len(requests) :]]

    def let_go(self) -> None:
        self.is_held = False
        for number, (_, future) in enumerate(self.asked, 1):
            if not future.done():
                self._answer(number)

    def lose(self) -> None:
        """End as an engine whose process was killed."""
        self.is_lost = True
        for _, future in self.asked:
            if not future.done():
                future.set_exception(ProcessLostError("killed"))

    async def until_asked(self, num_calls: int) -> None:
        async with asyncio.timeout(60):
            while len(self.asked) < num_calls:
                await asyncio.sleep(0)

    def load(self, storage: Storage, published: Published) -> None:
        self.weights = published

    def alive(self) -> bool:
        return not self.is_lost

    def close(self) -> None:
        self.lose()

    def _send(self, message: Any) -> None:
        raise NotImplementedError

    def _answer(self, number: int) -> None:
        request, future = self.asked[number - 1]
        if future.set_running_or_notify_cancel():
            future.set_result(generation(str(number), request))


def sized(num_tokens: int, **more: Any) -> GenerateRequest:
    """A request that may need `num_tokens` of an engine's memory."""
    return GenerateRequest((1,) * 4, SamplingParams(max_tokens=num_tokens - 4), 0, **more)


def balance(*engines: TalkingEngine, **options: Any) -> LoadBalancer:
    balancer = LoadBalancer(**options)
    for engine in engines:
        engine.is_held = True
        balancer.add(engine)
    return balancer


def in_loop(check: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Decorate a test that runs in an event loop."""

    async def within() -> None:
        async with asyncio.timeout(60):
            await check()

    return lambda: asyncio.run(within())


async def ask(balancer: LoadBalancer, request: GenerateRequest) -> asyncio.Task[Generation]:
    """Start a call and wait until an engine has it."""
    asking = asyncio.create_task(balancer.generate(KEY, 0, request))
    for _ in range(3):
        await asyncio.sleep(0)
    return asking


@in_loop
async def test_call_goes_to_the_engine_with_most_free_memory() -> None:
    small, large = TalkingEngine(100), TalkingEngine(200)
    balancer = balance(small, large)
    under_way = [await ask(balancer, sized(num_tokens)) for num_tokens in (60, 30, 80, 80)]
    # 60/100 | 0, then | 30/200, then | 110/200, then | 190/200: 140 of 100 would be too much.
    assert [len(engine.asked) for engine in (small, large)] == [1, 3]
    under_way.append(await ask(balancer, sized(40)))
    assert [len(engine.asked) for engine in (small, large)] == [2, 3]
    with pytest.raises(FullError, match="may need 300 tokens of engine memory, and 190 of 200 are in use"):
        await balancer.generate(KEY, 0, sized(300))
    for engine in (small, large):
        engine.let_go()
    await asyncio.gather(*under_way)
    # A single call is never too large.
    await balancer.generate(KEY, 0, sized(300))


@in_loop
async def test_engine_of_unknown_memory_has_a_call_limit() -> None:
    engines = TalkingEngine(), TalkingEngine()
    balancer = balance(*engines, max_unsized=2)
    under_way = [await ask(balancer, sized(num_tokens)) for num_tokens in (9999, 5, 5, 9999)]
    assert [len(engine.asked) for engine in engines] == [2, 2]
    with pytest.raises(FullError, match="has its limit of 2 concurrent requests"):
        await balancer.generate(KEY, 0, sized(5))
    for engine in engines:
        engine.let_go()
    await asyncio.gather(*under_way)
    unlimited = balance(TalkingEngine(), max_unsized=None)
    for _ in range(200):
        under_way.append(await ask(unlimited, sized(9999)))
    await unlimited.close()


@in_loop
async def test_retry_after_follows_the_mean_call_time() -> None:
    now_s, engine = 0.0, TalkingEngine(100)
    balancer = balance(engine, clock=lambda: now_s)

    async def refused(num_tokens: int) -> int:
        with pytest.raises(FullError) as full:
            await balancer.generate(KEY, 0, sized(num_tokens))
        return full.value.retry_after_s

    for _ in range(100):
        engine.is_held = True
        call = await ask(balancer, sized(80))
        if not now_s:
            assert await refused(50) == 1, "nothing is known yet"
        now_s += 10.0
        engine.let_go()
        await call
    # 80 tokens become free within 10 s, so 30 within 4 s.
    engine.is_held = True
    await ask(balancer, sized(80))
    assert [await refused(num_tokens) for num_tokens in (21, 50, 100, 9999)] == [1, 4, 10, 30]
    await balancer.close()


@in_loop
async def test_call_of_a_lost_engine_goes_to_another() -> None:
    first, second = TalkingEngine(), TalkingEngine()
    balancer = balance(first, second)
    asking = await ask(balancer, sized(10))
    assert len(first.asked) == 1
    first.lose()
    await second.until_asked(1)
    assert balancer.engines == [second]
    assert balancer.take_lost() == [first] and balancer.take_lost() == []
    second.let_go()
    assert (await asking).tokens == generation("1", sized(10)).tokens
    second.lose()
    with pytest.raises(NoEngineError):
        await balancer.generate(KEY, 0, sized(10))
    # Another engine is added.
    third = TalkingEngine()
    balancer.add(third)
    await balancer.generate(KEY, 0, sized(10))
    assert len(third.asked) == 1


@in_loop
async def test_partly_streamed_call_is_not_retried() -> None:
    first, second = TalkingEngine(), TalkingEngine()
    balancer, received = balance(first, second), list[int]()
    quiet = await ask(balancer, sized(10, on_tokens=received.extend))
    loud = await ask(balancer, sized(10, on_tokens=received.extend))
    [(request, _)] = second.asked
    assert request.on_tokens is not None
    request.on_tokens((7,))
    second.lose()
    with pytest.raises(ProcessLostError):
        await loud
    # The other call has streamed nothing.
    third = TalkingEngine()
    balancer.add(third)
    first.lose()
    await quiet
    assert received == [7] and len(third.asked) == 1


@in_loop
async def test_call_that_loses_several_engines_is_refused() -> None:
    engines = [TalkingEngine() for _ in range(5)]
    balancer = balance(*engines)
    asking = await ask(balancer, sized(10))
    for engine in engines[:3]:
        await engine.until_asked(1)
        engine.lose()
    with pytest.raises(ProcessLostError):
        await asking
    assert [len(engine.asked) for engine in engines] == [1, 1, 1, 0, 0]
