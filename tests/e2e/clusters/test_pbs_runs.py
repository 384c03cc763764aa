"""A run on PBS, whose commands are stand-ins with the same formats (tests/integration/fake_pbs.py)."""

import functools
import getpass
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from rftdask.cluster.jobqueue import PbsCluster
from rftdask.cluster.jobs import read_jobs
from rftdask.storage import open_storage
from tests import living
from tests.integration import fake_pbs
from tests.integration.run_cases import assert_sound, call_cli, num_steps, write_config

DEADLINE_S = 300.0


wait_until = functools.partial(living.wait_until, deadline_s=DEADLINE_S, every_s=0.2)


@pytest.mark.long
def test_a_run_on_pbs_continues_job_by_job_until_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = tmp_path / "bin"
    spool = fake_pbs.install(commands)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("USER", getpass.getuser())
    tree = yaml.safe_load(write_config(tmp_path).read_text())
    tree.update(name="demo")
    tree["trainer"]["total_steps"] = tree["buffer"]["total_epochs"] = 100_000
    prologue = [f"export PYTHONPATH={Path.cwd()} OMP_NUM_THREADS=1"]
    controller = {"walltime": "01:00:00", "queue": "small"}
    tree["cluster"] = {
        "type": "pbs",
        "interface": "lo",
        "options": {"cores": 1, "memory": "1GB", "job_script_prologue": prologue, "controller": controller},
    }
    config, folder = tmp_path / "run.yaml", tmp_path / "runs" / "rftdask" / "demo"
    config.write_text(yaml.safe_dump(tree))

    def ids(role: str) -> list[str]:
        return [job.job_id for job in read_jobs(open_storage(folder)) if job.role == role]

    def log() -> str:
        return "\n".join(path.read_text() for path in (folder / "log").rglob("*") if path.is_file())

    try:
        submitted = call_cli("submit", str(config))
        assert submitted.code == 0 and "submitted controller as job 100" in submitted.out, submitted
        refused = call_cli("submit", str(config))
        assert refused.code == 2 and "is submitted already: controller is job 100, RUNNING" in refused.err, refused
        wait_until(lambda: num_steps(folder) >= 2, f"two steps: {log()}")
        assert "job 100      controller     RUNNING" in call_cli("status", str(folder)).out
        workers = {*ids("trainer"), *ids("explorer")}
        assert len(workers) == 2
        # The process does this itself near its walltime.
        os.kill(json.loads((spool / "100.json").read_text())["pid"], signal.SIGUSR1)
        wait_until(lambda: ids("controller") not in ([], ["100"]), "the next controller")
        steps = num_steps(folder)
        wait_until(lambda: num_steps(folder) >= steps + 2, "steps of the second life")
        assert {*ids("trainer"), *ids("explorer")} == workers and log().count("taking over job") == 2, log()
        ended = call_cli("cancel", str(folder))
        assert ended.code == 0 and "writes a checkpoint and ends" in ended.out, ended
        assert PbsCluster.states([str(number) for number in range(100, 110)]) == {}
        assert assert_sound(folder)["checkpoint"] >= steps
    finally:
        for number in range(100, 110):
            subprocess.run(["qdel", str(number)], capture_output=True, check=False)
