"""Trackers with their real packages, without a network: each has the curves and rollouts of a run that continued."""

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rftdask.monitor.metrics import MetricsWriter
from rftdask.monitor.trackers import RolloutRow, TrackerFeed, make_tracker
from rftdask.storage.base import Storage

pytestmark = [
    pytest.mark.extras,
    # Warnings of the packages about themselves.
    pytest.mark.filterwarnings("ignore"),
]


DEADLINE_S = 120.0
"""Time for a server to start."""


@pytest.fixture(autouse=True)
def no_accounts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "SWANLAB_API_KEY", "SWANLAB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # requests fail


def answers(step: int) -> list[RolloutRow]:
    return [RolloutRow("sums/0/1", i, "1+1=", f"step {step}, <b>|\n{i}", "2", float(i), "ok") for i in range(2)]


def feed_twice(kind: str, storage: Storage, folder: Path, clock: Any, **args: Any) -> None:
    """Run two drivers in sequence; the second continues where the first one stopped."""
    for step in (1, 2):
        with MetricsWriter(storage, "trainer", clock=clock) as writer:
            writer.write(step, {"loss": 1 / step, "kl": float("nan")}, stage="rl")
        with MetricsWriter(storage, "explorer", clock=clock) as writer:
            writer.write(step, {"reward": 0.5 * step})
        tracker = make_tracker(kind, folder=folder, project="my project", name="a/run", config={"lr": 1}, args=args)
        feed = TrackerFeed(storage, tracker, kind, answers)
        assert feed.poll() == 2
        feed.close()
        assert feed.error is None


def test_tensorboard_has_answers_as_text(storage: Storage, tmp_path: Path, clock: Callable[[], float]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    feed_twice("tensorboard", storage, tmp_path, clock)
    read = EventAccumulator(str(tmp_path / "tensorboard" / "explorer"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("reward")] == [(1, 0.5), (2, 1.0)]
    tables = [(event.step, event.tensor_proto.string_val[0].decode()) for event in read.Tensors("rollouts")]
    assert [step for step, _ in tables] == [1, 2]
    assert "| 2 | sums/0/1 | 1 | 1+1= | step 2, &lt;b&gt;&#124;<br>1 | 2 | 1.0 | ok |" in tables[1][1]


def test_offline_wandb_has_one_run_with_a_table(storage: Storage, tmp_path: Path, clock: Callable[[], float]) -> None:
    feed_twice("wandb", storage, tmp_path, clock)
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert {run.name.split("-", 3)[3] for run in runs} == {"my-project-a-run"}, "the same id"
    tables = [json.loads(file.read_text()) for file in (tmp_path / "wandb").rglob("*.table.json")]
    rows = {(row[0], row[4]) for table in tables for row in table["data"]}
    assert rows == {(step, f"step {step}, <b>|\n{i}") for step in (1, 2) for i in range(2)}


def test_mlflow_has_one_run_and_a_table_per_step(storage: Storage, tmp_path: Path, clock: Callable[[], float]) -> None:
    feed_twice("mlflow", storage, tmp_path, clock)
    look_at_mlflow((tmp_path / "mlflow").as_uri(), tmp_path / "mlflow")


def look_at_mlflow(uri: str, files: Path) -> None:
    """Check the only run of an MLflow server or folder, whose tables are below `files`."""
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true", "telemetry is disabled"
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=uri)
    [experiment] = [e for e in client.search_experiments() if e.name == "my project"]
    [run] = client.search_runs([experiment.experiment_id])
    losses = client.get_metric_history(run.info.run_id, "trainer/loss")
    assert sorted((loss.step, loss.value) for loss in losses) == [(1, 1.0), (2, 0.5)]
    tables = [file.path for file in client.list_artifacts(run.info.run_id, "rollouts")]
    assert tables == ["rollouts/00000001.json", "rollouts/00000002.json"]
    [table] = files.rglob("00000002.json")
    assert json.loads(table.read_text())["data"][1] == [2, *("sums/0/1", 1, "1+1=", "step 2, <b>|\n1", "2", 1.0, "ok")]


def test_an_mlflow_server_receives_the_same_rows(storage: Storage, tmp_path: Path, clock: Callable[[], float]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/db", "--artifacts-destination", str(tmp_path / "files")]
    # MLflow's jobs would start two more processes.
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with subprocess.Popen([*command, "--workers", "1"], env=env, start_new_session=True) as server:
        try:
            for _ in range(int(DEADLINE_S / 0.2)):
                with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
                assert server.poll() is None
                time.sleep(0.2)
            feed_twice("mlflow", storage, tmp_path / "run", clock, tracking_uri=url)
            look_at_mlflow(url, tmp_path / "files")
        finally:
            os.killpg(server.pid, signal.SIGKILL)


def test_offline_swanlab_has_curves_and_tables(storage: Storage, tmp_path: Path, clock: Callable[[], float]) -> None:
    feed_twice("swanlab", storage, tmp_path, clock)
    kept = b"".join(file.read_bytes() for file in (tmp_path / "swanlab").rglob("*") if file.is_file())
    for text in (b"trainer/loss", b"explorer/reward", b"step 1, ", b"step 2, "):
        assert text in kept, text


def test_trackio_has_one_run_with_curves_and_tables(
    storage: Storage, tmp_path: Path, clock: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    import trackio.utils
    from trackio import sqlite_storage

    for module in (trackio, trackio.utils, sqlite_storage):
        if hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    feed_twice("trackio", storage, tmp_path, clock)
    look_at_trackio(tmp_path / "trackio")


def look_at_trackio(folder: Path) -> None:
    """Check the only run in a trackio folder, with its curves and tables."""
    [database] = folder.glob("my-project*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics").fetchall()
    logged = [(name, step, json.loads(metrics)) for name, step, metrics in rows]
    assert {name for name, *_ in logged} == {"a/run"}
    losses = [(step, metrics["trainer/loss"]) for _, step, metrics in logged if "trainer/loss" in metrics]
    assert sorted(losses) == [(1, 1.0), (2, 0.5)]
    tables = [json.dumps(metrics) for _, _, metrics in logged if "rollouts" in metrics]
    assert len(tables) == 2 and re.search("trackio.table", tables[0])


SERVER = """
import sys, trackio
*_, url = trackio.show(open_browser=False, block_thread=False, host="127.0.0.1")
print("serves", url, flush=True)
sys.stdin.read()
"""


def test_a_trackio_server_receives_the_same_rows(storage: Storage, tmp_path: Path, clock: Callable[[], float]) -> None:
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "server")}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            url = next(line.split()[1] for line in server.stdout if line.startswith("serves "))
            feed_twice("trackio", storage, tmp_path, clock, server_url=url)
        finally:
            server.kill()
    look_at_trackio(tmp_path / "server")
