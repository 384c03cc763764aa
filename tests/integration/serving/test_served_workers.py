"""Promises of a server whose engines are on Dask workers, with real processes on two addresses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from distributed import Client

from rftdask.buffer.log import open_log
from rftdask.config import load_config
from rftdask.storage import open_storage
from tests.integration.run_cases import RunProcess, run_folder, write_config
from tests.integration.serving.slow_served_engine import CALLS, WHY_NOT
from tests.living import lives, wait_until_gone
from tests.unit.synchronizer.sync_cases import publish_weights

pytestmark = pytest.mark.slow
TOKEN = "a-token"
NUM_AGENTS = 8
"""Concurrent agents; one engine has memory for the calls of half of them."""


class Agents:
    """Threads that each play sessions of two turns and send rewards; records the responses."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.rewarded: list[str] = []
        """Sessions whose reward was answered with 200."""
        self.refused: list[int] = []
        """Values of Retry-After that they received."""
        self.problems: list[str] = []
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._play, args=(number,)) for number in range(NUM_AGENTS)]

    def __enter__(self) -> Agents:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Let them finish the current sessions. Idempotent."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Return the answer, after retrying while the status is 429."""
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        while True:
            request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.loads(answer.read())  # type: ignore[no-any-return]
            except urllib.error.HTTPError as error:
                with error:
                    if error.code != 429:
                        raise RuntimeError(f"{error.code}: {error.read().decode()}") from error
                    self.refused.append(int(error.headers["Retry-After"]))
            self._stopping.wait(0.1)

    def play(self, session: str) -> None:
        messages: list[dict[str, Any]] = []
        for said in "ab":
            messages.append({"role": "user", "content": said})
            answer = self.post(f"/sessions/{session}/v1/chat/completions", model="p", messages=messages)
            messages.append(answer["choices"][0]["message"])
        self.post("/feedback", session_id=session, reward=1)
        self.rewarded.append(session)

    def _play(self, agent: int) -> None:
        number = 0
        try:
            while not self._stopping.is_set():
                self.play(f"s{agent}-{number}")
                number += 1
        except Exception as error:  # the test reports it
            self.problems.append(f"{type(error).__name__}: {error}")


def health(url: str) -> dict[str, int]:
    with urllib.request.urlopen(url + "/health", timeout=60) as answer:
        return json.loads(answer.read())  # type: ignore[no-any-return]


