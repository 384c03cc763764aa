"""Promises of an auxiliary model on workers of its own, asked over Dask: a request goes to the worker with the least to
do; what is lost with its worker is asked of another, and given up after several; where nobody serves the model the
error names it; a request that nobody wants any more leaves its engine; calls that are to share nothing share nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, cast

import pytest
from distributed import LocalCluster, Worker

from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.engines.client import EngineSpec
from rftdask.errors import ProcessLostError, RoleError
from rftdask.explorer import shared_engine
from rftdask.explorer.shared_engine import AUXILIARY_RESOURCE, ModelServer, SharedEngine

KEY = ("memory://run", "fingerprint", "judge")
PATIENCE_S = 3.0


class Engine:
    """An `AskedEngine` that answers each request with its seed, unless it is to wait for `release`, or is dead."""

    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []
        self.under_way: list[Future[Generation]] = []
        self.is_dead = self.waits = False
        self.most_together, self._together = 0, 0
        self._lock = threading.Lock()

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

    def generate(self, requests: Sequence[GenerateRequest], timeout_s: float) -> list[Generation]:
        with self._lock:
            self._together += 1
            self.most_together = max(self.most_together, self._together)
        time.sleep(0.05)
        with self._lock:
            self._together -= 1
        return [each.result() for each in self.submit(requests)]

    def logprobs(
        self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], timeout_s: float
    ) -> list[tuple[float, ...]]:
        return [tuple(-float(token) for token in response) for _, response in pairs]


def answer(request: GenerateRequest) -> Generation:
    return Generation((request.seed,), (-0.5,), "stop", 0, 0)


def request(seed: int) -> GenerateRequest:
    return GenerateRequest((1, 2), SamplingParams(max_tokens=1), seed)


class Judges:
    """A cluster in this process: one worker that asks, and some of auxiliary models."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.asker, *workers = cast(list[Worker], list(cluster.workers.values()))
        self.engines = [Engine() for _ in workers]
        self.servers: list[ModelServer] = []
        for worker, engine in zip(workers, self.engines, strict=True):
            cluster.sync(worker.set_resources, **{AUXILIARY_RESOURCE: 1.0})
            served = ModelServer(worker, KEY)
            served.engine = engine
            self.servers.append(served)

    def ask(self, name: str = "judge", patience_s: float = PATIENCE_S) -> SharedEngine:
        key = (*KEY[:2], name)
        return SharedEngine(self.asker, key, cast(EngineSpec, None), num_engines=2, patience_s=patience_s)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(n_workers=3, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as cluster:
        yield cluster


@pytest.fixture
def judges(cluster: LocalCluster) -> Judges:
    return Judges(cluster)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_requests_go_to_the_worker_with_the_least_to_do_and_come_back_in_their_order(judges: Judges) -> None:
    judge = judges.ask()
    judge.wait_ready(PATIENCE_S)
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


def test_what_is_lost_with_its_worker_is_asked_of_another(judges: Judges) -> None:
    judges.engines[0].is_dead = True
    found = [future.result(30).tokens for future in judges.ask().submit([request(seed) for seed in range(4)])]
    assert found == [(0,), (1,), (2,), (3,)]
    assert judges.engines[0].asked and len(judges.engines[1].asked) == 4


def test_a_request_that_loses_several_workers_is_given_up(judges: Judges, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_engine, "_LOOK_S", 0.05)
    for engine in judges.engines:
        engine.is_dead = True
    [future] = judges.ask().submit([request(1)])
    with pytest.raises(RoleError, match=r"'judge': one request has lost 3 of its workers.*engine \(pid 7\) ended"):
        future.result(30)


def test_where_nobody_serves_a_model_the_error_names_it_after_a_deadline(judges: Judges) -> None:
    told = r"no worker has served auxiliary model 'other' .* for 1 s, of 2 .*engine_num.*; 2 workers .* are there"
    [future] = judges.ask("other", patience_s=0.6).submit([request(1)])
    with pytest.raises(RoleError, match=told):
        future.result(30)
    with pytest.raises(RoleError, match="the work unit was called off"):
        judges.ask("other").wait_ready(100.0, lambda: True)


def test_who_waits_for_a_model_gets_it_when_it_is_there(judges: Judges) -> None:
    for served in judges.servers:
        served.engine = None
    [future] = judges.ask(patience_s=30.0).submit([request(5)])
    time.sleep(0.2)
    assert not future.done()
    judges.servers[1].engine = judges.engines[1]
    assert future.result(30).tokens == (5,)


def test_a_request_that_nobody_wants_any_more_leaves_its_engine(judges: Judges) -> None:
    for engine in judges.engines:
        engine.waits = True
    first, second = judges.ask(patience_s=60.0).submit([request(1), request(2)])
    wait_until(lambda: sum(len(engine.under_way) for engine in judges.engines) == 2)
    first.cancel()
    under_way: list[Future[Any]] = [each for engine in judges.engines for each in engine.under_way]
    wait_until(lambda: sum(each.cancelled() for each in under_way) == 1)
    assert not second.done()
    second.cancel()
    wait_until(lambda: all(each.cancelled() for each in under_way))


def test_calls_that_are_to_share_nothing_share_nothing(judges: Judges) -> None:
    judges.servers[1].engine = None
    judge = judges.ask()
    threads = [threading.Thread(target=judge.generate, args=([request(seed)], 10.0)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (len(judges.engines[0].asked), judges.engines[0].most_together) == (4, 1)
