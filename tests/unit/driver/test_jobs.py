"""Promises of status, logs and cancel: a run that is not running is explained by its own record or by its jobs."""

import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from typer.testing import CliRunner

from rftdask.cli.app import app
from rftdask.cluster.jobs import SUBMITTED_FILE, JobRecord, write_jobs
from rftdask.cluster.join import join
from rftdask.cluster.secrets_dir import SecretsDir
from rftdask.cluster.slurm import NO_BOOKS, SlurmCluster
from rftdask.config import load_config
from rftdask.driver.jobs import cancel, follow_logs, read_logs
from rftdask.errors import DataError, RoleError
from rftdask.reports.jobs import JobStatus, read_run_jobs, why_not_running
from rftdask.reports.page.report_file import report_run
from rftdask.run.lease import Lease
from rftdask.run.run_folder import END_FILE, RUN_FILE, note_begin, note_end, open_run, read_end, read_run_config
from rftdask.storage import open_storage

ENDED = JobStatus("controller", "controller", "7", "NODE_FAIL (exit 0:1)", False)


RUN = {"model": {"model_path": "m", "max_model_len": 64}, "buffer": {"explorer_input": {"taskset": {"path": "t"}}}}


def begun(folder: Path, **sections: Any) -> Path:
    folder.mkdir(exist_ok=True)
    record = {"config": load_config({**RUN, **sections}).to_dict()}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_the_recorded_error_of_a_run_is_reported(tmp_path: Path) -> None:
    storage = open_storage(begun(tmp_path))
    assert read_end(storage) is None
    note_end(storage, "failed", "RoleError: out of restarts")
    assert why_not_running(storage, (ENDED,)) == "failed: RoleError: out of restarts"
    note_end(storage, "finished", "")
    assert why_not_running(storage, (ENDED,)) == "finished"


def test_a_killed_run_is_explained_by_its_job(tmp_path: Path) -> None:
    storage = open_storage(begun(tmp_path))
    text = why_not_running(storage, (ENDED,))
    assert text == "it was killed and recorded no end: job 7 (controller): NODE_FAIL (exit 0:1)"


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("PENDING (Priority)", "job 7 (controller) is PENDING (Priority)"),
        ("REQUEUED", "job 7 (controller) is queued again"),
        ("COMPLETING", "job 7 (controller) is ending"),
        ("RUNNING", "its driver has not started yet, or has just ended, in job 7 (controller)"),
    ],
)
def test_a_job_without_a_driver_is_reported(tmp_path: Path, state: str, text: str) -> None:
    waiting = JobStatus("controller", "controller", "7", state, True)
    assert why_not_running(open_storage(tmp_path), (waiting,)) == text
    assert why_not_running(open_storage(tmp_path), (ENDED,)).startswith("it never began: job 7 (controller)")


SACCT = """\
COMPLETED|7200|billing=8,cpu=8,gres/gpu:h100=8,gres/gpu=8,mem=64G,node=1|2026-11-23T10:00:00|2026-11-23T10:30:00|7|0:0|None
CANCELLED by 1000|1800|billing=1,cpu=1,gres/gpu=1,mem=4G,node=1|2026-11-23T10:00:00|2026-11-23T10:00:05|9|0:15|None
PREEMPTED|1800|billing=1,cpu=1,gres/gpu=1,mem=4G,node=1|2026-11-23T10:00:00|2026-11-23T10:01:00|12_4|0:0|None
NODE_FAIL|0|billing=1,cpu=1,gres/gpu=1,mem=4G,node=1|2026-11-23T10:00:00|2026-11-23T10:01:00|13|1:0|NodeDown
PENDING|0||2026-11-23T12:00:00|Unknown|14|0:0|Priority
"""


