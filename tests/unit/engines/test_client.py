"""An engine process: requests are answered as they finish; if it dies or hangs, all callers get an error."""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any, ClassVar

import msgpack
import pytest

from rftdask.engines.base import GenerateRequest, Generation, Give, SamplingParams, Take
from rftdask.engines.client import EngineClient
from rftdask.engines.fake import FakeEngine
from rftdask.engines.server import (
    FROM_CLIENT,
    FROM_SERVER,
    AcquireDevice,
    Answer,
    DeviceAcquired,
    FromClient,
    FromServer,
    Generate,
    Generated,
    Loaded,
    LoadWeights,
    NumberedRequest,
    Ready,
    ReleaseDevice,
    Score,
    Scored,
    serve,
)
from rftdask.engines.transformers import TransformersEngine
from rftdask.errors import EngineError, ProcessLostError, RoleError, WaitTimeout
from rftdask.processes.device_lock import DeviceLock, shared_devices
from tests.unit.engines.engine_contract import engine_spec
from tests.unit.engines.plugins.broken_engine import CAUSE
from tests.unit.engines.tiny_models import save_tiny_mixture

DEADLINE_S = 120.0


def request(seed: int = 0, prompt: tuple[int, ...] = (1, 2), max_tokens: int = 3) -> GenerateRequest:
    return GenerateRequest(prompt, SamplingParams(max_tokens), seed)


class Parent:
    """Pipe of an engine process: messages in, replies out."""

    def __init__(self, *messages: FromClient) -> None:
        # Encoded and decoded, as in the pipe: tuples arrive as lists.
        self.messages = deque(msgpack.unpackb(msgpack.packb(FROM_CLIENT.encode(message))) for message in messages)
        self.answers: list[FromServer] = []
        self.on_answer: Callable[[FromServer], None] = lambda answer: None

    def __iter__(self) -> Iterator[Any]:
        while self.messages:
            yield self.messages.popleft()

    def try_receive(self, timeout_s: float = 0.0) -> Any:
        if timeout_s and not self.messages:
            raise EOFError  # a wait without a deadline would hang
        return self.messages.popleft() if self.messages else None

    def send(self, answer: Any) -> None:
        self.answers.append(FROM_SERVER.decode(msgpack.unpackb(msgpack.packb(answer))))
        self.on_answer(self.answers[-1])


def generated(answers: Sequence[FromServer]) -> list[tuple[int, Generation]]:
    messages = [answer for answer in answers if isinstance(answer, Generated)]
    return [(answer.number, answer.generation) for message in messages for answer in message.answers]


def asks(*numbers: int) -> Generate:
    return Generate(tuple(NumberedRequest(number, request(number)) for number in numbers))