@contextlib.contextmanager
def process(*program: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-m", *program], stderr=subprocess.DEVNULL) as started:
        try:
            yield started
        finally:
            started.kill()


def worker(scheduler_file: Path, host: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    options = f"--host {host} --nthreads 1 --memory-limit 0 --no-nanny --no-dashboard --resources explorer=1".split()
    return process("distributed.cli.dask_worker", "--scheduler-file", str(scheduler_file), *options)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "calls"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.setenv("RFTDASK_SERVE_TOKEN", TOKEN)
    monkeypatch.setenv(CALLS, str(folder))
    return folder


def wait_for_workers(scheduler_file: Path, number: int) -> None:
    """A server that finds too few workers in an existing cluster ends at once."""
    with Client(scheduler_file=str(scheduler_file), timeout=60) as client:
        client.wait_for_workers(number, timeout=60)


@contextlib.contextmanager
def scheduler(file: Path) -> Iterator[tuple[str, str]]:
    """A Dask scheduler that writes its address to the file, and the options that make a run use its cluster."""
    options = ("--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file))
    with process("distributed.cli.dask_scheduler", *options):
        yield "cluster.type=existing", f"cluster.options={{scheduler_file: '{file}'}}"


def serve(config: Path, *overrides: str) -> RunProcess:
    engine = "explorer.rollout_model.engine_type=tests.integration.serving.slow_served_engine.SlowEngine"
    arguments = ("--port", "0", engine, "model.max_prompt_tokens=64", *overrides)
    return RunProcess("serve", str(config), *arguments)


def url_of(run: RunProcess) -> str:
    assert run.process.stdout is not None
    first = run.process.stdout.readline()
    assert first.startswith("waiting for the first explorer worker of cluster.type "), (first, run.kill_and_read())
    line = run.process.stdout.readline()
    assert line.startswith("serving "), (line, run.kill_and_read())
    return line.split()[1].removesuffix("/v1")


def end(run: RunProcess) -> None:
    run.process.terminate()
    assert run.process.wait(60) == 0


def sessions_in_log(config: Path) -> int:
    log = open_log(open_storage(str(run_folder(config))), load_config(config))
    rows = [row for name in log.shards() for row in log.read(name).to_pylist()]
    return len({(row["task_index"], row["rollout"]) for row in rows})


def engine_of(started: subprocess.Popen[bytes], calls: Path) -> int:
    [pid] = [each.pid for each in psutil.Process(started.pid).children(recursive=True) if calls_of(calls, each.pid)[0]]
    return pid


def calls_of(folder: Path, pid: int) -> tuple[int, int]:
    """Return the calls that an engine has started and finished, the first two of which make it ready; (0, 0): not an
    engine.
    """
    lines = (folder / str(pid)).read_text().split() if (folder / str(pid)).exists() else []
    return lines.count("+"), lines.count("-")


def calls_of_others(folder: Path, pid: int) -> int:
    return sum(calls_of(folder, int(file.name))[1] for file in folder.iterdir() if file.name != str(pid))


def test_a_killed_worker_costs_no_call_and_is_replaced(tmp_path: Path, calls: Path) -> None:
    config, file = write_config(tmp_path), tmp_path / "scheduler.json"
    with (
        scheduler(file) as cluster,
        worker(file, "127.0.0.1") as first,
        worker(file, "127.0.0.2") as victim,
        contextlib.ExitStack() as stack,
    ):
        wait_for_workers(file, 2)
        run = stack.enter_context(serve(config, *cluster, "explorer.rollout_model.engine_num=2"))
        url = url_of(run)
        run.wait_until(lambda: health(url)["engines"] == 2)
        killed, left = engine_of(victim, calls), engine_of(first, calls)
        with Agents(url) as agents:
            run.wait_until(lambda: calls_of(calls, killed)[1] > 10 and calls_of(calls, left)[1] > 10)
            refused_before = len(agents.refused)
            run.wait_until(lambda: calls_of(calls, killed)[0] > calls_of(calls, killed)[1])
            victim.kill()
            run.wait_until(lambda: health(url)["engines"] == 1)
            before = calls_of(calls, left)[1]
            run.wait_until(lambda: calls_of(calls, left)[1] > before + 20)
            # The agents exceed the memory of the remaining engine.
            assert len(agents.refused) > refused_before and set(agents.refused) <= set(range(1, 31))
            publish_weights(open_storage(str(run_folder(config))), 3, b"weights")
            with worker(file, "127.0.0.2") as next_one:
                run.wait_until(lambda: health(url)["engines"] == 2 and health(url)["policy_version"] == 3)
                joined = engine_of(next_one, calls)
                run.wait_until(lambda: calls_of(calls, joined)[1] > 10)
                agents.stop()
                end(run)
    assert agents.problems == []
    assert sessions_in_log(config) == len(agents.rewarded) > 20
    assert not lives(killed)


def test_a_killed_engine_is_replaced_and_servers_leave_none(tmp_path: Path, calls: Path) -> None:
    config, file = write_config(tmp_path), tmp_path / "scheduler.json"
    with scheduler(file) as cluster, worker(file, "127.0.0.2") as host:
        wait_for_workers(file, 1)
        with serve(config, *cluster) as run:
            agents = Agents(url_of(run))
            agents.play("one")
            first = engine_of(host, calls)
            os.kill(first, signal.SIGKILL)
            run.wait_until(lambda: calls_of_others(calls, first) > 0 and health(agents.url)["engines"] == 1)
            agents.play("two")
            second = engine_of(host, calls)
            run.process.kill()
            run.process.wait(60)
        wait_until_gone(second)
        assert host.poll() is None
        with serve(config, *cluster) as run:
            Agents(url_of(run)).play("three")
            end(run)
        with serve(config, *cluster, f"explorer.env_vars={{{WHY_NOT}: no such model}}") as run:
            ended = run.end(code=2)
        assert "127.0.0.2" in ended.err and "no such model" in ended.err, ended
    assert sessions_in_log(config) == 3


def test_a_worker_that_joins_speaks_tls_with_its_server(config: Path) -> None:
    tree = yaml.safe_load(config.read_text())
    tree["explorer"]["rollout_model"]["engine_type"] = "tests.integration.serving.slow_served_engine.SlowEngine"
    config.write_text(yaml.safe_dump({**tree, "cluster": {"type": "joined"}}))
    with serve(config) as run, process("rftdask", "join", str(config)) as joined:
        agents = Agents(url_of(run))
        agents.play("s")
        assert [*run_folder(config).glob("control/private/*.pem")], "the keys of the cluster"
        end(run)
        assert joined.wait(60) == 0, "the run is over"
    assert sessions_in_log(config) == 1