def test_usage_of_jobs_comes_from_slurm_accounting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, commands = begun(tmp_path / "run"), tmp_path / "bin"
    (run / "log").mkdir()
    for name in ("controller-7.log", "explorer-3-9.log", "explore-1-12_4.log", "trainer-rank-0.log", "driver.log"):
        (run / "log" / name).touch()
    write_jobs(open_storage(run), [JobRecord("controller", "controller", "7", "slurm", 0.0)], SUBMITTED_FILE)
    commands.mkdir()
    asked = tmp_path / "asked"
    for name, body in {
        "squeue": ":",
        "scontrol": ":",
        "sacct": f'echo "$@" >{asked}; cat {tmp_path}/accounting',
    }.items():
        (commands / name).write_text(f"#!/bin/sh\n{body}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    (tmp_path / "accounting").write_text(SACCT)
    result = read_run_jobs(str(run))
    assert "--jobs=12,7,9\n" in asked.read_text()
    assert result.usage is not None and result.to_json()["usage"]["gpu_hours"] == 17.0
    ends = "1 CANCELLED, 1 COMPLETED, 1 NODE_FAIL, 1 PENDING, 1 PREEMPTED"
    text = [
        f"5 jobs ({ends}), 17.00 GPU hours, up to 30 min in queue",
        "  job 12_4 PREEMPTED (exit 0:0)",
        "  job 13 NODE_FAIL (exit 1:0, NodeDown)",
    ]
    assert result.usage.render().splitlines() == text
    assert all(line.strip() in Path(report_run(run)).read_text() for line in text)
    (commands / "sacct").write_text("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2; exit 1\n")
    without = read_run_jobs(str(run))
    assert without.usage is None and without.usage_unknown == NO_BOOKS
    assert NO_BOOKS in Path(report_run(run)).read_text()


class EndedSystem(SlurmCluster):
    """A batch system whose jobs have ended, and whose first two cannot be cancelled."""

    tried: ClassVar[list[str]] = []

    @classmethod
    def states(cls, job_ids: Sequence[str]) -> dict[str, str]:
        return {}

    @classmethod
    def cancel(cls, *job_ids: str) -> None:
        cls.tried.extend(job_ids)
        if job_ids[0] in ("1", "2"):
            raise RoleError(f"scancel {job_ids[0]} failed")


def test_all_jobs_of_a_run_are_cancelled_although_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EndedSystem, "tried", [])
    (begun(tmp_path) / "control" / "private").mkdir(parents=True)
    system = f"{__name__}.EndedSystem"
    jobs = [JobRecord(role, role, str(n), system, 0.0) for n, role in enumerate(("explore", "train", "explorer"), 1)]
    write_jobs(open_storage(tmp_path), jobs, SUBMITTED_FILE)
    with pytest.raises(RoleError, match="scancel 1 failed; scancel 2 failed"):
        cancel(str(tmp_path), 1.0, print)
    assert EndedSystem.tried == ["1", "2", "3"]


def test_a_run_with_an_owner_is_running(tmp_path: Path) -> None:
    started_s = psutil.Process().create_time() - psutil.boot_time()
    me = {"host": socket.gethostname(), "pid": os.getpid(), "started_s": started_s}
    (begun(tmp_path) / "control").mkdir()
    lease = {**me, "time_s": time.time(), "released": False}
    (tmp_path / "control" / "lease-trainer-1.json").write_text(json.dumps(lease))
    assert why_not_running(open_storage(tmp_path), (ENDED,)) == ""


def test_logs_are_selected_by_name_prefix(tmp_path: Path) -> None:
    (begun(tmp_path) / "log").mkdir()
    (tmp_path / "log" / "trainer-0-12.log").write_text("one\ntwo\nthree\n")
    (tmp_path / "log" / "driver.log").write_text("drove\n")
    assert list(read_logs(str(tmp_path), "trainer", 2)) == [("trainer-0-12.log", ["two", "three"])]
    assert [name for name, _ in read_logs(str(tmp_path), "", 2)] == ["driver.log", "trainer-0-12.log"]
    with pytest.raises(DataError, match=r"no log of 'engine'; choose one of: driver, trainer"):
        list(read_logs(str(tmp_path), "engine", 2))


def test_missing_logs_and_missing_runs_are_distinct_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not a run folder"):
        list(read_logs(str(tmp_path / "elsewhere"), "", 2))
    with pytest.raises(DataError, match=r"has no logs yet"):
        list(read_logs(str(begun(tmp_path)), "", 2))


@pytest.mark.parametrize(
    "name", ["rftdask-trainer-try.o12", "rftdask-trainer-try.e12", "trainer-0-12.err", "trainer-0-12.out"]
)
def test_logs_named_by_a_batch_system_are_found(tmp_path: Path, name: str) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / name).write_text("one\ntwo\n")
    assert list(read_logs(str(tmp_path), "trainer", 1)) == [(name, ["two"])]
    with pytest.raises(DataError, match="choose one of: trainer"):
        list(read_logs(str(tmp_path), "engine", 1))


def test_stage_logs_have_the_stage_as_prefix(tmp_path: Path) -> None:
    begun(tmp_path, stages=[{"stage_name": "one"}, {"stage_name": "two"}])
    for folder in (tmp_path, tmp_path / "one"):
        (folder / "log").mkdir(parents=True)
    (tmp_path / "log" / "driver.log").write_text("drove\n")
    (tmp_path / "one" / "log" / "trainer-0.log").write_text("trained\n")
    expected = [("driver.log", ["drove"]), ("one/trainer-0.log", ["trained"])]
    assert list(read_logs(str(tmp_path), "", 2)) == expected
    assert list(read_logs(str(tmp_path), "trainer", 2)) == expected[1:]
    text = follow_logs(str(tmp_path), "", 2, poll_s=0.0)
    assert [next(text), next(text)] == expected