def test_weights_load_between_earlier_and_later_requests(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    load, score = LoadWeights(4, 9, (str(file),), None), Score(6, (((1,), (2, 3)),))
    parent = Parent(asks(1, 2), asks(3), load, asks(5), score)
    serve(engine_spec("fake").to_plain(), parent)  # type: ignore[arg-type]
    ready, *answers = parent.answers
    assert ready == Ready()
    assert [type(answer) for answer in answers] == [Generated, Loaded, Generated, Scored], (
        "results of a step share a message"
    )
    assert [number for number, _ in generated(answers)] == [1, 2, 3, 5]
    assert answers[1] == Loaded(4, 9)
    assert isinstance(answers[3], Scored) and answers[3].number == 6 and len(answers[3].logprobs[0]) == 2
    generations = [generation for _, generation in generated(answers)]
    assert [(each.min_policy_version, each.max_policy_version) for each in generations] == [(0, 0)] * 3 + [(9, 9)]
    assert generations == [*FakeEngine().generate([request(n) for n in (1, 2, 3)]), generations[3]]


def test_weights_in_flight_do_not_wait_for_earlier_requests(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    parent = Parent(asks(1), LoadWeights(4, 9, (str(file),), None, in_flight=True), asks(5))
    serve(engine_spec("fake").to_plain(), parent)  # type: ignore[arg-type]
    assert parent.answers[1] == Loaded(4, 9)
    assert [number for number, _ in generated(parent.answers[2:])] == [1, 5]


class FailingEngine(FakeEngine):
    def serve(self, take: Take, give: Give) -> None:
        [(number, asked)] = take()
        assert asked is not None
        give(number, self.generate([asked])[0])
        raise RoleError("out of order")

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        return FakeEngine().generate(requests)


def test_requests_finished_before_a_failure_are_answered() -> None:
    parent = Parent(asks(7))
    with pytest.raises(RoleError, match="out of order"):
        serve(engine_spec(f"{__name__}.FailingEngine").to_plain(), parent)  # type: ignore[arg-type]
    assert [number for number, _ in generated(parent.answers)] == [7]


class CountedEngine(FakeEngine):
    asked: ClassVar[list[tuple[int, GenerateRequest]]] = []

    def serve(self, take: Take, give: Give) -> None:
        def look() -> Sequence[tuple[int, GenerateRequest | None]]:
            taken = take()
            self.asked.extend((self.policy_version, each) for _, each in taken if each is not None)
            return taken

        super().serve(look, give)


def test_smoke_requests_run_before_ready_and_after_first_weights(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    kinds = (SamplingParams(32, temperature=0.7, top_p=0.9, min_tokens=5), SamplingParams(1, temperature=0.0))
    spec = replace(engine_spec(f"{__name__}.CountedEngine"), sampling=kinds)
    loads = (LoadWeights(number, number, (str(file),), None) for number in (1, 2))
    CountedEngine.asked.clear()
    parent = Parent(*loads, asks(3))
    serve(spec.to_plain(), parent)  # type: ignore[arg-type]
    assert [type(answer) for answer in parent.answers] == [Ready, Loaded, Loaded, Generated], "and no other reply"
    short = [replace(kinds[0], max_tokens=2, min_tokens=2), kinds[1]]
    assert CountedEngine.asked == [
        *((0, GenerateRequest((0,) * 32, each, 0)) for each in short),
        *((1, GenerateRequest((0,) * 8, each, 0)) for each in short),
        (2, request(3)),
    ]


def test_an_engine_records_experts_or_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFTDASK_THREADS", "1")
    with pytest.raises(RoleError, match="engine FakeEngine cannot record the experts"):
        serve(replace(engine_spec("fake"), records_experts=True).to_plain(), Parent())  # type: ignore[arg-type]
    folder = str(save_tiny_mixture(tmp_path))
    parent = Parent(asks(3))
    serve(replace(engine_spec("transformers", folder), records_experts=True).to_plain(), parent)  # type: ignore[arg-type]
    engine = TransformersEngine(folder)
    engine.record_experts()
    [expected] = engine.generate([request(3)])
    assert expected.routed_experts and parent.answers[1:] == [Generated((Answer(3, expected),))], "also in messages"


class SharingEngine(FakeEngine):
    """Lets a rank use the device for a moment when the engine leaves it."""

    rank: ClassVar[DeviceLock]
    seen: ClassVar[list[str]] = []

    def leave_device(self) -> None:
        self.seen.append("left" + " too early" * self.rank.try_acquire())
        Timer(0.2, lambda: (self.rank.acquire(9), self.seen.append("rank"), self.rank.release())).start()

    def return_to_device(self) -> None:
        self.seen.append("returned")


def test_an_engine_leaves_the_device_for_a_waiting_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFTDASK_THREADS", "1")
    for name, value in shared_devices(tmp_path, [0]).items():
        monkeypatch.setenv(name, value)
    spec = replace(engine_spec(f"{__name__}.SharingEngine"), device_lock_timeout_s=20.0)
    SharingEngine.rank, _ = DeviceLock(tmp_path, [0], exclusive=True), SharingEngine.seen.clear()
    parent = Parent(AcquireDevice(1), asks(2), ReleaseDevice(), AcquireDevice(3), asks(4), ReleaseDevice())

    def on_answer(answer: FromServer) -> None:
        if answer == DeviceAcquired(1):
            SharingEngine.rank.try_acquire()  # it waits and has the gate

    parent.on_answer = on_answer
    with pytest.raises(EOFError):
        serve(spec.to_plain(), parent)  # type: ignore[arg-type]
    assert SharingEngine.seen == ["left", "rank", "returned"]
    assert [type(answer) for answer in parent.answers] == [Ready, DeviceAcquired, Generated, DeviceAcquired, Generated]


@pytest.fixture
def client() -> Iterator[EngineClient]:
    client = EngineClient(engine_spec("fake"))
    client.wait_ready()
    yield client
    client.close()
    client.close()


def slow_client(seconds_per_step: float) -> EngineClient:
    """Client of a plug-in engine with responses of maximum length."""
    folder, env = str(Path(__file__).parent / "plugins"), (("TEST_SECONDS_PER_STEP", str(seconds_per_step)),)
    client = EngineClient(replace(engine_spec("SlowEngine"), plugin_dirs=(folder,), env=env))
    client.wait_ready()
    return client


def broken_client(how: str, at: str) -> EngineClient:
    folder = str(Path(__file__).parent / "plugins")
    env = (("TEST_BROKEN_AT", at), ("TEST_BROKEN_HOW", how))
    spec = replace(engine_spec("BrokenEngine"), plugin_dirs=(folder,), env=env, sampling=(SamplingParams(3),))
    return EngineClient(spec)


def test_nothing_runs_after_a_joint_call_is_answered(client: EngineClient) -> None:
    client.generate([request(1)] * 3, timeout_s=60)
    assert client.take_use()[0] > 0
    time.sleep(0.02)
    request_s, passed_s = client.take_use()
    assert request_s == 0.0 and passed_s >= 0.02


@pytest.mark.slow
@pytest.mark.parametrize(("how", "kind"), [("says", EngineError), ("ends", EngineError), ("killed", RoleError)])
def test_an_engine_that_fails_before_work_blames_no_task(how: str, kind: type[RoleError]) -> None:
    client = broken_client(how, "any")
    with pytest.raises(RoleError, match="ended with code -9" if how == "killed" else CAUSE) as raised:
        client.wait_ready()
    assert type(raised.value) is kind
    assert not client.alive()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "kind"), [("says", EngineError), ("ends", ProcessLostError)])
def test_an_engine_that_dies_at_work_blames_a_task(how: str, kind: type[RoleError]) -> None:
    client = broken_client(how, "long")
    client.wait_ready()
    error = client.submit([request()])[0].exception(DEADLINE_S)
    assert type(error) is kind and CAUSE in str(error)
    assert not isinstance(error, ProcessLostError) or (error.exit_code == 3 and not error.was_killed)
    client.close()


def test_every_caller_gets_its_own_result(client: EngineClient) -> None:
    requests = [request(seed) for seed in range(20)]
    expected = FakeEngine().generate(requests)
    assert client.generate([], DEADLINE_S) == client.submit([]) == []
    assert client.generate(requests, DEADLINE_S) == expected
    answers: dict[int, list[Generation]] = {}

    def ask(seed: int) -> None:
        answers[seed] = [future.result(DEADLINE_S) for future in client.submit([request(seed), request(seed + 1)])]
        assert client.logprobs([((1,), (2,))], DEADLINE_S) == FakeEngine().logprobs([((1,), (2,))])

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(0, 20, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [answers[seed] for seed in range(0, 20, 2)] == [expected[seed : seed + 2] for seed in range(0, 20, 2)]


def test_streaming_callers_get_only_their_tokens_first(client: EngineClient) -> None:
    told: list[list[int]] = [[], []]
    asked = [replace(request(seed), on_tokens=told[seed].extend) for seed in (0, 1)]
    *streamed, plain = client.submit([*asked, request(0)])
    answers = [future.result(DEADLINE_S) for future in streamed]
    assert [tuple(each) for each in told] == [answer.tokens[:-1] for answer in answers]
    assert plain.result(DEADLINE_S).tokens == answers[0].tokens
    assert not client._listeners, "nothing is kept of answered requests"


def test_a_cancelled_request_does_not_affect_others(client: EngineClient) -> None:
    first, second, third = client.submit([request(seed) for seed in range(3)])
    second.cancel()
    assert [each.result(DEADLINE_S) for each in (first, third)] == FakeEngine().generate([request(0), request(2)])


def test_a_short_request_overtakes_a_long_one() -> None:
    client = slow_client(0.001)
    [endless] = client.submit([request(max_tokens=10**9)])
    assert len(client.generate([request(1)], DEADLINE_S)[0].tokens) == 3
    assert not endless.done()
    endless.cancel()
    assert client.logprobs([((1,), (2,))], DEADLINE_S), "which waits until no request runs"
    client.close()


def test_a_killed_process_fails_all_calls_with_one_error() -> None:
    client = slow_client(3600.0)
    futures: list[Future[Generation]] = [*client.submit([request(1)]), *client.submit([request(2), request(3)])]
    os.kill(client._child.pid, signal.SIGKILL)
    errors = [future.exception(DEADLINE_S) for future in futures]
    assert isinstance(errors[0], RoleError) and "ended with code -9" in str(errors[0])
    assert errors[0] is errors[1] is errors[2]
    assert not client.alive()
    for ask in (client.generate, lambda requests, _: client.submit(requests)[0].result(DEADLINE_S)):
        with pytest.raises(RoleError, match="ended with code -9"):
            ask([request()], DEADLINE_S)
    client.close()


def test_an_invalid_request_fails_all_with_the_engine_error(client: EngineClient) -> None:
    bad = GenerateRequest((1,), SamplingParams(max_tokens=-1), 0)
    [future] = client.submit([bad])
    assert isinstance(future.exception(DEADLINE_S), RoleError)
    assert not client.alive()


def fail(tokens: Sequence[int]) -> None:
    raise KeyError(tokens)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (replace(request(), sampling=SamplingParams(3, stop=("\ud800",))), "cannot send a request: UnicodeEncodeError"),
        (replace(request(), on_tokens=fail), "cannot take its answer: KeyError"),
    ],
)
def test_a_thread_that_ends_takes_its_engine_with_it(client: EngineClient, bad: GenerateRequest, why: str) -> None:
    error = client.submit([bad])[0].exception(DEADLINE_S)
    assert isinstance(error, RoleError) and why in str(error)
    assert not client.alive()


def test_a_hung_process_is_noticed_and_can_be_closed() -> None:
    client = slow_client(0.0)
    os.kill(client._child.pid, signal.SIGSTOP)
    with pytest.raises(WaitTimeout, match=r"engine-SlowEngine \(pid \d+\) did not respond for 0 s"):
        client.generate([request(seed, tuple(range(10_000))) for seed in range(20)], 0.01)
    client.close()
    assert not client.alive()
