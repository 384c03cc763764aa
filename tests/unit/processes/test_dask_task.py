"""Promises of Dask's workers and client: workers are listed and return, and a canceled start is repeated."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from multiprocessing import forkserver

import pytest
from distributed import Client, LocalCluster

from rftdask.cluster.layout import Layout, WorkerPlan
from rftdask.cluster.local import LocalCluster as OurCluster
from rftdask.errors import RoleError
from rftdask.processes.dask_cluster import connect
from rftdask.processes.dask_task import workers_of


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
