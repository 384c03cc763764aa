"""Promises of the queue: requests are sent and answered at once, alongside running ones."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future

import pytest

from rftdask.buffer.log.schema import Status
from rftdask.config import load_config
from rftdask.data.task import Task
from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.errors import RoleError, WaitTimeout
from rftdask.rollouts import work_unit_task as worker_task
from rftdask.rollouts.policy.request_queues import RolloutKey, Streaming, StreamingQueue
from rftdask.rollouts.runner import TextEngine
from rftdask.rollouts.worker_state import text_engine
from rftdask.rollouts.workflows.base import PolicyModel
from tests.unit.engines.engine_contract import engine_spec
from tests.unit.rollouts.rollout_cases import CharTokenizer, generation, named, outcome, prompt_of, task

KEY = RolloutKey(0, 0)
DEADLINE_S = 120.0


def request(name: str) -> GenerateRequest:
    return GenerateRequest(tuple(map(ord, name)), SamplingParams(max_tokens=8), seed=0)


class Engine:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.futures: dict[str, Future[Generation]] = {}
        self.on_submit: Callable[[str], None] = lambda name: None

    def submit(self, requests: Sequence[GenerateRequest]) -> list[Future[Generation]]:
        names = [prompt_of(each) for each in requests]
        self.calls.append(" ".join(names))
        futures = [Future[Generation]() for _ in names]
        self.futures.update(zip(names, futures, strict=True))
        for name in names:
            self.on_submit(name)
        return futures

    def answer(self, name: str) -> None:
        self.futures[name].set_result(generation(name, request(name)))


class LeapingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock the test advances."""

    leapt_s = 0.0

    def time(self) -> float:
        return super().time() + self.leapt_s


def leap(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, LeapingLoop)
    loop.leapt_s += seconds


def with_engine(body: Callable[[Engine, StreamingQueue], Awaitable[None]]) -> Callable[[], None]:
    async def main() -> None:
        engine = Engine()
        stream = StreamingQueue(Streaming(engine.submit, timeout_s=1000.0))
        try:
            await body(engine, stream)
        finally:
            await stream.close()
            await stream.close()
        await until(lambda: all(future.done() for future in engine.futures.values()))

    def test() -> None:
        with asyncio.Runner(loop_factory=LeapingLoop) as runner:
            runner.run(main())

    return test


def ask(stream: StreamingQueue, name: str) -> asyncio.Task[Generation]:
    return asyncio.create_task(stream.generate(KEY, 0, request(name)))


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0)


@with_engine
async def test_requests_of_one_loop_pass_are_submitted_together(engine: Engine, stream: StreamingQueue) -> None:
    _tasks = [ask(stream, name) for name in "abc"]
    await until(lambda: engine.calls)
    assert engine.calls == ["a b c"]


@with_engine
async def test_request_can_overtake_a_running_one(engine: Engine, stream: StreamingQueue) -> None:
    long = ask(stream, "long")
    await until(lambda: "long" in engine.futures)
    short = ask(stream, "short")
    await until(lambda: "short" in engine.futures)
    engine.answer("short")
    assert (await short).tokens == (*map(ord, "short"), 0)
    assert not long.done()
    engine.answer("long")
    assert (await long).tokens == (*map(ord, "long"), 0)


@with_engine
async def test_cancelled_request_leaves_the_engine(engine: Engine, stream: StreamingQueue) -> None:
    first, neighbor = ask(stream, "a"), ask(stream, "b")
    await until(lambda: engine.calls)
    first.cancel()
    await until(lambda: engine.futures["a"].cancelled())
    again = ask(stream, "c")
    await until(lambda: "c" in engine.futures)
    for name in "bc":
        engine.answer(name)
    assert (await neighbor).tokens[0] == ord("b") and (await again).tokens[0] == ord("c")


@with_engine
async def test_request_cancelled_before_sending_is_not_sent(engine: Engine, stream: StreamingQueue) -> None:
    first = ask(stream, "a")
    await asyncio.sleep(0)  # the request is queued but not sent
    first.cancel()
    second = ask(stream, "b")
    await until(lambda: engine.calls)
    assert engine.calls == ["b"]
    second.cancel()


@with_engine
async def test_failure_reaches_waiting_and_later_requests(engine: Engine, stream: StreamingQueue) -> None:
    first, second = ask(stream, "a"), ask(stream, "b")
    await until(lambda: engine.calls)
    for future in engine.futures.values():
        future.set_exception(RoleError("gone"))
    third = ask(stream, "c")  # before the failure is known
    for waiting in (first, second, third):
        with pytest.raises(RoleError, match="gone"):
            await waiting
    with pytest.raises(RoleError, match="gone"):
        await ask(stream, "d")
    assert isinstance(stream.failure, RoleError) and "d" not in engine.futures