def test_remote_logs_are_listed_by_start_and_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    local = begun(tmp_path / "run", stages=[{"stage_name": "one"}])
    url = f"memory://logs-of-{tmp_path.name}"
    storage = open_storage(url)
    storage.put(RUN_FILE, (local / RUN_FILE).read_bytes())
    storage.put("log/20260101T000000-7/driver.log", b"drove\n")
    open_storage(f"{url}/one").put("log/20260101T000000-7/trainer-rank-0.log", b"one\ntwo\n")
    expected = [("20260101T000000-7/driver.log", ["drove"]), ("one/20260101T000000-7/trainer-rank-0.log", ["two"])]
    assert list(read_logs(url, "", 1)) == expected
    assert list(read_logs(url, "trainer", 1)) == expected[1:]
    text = follow_logs(url, "driver", 1, poll_s=0.0)
    assert next(text) == expected[0]
    storage.put("log/20260101T000000-7/driver.log", b"drove\non\n")
    assert next(text) == ("20260101T000000-7/driver.log", ["on"])


def test_a_relative_private_folder_is_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`attach` reads the address and the keys of a run from it."""
    monkeypatch.chdir(tmp_path)
    config = load_config({**RUN, "checkpoint_root_dir": str(tmp_path), "cluster": {"private_folder": "keys"}})
    storage = open_storage(config.checkpoint_job_dir)
    open_run(storage, config)
    SecretsDir.of(config, storage).write_address("tls://10.0.0.1:8786")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert SecretsDir.of(read_run_config(storage), storage).read_address() == "tls://10.0.0.1:8786"


def test_a_starting_run_counts_as_running(tmp_path: Path) -> None:
    storage = open_storage(begun(tmp_path))
    note_end(storage, "failed", "of an earlier start")
    note_begin(storage)
    assert (why_not_running(storage, ()), read_end(storage)) == ("", None)
    end = json.loads(storage.get(END_FILE))
    storage.put(END_FILE, json.dumps({**end, "started_s": 1.0}).encode())  # another process has its number now
    assert why_not_running(storage, ()) == "it was killed and recorded no end"


def test_a_running_stage_means_a_running_run(tmp_path: Path) -> None:
    storage = open_storage(begun(tmp_path, stages=[{"stage_name": "one"}, {"stage_name": "two"}]))
    assert why_not_running(storage, ()) == "it was killed and recorded no end"
    with Lease(open_storage(tmp_path / "two"), "explorer"):
        assert why_not_running(storage, (JobStatus("controller", "controller", "7", "RUNNING", True),)) == ""


def test_followed_logs_yield_the_tail_and_then_whole_lines(tmp_path: Path) -> None:
    (begun(tmp_path) / "log").mkdir()
    trainer, driver = tmp_path / "log" / "trainer-0-12.log", tmp_path / "log" / "driver.log"
    trainer.write_text("one\ntwo\nthree\nhal")
    text = follow_logs(str(tmp_path), "", 2, poll_s=0.0)
    assert next(text) == ("trainer-0-12.log", ["two", "three"])
    with trainer.open("a") as log:
        log.write("f\nfive\n")
    assert next(text) == ("trainer-0-12.log", ["half", "five"])
    driver.write_text("drove\n")  # a new one
    assert next(text) == ("driver.log", ["drove"])
    trainer.write_text("six\n")  # the log was set aside
    assert next(text) == ("trainer-0-12.log", ["six"])


def test_json_status_lists_jobs_before_the_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no batch system, whatever this machine has
    write_jobs(open_storage(tmp_path), [JobRecord("controller", "controller", "7", "pbs", 1.0)], SUBMITTED_FILE)
    text = json.loads(CliRunner().invoke(app, ["status", str(tmp_path), "--json"]).output)
    job = {"role": "controller", "name": "controller", "job_id": "7", "state": "not asked", "is_alive": False}
    assert text == {"jobs": [job], "why": "it never began: job 7 (controller): not asked", "usage": None, "stages": []}


@pytest.mark.slow
def test_join_times_out_without_a_run(tmp_path: Path) -> None:
    tree = {"model": {"model_path": "m", "max_model_len": 64}, "checkpoint_root_dir": str(tmp_path)}
    tree["buffer"] = {"explorer_input": {"taskset": {"path": "t.jsonl"}}}
    config = load_config({**tree, "cluster": {"type": "joined", "tls": False}})
    folder = SecretsDir(tmp_path / "private")
    assert join(config, folder, "explorer", 0.1) == 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"nonsense://127.0.0.1:{server.getsockname()[1]}"
        folder.write_address(address)  # a scheduler that nobody can speak with, and that did not take its address back
        with pytest.raises(RoleError, match=r"3 workers explorer-\S+ in a row ended with an error"):
            join(config, folder, "explorer", 1.0)
    assert join(config, folder, "explorer", 0.1) == 0, "no worker knocks at an address where nobody listens any more"
