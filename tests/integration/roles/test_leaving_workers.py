"""Workers that are told to end, as real processes. Promises:

- one that gets SIGTERM, alone or with all its processes at once, says that it leaves before its task is lost;
- one that dies in any other way says nothing;
- a task sees that the scheduler of its worker is gone, so the next worker can come.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dask
import psutil
import pytest
from distributed import Client, KilledWorker, Scheduler, SpecCluster

from rftdask.cluster.preloads import LEAVING
from rftdask.processes.dask_cluster import DASK_CONFIG
from rftdask.processes.dask_task import LEAVING_TOPIC, make_called_off
from tests.integration.run_cases import DEADLINE_S

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    options = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": "127.0.0.1:0"}
    scheduler = {"cls": Scheduler, "options": options}
    with (
        dask.config.set(DASK_CONFIG),
        SpecCluster(scheduler=scheduler, workers={}) as cluster,
        Client(cluster) as client,
    ):
        yield client


@contextlib.contextmanager
def busy_worker(client: Client, folder: Path) -> Iterator[tuple[psutil.Process, psutil.Process, str]]:
    """A worker that runs a task for long: its nanny, its own process and its address."""
    nanny = start_worker(client, folder)
    try:
        (address,) = client.scheduler_info(n_workers=-1)["workers"]
        worker = psutil.Process(next(iter(client.run(os.getpid).values())))
        yield nanny, worker, address
    finally:
        kill_tree(nanny)
        wait_until(lambda: not client.scheduler_info(n_workers=-1)["workers"])


def start_worker(client: Client, folder: Path) -> psutil.Popen:
    command = [sys.executable, "-m", "distributed.cli.dask_worker", client.scheduler.address, *LEAVING]
    options = ["--nthreads", "1", "--no-dashboard", "--memory-limit", "0", "--local-directory", str(folder)]
    nanny = psutil.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    client.wait_for_workers(1, timeout=DEADLINE_S)
    return nanny


def kill_tree(root: psutil.Popen) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (*root.children(recursive=True), root):
            with contextlib.suppress(psutil.Error):
                process.kill()
    root.wait(DEADLINE_S)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(("ends", "says"), [("nanny", True), ("all", True), ("worker", False)])
def test_a_worker_says_that_it_leaves_when_it_is_told_to_end(
    client: Client, tmp_path: Path, ends: str, says: bool
) -> None:
    said: list[str] = []
    client.subscribe_topic(LEAVING_TOPIC, lambda event: said.append(event[1]))
    with busy_worker(client, tmp_path) as (nanny, worker, address):
        running = client.submit(time.sleep, 60.0, pure=False)
        wait_until(lambda: any(client.processing().values()))
        if ends == "worker":
            worker.kill()
        else:
            for process in (nanny, worker) if ends == "all" else (nanny,):
                process.send_signal(signal.SIGTERM)
        error = running.exception(timeout=DEADLINE_S)
        assert isinstance(error, KilledWorker) and error.last_worker.address == address
        assert said == [address] * says
    client.unsubscribe_topic(LEAVING_TOPIC)


def test_a_task_sees_that_its_scheduler_is_gone(tmp_path: Path) -> None:
    def look(ready: str, told: str) -> None:
        called_off = make_called_off()
        Path(ready).touch()
        while not called_off():
            time.sleep(0.02)
        Path(told).touch()

    ready, told, where = (tmp_path / name for name in ("ready", "told", "scheduler.json"))
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
    with contextlib.ExitStack() as ends:
        scheduler = psutil.Popen(
            [*command, "--no-dashboard", "--scheduler-file", str(where)], stderr=subprocess.DEVNULL
        )
        ends.callback(kill_tree, scheduler)
        wait_until(where.exists)
        client = ends.enter_context(Client(scheduler_file=str(where), timeout=DEADLINE_S))
        nanny = start_worker(client, tmp_path)
        ends.callback(kill_tree, nanny)
        future = client.submit(look, str(ready), str(told))
        wait_until(lambda: future.status != "pending" or ready.exists())
        assert ready.exists(), future.exception(timeout=DEADLINE_S)
        kill_tree(scheduler)
        # Dask alone waits half a minute for a thread, and then ends it with its process.
        wait_until(told.exists)
        nanny.wait(DEADLINE_S)
