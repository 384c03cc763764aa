"""Promises of an auxiliary model on separate workers, called over Dask: a request goes to the least busy worker."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, cast

import pytest
from distributed import LocalCluster, Worker

from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.engines.client import EngineClient, EngineSpec
from rftdask.engines.server import Scored
from rftdask.errors import ProcessLostError, RoleError, StorageError
from rftdask.rollouts import auxiliary_models
from rftdask.rollouts.auxiliary_models import AUXILIARY_RESOURCE, ModelServer, SharedEngine
from rftdask.storage.memory import MemoryStorage
from rftdask.synchronizer.published import Published
from tests.living import wait_until

KEY = ("memory://run", "fingerprint", "judge")
PATIENCE_S = 3.0


class Engine:
    """Fake of EngineClient that responds with the seed of the request, unless it `waits` or is dead."""

    cache_tokens = None

    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []
        self.under_way: list[Future[Generation]] = []
        self.is_dead = self.waits = False

    def submit(self, requests: Sequence[GenerateRequest]) -> list[Future[Generation]]:
        futures = []
        for request in requests:
            self.asked.append(request)
            future: Future[Generation] = Future()
            if self.is_dead:
                future.set_exception(ProcessLostError("engine (pid 7) ended: killed"))
            elif self.waits:
                self.under_way.append(future)
            else:
                future.set_result(answer(request))
            futures.append(future)
        return futures

    def score(self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> Future[Scored]:
        future: Future[Scored] = Future()
        future.set_result(Scored(99, tuple(tuple(-float(token) for token in response) for _, response in pairs)))
        return future


def answer(request: GenerateRequest) -> Generation:
    return Generation((request.seed,), (-0.5,), "stop", 0, 0)


def request(seed: int) -> GenerateRequest:
    return GenerateRequest((1, 2), SamplingParams(max_tokens=1), seed)


class Judges:
    """A cluster in this process: one client worker, and several workers of auxiliary models."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.asker, *workers = cast(list[Worker], list(cluster.workers.values()))
        self.engines = [Engine() for _ in workers]
        self.servers: dict[int, ModelServer] = {}
        self.asked: list[SharedEngine] = []
        self.workers = workers
        for number, worker in enumerate(workers):
            cluster.sync(worker.set_resources, **{AUXILIARY_RESOURCE: 1.0})
            self.serve(number)

    def serve(self, number: int, in_calls: bool = False) -> None:
        engine, storage = cast(EngineClient, self.engines[number]), MemoryStorage(KEY[0])
        self.servers[number] = ModelServer(self.workers[number], KEY, engine, storage, in_calls=in_calls)

    def end(self, number: int) -> None:
        self.servers[number].end(ProcessLostError("engine (pid 7) ended"))

    def ask(self, name: str = "judge", patience_s: float = PATIENCE_S, connected: int = 0) -> SharedEngine:
        """connected: number of workers that must serve it first."""
        key = (*KEY[:2], name)
        judge = SharedEngine(self.asker, key, cast(EngineSpec, None), num_engines=2, patience_s=patience_s)
        self.asked.append(judge)
        if connected:
            judge.wait_ready(PATIENCE_S)
            wait_until(lambda: len(judge._engines.alive) == connected)
        return judge


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(n_workers=3, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as cluster:
        yield cluster


@pytest.fixture
def judges(cluster: LocalCluster) -> Iterator[Judges]:
    judges = Judges(cluster)
    yield judges
    for asked in judges.asked:
        asked.close()


def test_requests_are_balanced_and_responses_keep_their_order(judges: Judges) -> None:
    judge = judges.ask(connected=2)
    for engine in judges.engines:
        engine.waits = True
    futures = judge.submit([request(seed) for seed in range(6)])
    wait_until(lambda: sum(len(engine.under_way) for engine in judges.engines) == 6)
    assert [len(engine.under_way) for engine in judges.engines] == [3, 3]
    for engine in judges.engines:
        for asked, future in zip(engine.asked, engine.under_way, strict=True):
            future.set_result(answer(asked))
    assert [future.result(30).tokens for future in futures] == [(seed,) for seed in range(6)]
    assert judge.logprobs([((1,), (2, 3))], 10.0) == [(-2.0, -3.0)]


def test_requests_of_a_lost_worker_go_to_another(judges: Judges) -> None:
    judges.engines[0].is_dead = True
    judge = judges.ask(connected=2)
    tokens = [future.result(30).tokens for future in judge.submit([request(seed) for seed in range(4)])]
    assert tokens == [(0,), (1,), (2,), (3,)]
    assert judges.engines[0].asked and len(judges.engines[1].asked) == 4


def test_a_request_that_loses_several_workers_fails(judges: Judges, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auxiliary_models, "_POLL_INTERVAL_S", 0.05)
    for engine in judges.engines:
        engine.is_dead = True
    [future] = judges.ask().submit([request(1)])
    with pytest.raises(RoleError, match=r"'judge': one request has lost 3 of its workers.*engine \(pid 7\) ended"):
        future.result(30)


def test_a_model_without_workers_is_an_error_after_a_deadline(judges: Judges) -> None:
    message = r"no worker has served auxiliary model 'other' .* for 1 s; engine_num is 2; 2 workers .* are connected"
    [future] = judges.ask("other", patience_s=0.6).submit([request(1)])
    with pytest.raises(RoleError, match=message):
        future.result(30)
    with pytest.raises(RoleError, match="the work unit was cancelled"):
        judges.ask("other").wait_ready(100.0, lambda: True)


def test_a_waiting_request_is_served_once_a_worker_joins(judges: Judges) -> None:
    judge = judges.ask(patience_s=30.0, connected=2)
    judges.end(0)
    judges.end(1)
    wait_until(lambda: judge._engines.alive == [])
    [future] = judge.submit([request(5)])
    time.sleep(0.2)
    assert not future.done()
    judges.serve(1)
    assert future.result(30).tokens == (5,)
    assert not judges.engines[0].asked


def test_a_cancelled_request_leaves_its_engine(judges: Judges) -> None:
    for engine in judges.engines:
        engine.waits = True
    first, second = judges.ask(patience_s=60.0, connected=2).submit([request(1), request(2)])
    wait_until(lambda: sum(len(engine.under_way) for engine in judges.engines) == 2)
    first.cancel()
    under_way: list[Future[Any]] = [future for engine in judges.engines for future in engine.under_way]
    wait_until(lambda: sum(future.cancelled() for future in under_way) == 1)
    assert not second.done()
    second.cancel()
    wait_until(lambda: all(future.cancelled() for future in under_way))


def test_requests_of_a_lost_connection_are_sent_again(judges: Judges) -> None:
    judges.end(1)
    judge, engine = judges.ask(patience_s=60.0, connected=1), judges.engines[0]
    engine.waits = True
    [future] = judge.submit([request(4)])
    wait_until(lambda: len(engine.under_way) == 1)
    judge._loop.call_soon_threadsafe(judge._engines.alive[0].close)
    wait_until(lambda: len(engine.under_way) == 2)
    wait_until(engine.under_way[0].cancelled)
    engine.under_way[1].set_result(answer(engine.asked[1]))
    assert future.result(30).tokens == (4,)


def test_exclusive_calls_run_one_at_a_time(judges: Judges) -> None:
    judges.end(1)
    judges.serve(0, in_calls=True)
    judge, engine = judges.ask(patience_s=60.0, connected=1), judges.engines[0]
    engine.waits = True
    threads = [threading.Thread(target=judge.generate, args=([request(seed)], 10.0)) for seed in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: judge._engines.alive[0].num_under_way == 4)
    for number in range(4):
        judge.logprobs([((1,), (2,))], 10.0)  # its response means that earlier requests have arrived
        wait_until(lambda number=number: len(engine.under_way) > number)  # type: ignore[misc]
        assert len(engine.asked) == number + 1
        engine.under_way[number].set_result(answer(engine.asked[number]))
    for thread in threads:
        thread.join(30)


def test_a_cancelled_call_that_waits_for_others_is_never_made(judges: Judges) -> None:
    judges.end(1)
    judges.serve(0, in_calls=True)
    judge, engine = judges.ask(patience_s=60.0, connected=1), judges.engines[0]
    engine.waits = True
    first, second, third = judge.submit([request(seed) for seed in range(3)])
    wait_until(lambda: judge._engines.alive[0].num_under_way == 3)
    second.cancel()
    wait_until(lambda: judge._engines.alive[0].num_under_way == 2)
    judge.logprobs([((1,), (2,))], 10.0)
    for number in range(2):
        wait_until(lambda number=number: len(engine.under_way) > number)  # type: ignore[misc]
        engine.under_way[number].set_result(answer(engine.asked[number]))
    assert [first.result(30).tokens, third.result(30).tokens] == [(0,), (2,)]
    assert [request.seed for request in engine.asked] == [0, 2]


def test_an_auxiliary_model_keeps_its_weights(judges: Judges) -> None:
    engine = judges.ask(connected=2)._engines.alive[0]
    with pytest.raises(StorageError, match="does not accept weights from this client"):
        engine.load(MemoryStorage(KEY[0]), Published(3, "", ""))
    assert engine.alive() and engine.weights.version == 0
