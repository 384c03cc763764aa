"""Promises of the queue: one call when all live rollouts wait, never two at a time, ordered by rollout."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.errors import RoleError
from rftdask.rollouts.policy.request_queues import LockstepQueue, RolloutKey
from tests.unit.rollouts.rollout_cases import generation

Body = Callable[[LockstepQueue, RolloutKey], Awaitable[object]]


def request(name: str) -> GenerateRequest:
    return GenerateRequest(tuple(map(ord, name)), SamplingParams(max_tokens=8), seed=0)


class Engine:
    """Logs its calls as text and answers each request with its prompt.

    With `is_held`, the first call lasts until `goes_on` is set.
    """

    def __init__(self, is_held: bool = False) -> None:
        self.calls: list[str] = []
        self.num_running = 0
        self.is_called, self.goes_on = asyncio.Event(), asyncio.Event()
        if not is_held:
            self.goes_on.set()

    async def __call__(self, requests: list[GenerateRequest]) -> list[Generation]:
        names = ["".join(map(chr, each.prompt_tokens)) for each in requests]
        self.calls.append(" ".join(names))
        self.num_running += 1
        assert self.num_running == 1, "two calls at a time"
        self.is_called.set()
        await asyncio.sleep(0)
        await self.goes_on.wait()
        self.num_running -= 1
        return [generation(name, each) for name, each in zip(names, requests, strict=True)]


def run(engine: Engine, bodies: list[Body], max_wait_s: float = 3600.0) -> list[object]:
    """Run each body as a rollout whose task number is its index, started in reverse order."""

    async def main() -> list[object]:
        queue = LockstepQueue(engine, max_wait_s)
        keys = [RolloutKey(number, 0) for number in range(len(bodies))]
        for key in keys:
            queue.enter(key)

        async def rollout(key: RolloutKey, body: Body) -> object:
            try:
                return await body(queue, key)
            finally:
                queue.leave(key)

        running = [asyncio.create_task(rollout(*each)) for each in reversed(list(zip(keys, bodies, strict=True)))]
        try:
            return await asyncio.wait_for(asyncio.gather(*reversed(running), return_exceptions=True), 10)
        finally:
            await queue.close()

    return asyncio.run(main())


def turns(*names: str) -> Body:
    async def body(queue: LockstepQueue, key: RolloutKey) -> list[Generation]:
        return [await queue.generate(key, turn, request(name)) for turn, name in enumerate(names)]

    return body


def test_call_waits_for_all_live_rollouts_in_order() -> None:
    engine = Engine()
    run(engine, [turns("a0", "a1", "a2"), turns("b0"), turns("c0", "c1")])
    assert engine.calls == ["a0 b0 c0", "a1 c1", "a2"]


def test_each_request_gets_its_own_answer() -> None:
    answers = run(Engine(), [turns("a"), turns("b"), turns("c")])
    assert [answer[0].tokens for answer in answers] == [(ord(name), 0) for name in "abc"]  # type: ignore[index]


def test_concurrent_requests_of_a_rollout_share_a_call() -> None:
    async def both(queue: LockstepQueue, key: RolloutKey) -> None:
        await asyncio.gather(*(queue.generate(key, turn, request(f"a{turn}")) for turn in (1, 0)))

    engine = Engine()
    run(engine, [both, turns("b0")])
    assert engine.calls == ["a0 a1 b0"]


def test_busy_rollouts_are_waited_for_up_to_max_wait() -> None:
    asked = asyncio.Event()

    async def busy(queue: LockstepQueue, key: RolloutKey) -> None:
        await asked.wait()
        await queue.generate(key, 0, request("b0"))

    async def quick(queue: LockstepQueue, key: RolloutKey) -> None:
        await queue.generate(key, 0, request("a0"))
        asked.set()

    engine = Engine()
    run(engine, [quick, busy], max_wait_s=0.001)
    assert engine.calls == ["a0", "b0"]


def test_requests_during_a_call_are_sent_after_it() -> None:
    async def late(queue: LockstepQueue, key: RolloutKey) -> None:
        await engine.is_called.wait()
        answer = asyncio.create_task(queue.generate(key, 0, request("b0")))
        await asyncio.sleep(0)
        engine.goes_on.set()
        await answer

    engine = Engine(is_held=True)
    run(engine, [turns("a0"), late], max_wait_s=0.001)
    assert engine.calls == ["a0", "b0"]


def test_cancelled_request_is_not_sent_but_a_later_one_is() -> None:
    cancelled = asyncio.Event()

    async def impatient(queue: LockstepQueue, key: RolloutKey) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.generate(key, 0, request("a0")), 0.001)
        cancelled.set()
        await queue.generate(key, 0, request("a1"))

    async def slow(queue: LockstepQueue, key: RolloutKey) -> None:
        await cancelled.wait()
        await queue.generate(key, 0, request("b0"))

    engine = Engine()
    run(engine, [impatient, slow])
    assert engine.calls == ["a1 b0"]


def test_rollout_cancelled_during_a_call_may_retry() -> None:
    async def impatient(queue: LockstepQueue, key: RolloutKey) -> Generation:
        first = asyncio.create_task(queue.generate(key, 0, request("a0")))
        await engine.is_called.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        engine.goes_on.set()
        return await queue.generate(key, 0, request("a1"))

    engine = Engine(is_held=True)
    first, second = run(engine, [impatient, turns("b0")])
    assert engine.calls == ["a0 b0", "a1"]
    assert first.tokens == (ord("a"), ord("1"), 0) and len(second) == 1  # type: ignore[attr-defined, arg-type]


def test_rollout_with_another_open_request_is_not_busy() -> None:
    async def asks_during_a_call(queue: LockstepQueue, key: RolloutKey) -> None:
        first = asyncio.create_task(queue.generate(key, 0, request("a0")))
        await engine.is_called.wait()
        second = asyncio.create_task(queue.generate(key, 1, request("a1")))
        await asyncio.sleep(0)
        engine.goes_on.set()
        await asyncio.gather(first, second)

    engine = Engine(is_held=True)
    run(engine, [asks_during_a_call])
    assert engine.calls == ["a0", "a1"]


def test_calls_do_not_wait_for_an_ended_rollout() -> None:
    left_behind: list[asyncio.Task[Generation]] = []

    async def leaves(queue: LockstepQueue, key: RolloutKey) -> None:
        left_behind.append(asyncio.create_task(queue.generate(key, 0, request("a0"))))
        await engine.is_called.wait()
        engine.goes_on.set()

    engine = Engine(is_held=True)
    run(engine, [leaves, turns("b0", "b1")])
    assert engine.calls == ["a0 b0", "b1"]


def test_failure_reaches_waiting_and_later_requests() -> None:
    class Broken(Engine):
        async def __call__(self, requests: list[GenerateRequest]) -> list[Generation]:
            self.calls.append("call")
            raise RoleError("gone")

    async def persistent(queue: LockstepQueue, key: RolloutKey) -> None:
        for turn in range(2):
            with pytest.raises(RoleError, match="gone"):
                await queue.generate(key, turn, request("a"))

    engine = Broken()
    first, second = run(engine, [persistent, turns("b")])
    assert first is None and isinstance(second, RoleError)
    assert engine.calls == ["call"]
