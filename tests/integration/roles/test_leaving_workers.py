"""Workers of jobs that receive a signal to end, as real processes."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import dask
import psutil
import pytest
from distributed import Client, KilledWorker, Scheduler, SpecCluster

from rftdask.cluster.preloads import MODULE
from rftdask.processes.dask_cluster import DASK_CONFIG
from rftdask.processes.dask_task import LEAVING_TOPIC, make_cancel_check, workers_of
from tests import living
from tests.integration.run_cases import DEADLINE_S
from tests.living import lives

pytestmark = pytest.mark.slow
wait_until = functools.partial(living.wait_until, deadline_s=DEADLINE_S, every_s=0.02)


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
def worker_of_job(client: Client, folder: Path) -> Iterator[tuple[psutil.Popen, psutil.Process, str]]:
    """A worker: the process of its job, its own process and its address."""
    joined = start_worker(client, folder)
    try:
        worker = psutil.Process(next(iter(client.run(os.getpid).values())))
        yield joined, worker, address_of(client)
    finally:
        kill_tree(joined)
        wait_until(lambda: not workers_of(client))


def start_worker(client: Client, folder: Path) -> psutil.Popen:
    """Start a worker as a job's script does."""
    where = folder / "scheduler.json"
    if not where.exists():
        where.write_text(json.dumps({"address": client.scheduler.address}))
    own = ["--scheduler-file", str(where), "--name", "explorer", "--death-timeout", f"{DEADLINE_S:.0f}"]
    options = ["--imports", "rftdask.engines.fake", "--nthreads", "1", "--no-dashboard", "--memory-limit", "0"]
    command = [
        sys.executable,
        "-m",
        "rftdask.cluster.join",
        *own,
        *options,
        "--preload",
        MODULE,
        "--preload-nanny",
        MODULE,
    ]
    joined = psutil.Popen([*command, "--local-directory", str(folder)], stderr=subprocess.DEVNULL)
    client.wait_for_workers(1, timeout=DEADLINE_S)
    return joined


def address_of(client: Client) -> str:
    (address,) = workers_of(client)
    return str(address)


def tree(root: psutil.Popen) -> list[psutil.Process]:
    return [root, *root.children(recursive=True)]


def kill_tree(root: psutil.Popen) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in tree(root):
            with contextlib.suppress(psutil.Error):
                process.kill()
    root.wait(DEADLINE_S)


@pytest.mark.parametrize(("ends", "says"), [("joined", True), ("often", True), ("all", True), ("worker", False)])
def test_a_worker_announces_that_it_leaves_on_sigterm(client: Client, tmp_path: Path, ends: str, says: bool) -> None:
    said: list[str] = []
    client.subscribe_topic(LEAVING_TOPIC, lambda event: said.append(event[1]))
    with worker_of_job(client, tmp_path) as (joined, worker, address):
        parent = worker.ppid()
        running = client.submit(time.sleep, 60.0, pure=False)
        wait_until(lambda: any(client.processing().values()))
        if ends == "worker":
            worker.kill()
        else:
            for process in {"joined": [joined], "often": [joined] * 50}.get(ends) or tree(joined):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGTERM)
                time.sleep(0.001)
        error = running.exception(timeout=DEADLINE_S)
        assert isinstance(error, KilledWorker) and error.last_worker.address == address
        assert said == [address] * says
        if says:
            assert joined.wait(DEADLINE_S) == 128 + signal.SIGTERM
        else:
            client.wait_for_workers(1, timeout=DEADLINE_S)
            after = psutil.Process(next(iter(client.run(os.getpid).values())))
            assert after.ppid() == parent != joined.pid, "a fork of the same process, which has its imports"
    client.unsubscribe_topic(LEAVING_TOPIC)


def test_a_job_waiting_for_a_scheduler_ends_on_sigterm(tmp_path: Path) -> None:
    (tmp_path / "scheduler.json").write_text(json.dumps({"address": "tcp://127.0.0.1:1"}))
    command = [sys.executable, "-m", "rftdask.cluster.join", "--scheduler-file", str(tmp_path / "scheduler.json")]
    joined = psutil.Popen([*command, "--name", "explorer", "--death-timeout", f"{DEADLINE_S:.0f}"])
    wait_until(lambda: len(joined.children()) > 0)
    processes = tree(joined)
    joined.send_signal(signal.SIGTERM)
    joined.wait(DEADLINE_S)
    wait_until(lambda: not any(map(lives, processes)))


def test_nothing_outlives_the_process_of_a_job(client: Client, tmp_path: Path) -> None:
    with worker_of_job(client, tmp_path) as (joined, worker, _):
        processes = tree(joined)
        assert worker in processes
        joined.kill()
        wait_until(lambda: not any(map(lives, processes)))


def test_a_task_notices_a_lost_scheduler_and_frees_its_worker(tmp_path: Path) -> None:
    def look(ready: str, told: str) -> None:
        is_cancelled = make_cancel_check()
        Path(ready).touch()
        while not is_cancelled():
            time.sleep(0.02)
        Path(told).touch()

    ready, told, written = (tmp_path / name for name in ("ready", "told", "written.json"))
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
    with contextlib.ExitStack() as ends:

        def start_scheduler() -> tuple[psutil.Popen, Client]:
            scheduler = psutil.Popen(
                [*command, "--no-dashboard", "--scheduler-file", str(written)], stderr=subprocess.DEVNULL
            )
            ends.callback(kill_tree, scheduler)
            wait_until(lambda: written.exists() and written.read_text().endswith("}"))
            # At once, as a driver does; a missing file means that the run is over.
            where = written.replace(tmp_path / "scheduler.json")
            return scheduler, ends.enter_context(Client(scheduler_file=str(where), timeout=DEADLINE_S))

        scheduler, client = start_scheduler()
        joined = start_worker(client, tmp_path)
        ends.callback(kill_tree, joined)
        parent = client.submit(os.getppid).result(DEADLINE_S)
        future = client.submit(look, str(ready), str(told))
        wait_until(lambda: future.status != "pending" or ready.exists())
        assert ready.exists(), future.exception(timeout=DEADLINE_S)
        kill_tree(scheduler)
        # Dask on its own waits half a minute for a thread and then ends it with its process.
        wait_until(told.exists)
        _, client = start_scheduler()
        client.wait_for_workers(1, timeout=DEADLINE_S)
        assert client.submit(os.getppid).result(DEADLINE_S) == parent != joined.pid, "a fork of the same process"