@with_engine
async def test_silent_engine_is_detected_despite_retries(engine: Engine, stream: StreamingQueue) -> None:
    for name in "ab":
        trying = ask(stream, name)
        await until(lambda name=name: name in engine.futures)  # type: ignore[misc]
        leap(400.0)
        trying.cancel()
        await until(engine.futures[name].cancelled)
        leap(5000.0)  # no request is running
    patient, other = ask(stream, "c"), ask(stream, "d")
    await until(lambda: "c" in engine.futures)
    leap(150.0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert stream.failure is None
    leap(60.0)
    for waiting in (patient, other):
        with pytest.raises(WaitTimeout, match=r"gave no answer for 101\d s, with 2 requests running"):
            await waiting


@with_engine
async def test_silence_counts_only_while_requests_run(engine: Engine, stream: StreamingQueue) -> None:
    slow = ask(stream, "slow")
    for name in "abc":
        quick = ask(stream, name)
        await until(lambda name=name: name in engine.futures)  # type: ignore[misc]
        leap(900.0)
        engine.answer(name)
        await quick
    engine.answer("slow")
    await slow
    leap(5000.0)
    last = ask(stream, "last")
    await until(lambda: "last" in engine.futures)
    leap(900.0)
    engine.answer("last")
    await last
    assert stream.busy_s == pytest.approx(4 * 900.0, abs=DEADLINE_S)


def test_quick_rollout_does_not_wait_for_a_slow_one() -> None:
    engine = Engine()

    async def three_turns(task: Task, model: PolicyModel) -> float:
        for turn in range(3):
            await model.generate(f"{task.index}.{turn}")
        return 1.0

    def quick_then_slow(name: str) -> None:
        if name != "1.0":
            asyncio.get_running_loop().call_soon(engine.answer, name)
        if name == "0.2":  # the last turn of the quick one is answered before the first of the slow one
            asyncio.get_running_loop().call_soon(engine.answer, "1.0")

    engine.on_submit = quick_then_slow
    engines = TextEngine(Streaming(engine.submit, DEADLINE_S), CharTokenizer())
    tasks = [task(index, named(three_turns)) for index in range(2)]
    finished = outcome(tasks, engines, {}, max_timeout=DEADLINE_S)
    assert engine.calls == ["0.0 1.0", "0.1", "0.2", "1.1", "1.2"]
    assert [e.status for e in finished.experiences] == [Status.OK] * 6
    assert finished.engine_s > 0


def test_dead_engine_ends_the_batch_with_its_error() -> None:
    engine = Engine()

    async def swallows(task: Task, model: PolicyModel) -> float:
        try:
            await model.generate("p")
        except RoleError:
            await asyncio.sleep(0)
        return 1.0

    def dies(name: str) -> None:
        error = RoleError("engine-vllm (pid 7) ended with code -9")
        asyncio.get_running_loop().call_soon(engine.futures[name].set_exception, error)

    engine.on_submit = dies
    with pytest.raises(RoleError, match="ended with code -9"):
        outcome([task(0, named(swallows))], TextEngine(Streaming(engine.submit, DEADLINE_S), CharTokenizer()), {})


def test_hung_engine_is_replaced_for_the_next_batch() -> None:
    spec = engine_spec("fake")
    hanging = worker_task._cache.engine(spec)
    assert worker_task._cache.engine(spec) is hanging
    for _ in range(2):  # both of two overlapping units detect it
        with pytest.raises(WaitTimeout), worker_task._ending_what_hangs(hanging):
            raise WaitTimeout("the engine gave no answer")
        assert not hanging.alive()
        assert worker_task._cache.engine(spec).alive()
    worker_task._cache.drop_engine()


@pytest.mark.parametrize("engine_type", ["transformers", "vllm"])
@pytest.mark.parametrize("style", ["fixed", "explorer_driven", "trainer_driven", "fully_async"])
def test_only_fixed_style_batches_requests_in_lockstep(style: str, engine_type: str) -> None:
    class Client:
        spec = engine_spec(engine_type)

        def submit(self, requests: Sequence[GenerateRequest]) -> list[Future[Generation]]:
            raise AssertionError

    config = load_config("config/quickstart.yaml", [f"synchronizer.sync_style={style}"])
    in_calls = style == "fixed" and engine_type == "transformers"
    assert isinstance(text_engine(Client(), CharTokenizer(), config).generate, Streaming) == (not in_calls)  # type: ignore[arg-type]
