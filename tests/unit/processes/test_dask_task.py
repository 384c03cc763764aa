"""Promises of Dask's workers and client: workers are listed and return, and a canceled start is repeated."""

import asyncio
import os
import signal
import threading
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster, wait

import rftdask
from rftdask.cluster.layout import Layout, WorkerPlan
from rftdask.cluster.local import LocalCluster as OurCluster
from rftdask.errors import RoleError
from rftdask.processes.dask_cluster import connect
from rftdask.processes.dask_task import fetch, workers_of


def test_workers_are_listed_while_the_client_polls() -> None:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        ended = threading.Event()

        def ask() -> None:
            while not ended.is_set():
                # Dask does this every few seconds.
                client.sync(client._update_scheduler_info)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            assert {len(workers_of(client)) for _ in range(300)} == {2}
        finally:
            ended.set()
            asking.join()


@pytest.mark.slow
def test_a_worker_that_returns_late_is_kept() -> None:
    """By default Dask gives up a worker 15 s after its loss, even one that starts slowly or was lost again."""
    with OurCluster(Layout((WorkerPlan("explorer-0", ("explorer",), 1),))) as cluster:
        (address,) = workers_of(cluster.client)
        pid, forks = cluster.client.run(os.getpid)[address], forkserver._forkserver._forkserver_pid
        os.kill(forks, signal.SIGSTOP)
        try:
            os.kill(pid, signal.SIGKILL)
            time.sleep(17)
        finally:
            os.kill(forks, signal.SIGCONT)
        assert cluster.client.submit(int, "7", workers=["explorer-0"]).result(timeout=60) == 7


def test_a_client_with_a_cancelled_start_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    starts, start = list[str](), Client._start
    cancelled = 1

    async def cancelled_at_first(self: Client, *args: object, **options: object) -> object:
        starts.append(self.id)
        if len(starts) <= cancelled:
            raise asyncio.CancelledError
        return await start(self, *args, **options)

    monkeypatch.setattr(Client, "_start", cancelled_at_first)
    with LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as cluster:
        with connect(cluster) as client:
            assert client.submit(int, "7").result(timeout=30) == 7
        assert len(set(starts)) == 2
        cancelled = 9
        with pytest.raises(RoleError, match="cancelled in 3 attempts"):
            connect(cluster)


@pytest.mark.slow
def test_results_arrive_after_a_worker_was_silent_for_a_while() -> None:
    """With a timeout of Dask's own, the sixth result that waits makes each later one of the client raise."""
    options: dict[str, Any] = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(**options) as cluster, connect(cluster) as client:
        futures = [client.submit(int, str(number), pure=False) for number in range(8)]
        wait(futures, timeout=60)
        (pid,) = client.run(os.getpid).values()
        os.kill(pid, signal.SIGSTOP)
        try:
            fetched = []
            for future in futures:
                fetched.append(fetch(future))
                with pytest.raises(TimeoutError):
                    fetched[-1].result(0.2)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert [result.result(60) for result in fetched] == list(range(8))
        assert fetch(client.submit(int, "9")).result(60) == 9


def test_results_have_no_timeout_by_keyword() -> None:
    """Futures of threads take it by position; an ActorFuture has a wait of its own."""
    root = Path(rftdask.__file__).parent
    others = {root / "storage" / "doctor.py", root / "synchronizer" / "actor.py"}
    assert [file for file in root.rglob("*.py") if ".result(timeout=" in file.read_text() and file not in others] == []
