"""Promise: the given folder is the run. A run with stages is reported correctly while it works, ended from outside, and
read in place, from any working directory, by a relative path, moved or copied.
"""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from rftdask import Experiment
from rftdask.errors import UserError
from tests.integration.run_cases import RunProcess, call_cli, num_steps, run_folder, write_config

STAGES = [
    {"stage_name": "look", "mode": "explore", "buffer": {"total_steps": 2}},
    {"stage_name": "learn", "mode": "both", "trainer": {"total_steps": 9000}, "buffer": {"total_epochs": 10000}},
]


@pytest.fixture(scope="module")
def cancelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with stages that was inspected while it worked and cancelled in its second stage."""
    config = write_config(tmp_path_factory.mktemp("begun"))
    tree = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**tree, "stages": STAGES}))
    folder, elsewhere = run_folder(config), tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "link").symlink_to(folder)
    with RunProcess("run", str(config), "--progress", "plain") as run, pytest.MonkeyPatch.context() as patch:
        patch.chdir(elsewhere)
        run.wait_until(lambda: (folder / "control" / "END.json").exists())
        starting = json.loads(call_cli("status", "link", "--json").out)
        assert starting["why"] == "", "its cluster starts"
        run.wait_until(lambda: num_steps(folder / "learn") >= 3)
        working = json.loads(call_cli("status", "link", "--json").out)
        assert working["why"] == ""
        assert [stage["state"] for stage in working["stages"]] == ["not running", "running"]
        logs = call_cli("logs", "link", "-n", "1").out
        assert "==> driver.log <==" in logs and "==> learn/trainer-rank-0.log <==" in logs, logs
        ended = call_cli("cancel", "link")
        assert (ended.code, ended.err) == (0, ""), ended
        assert f"process {run.process.pid} writes a checkpoint and ends" in ended.out
        last = run.end(code=130)
    assert call_cli("cancel", str(folder)).out == f"no process works on {folder}\n"
    status = json.loads(call_cli("status", str(folder), "--json").out)
    assert status["why"] == "stopped" and status["stages"][1]["checkpoint"] == num_steps(folder / "learn")
    ends = [json.loads(call_cli("status", str(folder / stage), "--json").out)["why"] for stage in ("look", "learn")]
    assert ends == ["finished", "stopped"], "the folder of a stage has its own end"
    # Terminal output: each path is on a line of its own and exists.
    lines = last.out.split(f"Files are in {folder}\n")[1].split("\n\n")
    files = [line.split()[0] for line in lines[0].splitlines()]
    assert "learn/experiences/" in files and "look/experiences/" in files
    assert all((folder / file).exists() for file in files), files
    commands = [line.strip() for line in lines[1].splitlines() if str(folder) in line]
    assert [command.split()[-2:] for command in commands] == [["status", str(folder)], ["report", str(folder)]]
    return folder


@pytest.mark.slow
def test_every_reader_reads_a_run_that_moved(cancelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Path(shutil.copytree(cancelled, tmp_path / "copy"))
    hidden = cancelled.rename(cancelled.with_name("hidden"))
    try:
        monkeypatch.chdir(tmp_path)
        stages = json.loads(call_cli("status", "copy", "--json").out)["stages"]
        assert [stage["folder"] for stage in stages] == [f"{copy}/look", f"{copy}/learn"]
        assert stages[1]["experiences"]["trained"] > 0 and stages[1]["problems"] == []
        assert call_cli("report", "copy").out == f"{copy}/report.html\n"
        opened = Experiment.open("copy")
        assert opened.url == str(copy)
        assert len(opened.experiences()) == stages[1]["experiences"]["committed"]
        assert {"look", "learn"} == set(opened.metrics().stage)
        with pytest.raises(UserError, match=r"move it to a folder \.\.\./rftdask/fake"):
            opened.run()
        assert call_cli("experiences", "copy").code == call_cli("compact", "copy").code == 0
        assert not cancelled.exists(), "nothing was written where the run began"
    finally:
        hidden.rename(cancelled)


@pytest.mark.slow
def test_a_damaged_copy_is_damaged_and_its_original_is_not(cancelled: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(cancelled, tmp_path / "copy"))
    (copy / "learn" / "ledger" / "main" / "00000002.json").unlink()
    damaged = call_cli("status", str(copy))
    assert damaged.code == 1 and f"{copy}/learn" in damaged.out and "00000002.json is missing" in damaged.out
    assert call_cli("status", str(cancelled)).code == 0


@pytest.mark.slow
def test_a_moved_run_that_keeps_its_name_is_opened_to_continue(cancelled: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(cancelled, tmp_path / "rftdask" / "fake"))
    opened = Experiment.open(moved)
    assert (opened.url, opened.config.checkpoint_job_dir) == (str(moved), str(moved))
