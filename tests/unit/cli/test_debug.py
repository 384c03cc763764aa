"""Promises of `rftdask debug`. It saves the results in a run folder and does not change the log of a run."""

import os
import pstats
from pathlib import Path

import pytest

from rftdask.cli.debug import Debugger
from rftdask.config import load_config
from rftdask.errors import DataError, UserError
from rftdask.reports.lineage.tables import RunTables
from tests.integration.run_cases import call_cli, write_config

REWARD = "def judged(response, truth, task):\n    return {value}\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


@pytest.mark.slow
def test_each_round_reads_the_current_reward_file(config: Path, tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()

    def write_reward(value: float | str) -> None:
        # All within one second: Python matches bytecode to a file by its size and time in seconds.
        (plugins / "judges.py").write_text(REWARD.format(value=value))
        os.utime(plugins / "judges.py", (1_700_000_000, 1_700_000_000))

    write_reward(0.25)
    judged = load_config(
        config, [f"explorer.plugin_dirs=[{plugins}]", "buffer.explorer_input.default_reward_fn_type=judges.judged"]
    )
    with Debugger(judged, tmp_path / "debug") as debugger:
        first = debugger.try_task(3, rollouts=2)
        write_reward(0.75)
        second = debugger.try_task(3, rollouts=1)
        write_reward("response.nothing")
        third = debugger.try_task(4, rollouts=1)
    assert "3+1=" in first
    assert "0.25" in first
    assert "0.75" not in first
    assert "0.75" in second
    assert "AttributeError" in third, "the first error is reported"
    rows = RunTables(tmp_path / "debug").table("experiences").to_pylist()
    assert sorted(row["uid"] for row in rows) == [
        "taskset_0/0/3/0/0",
        "taskset_0/0/3/1/0",
        "taskset_0/1/3/0/0",
        "taskset_0/2/4/0/0",
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_second_debugger_continues_the_folder(config: Path, tmp_path: Path) -> None:
    for number in range(2):
        with Debugger(load_config(config, []), tmp_path / "debug", taskset="held_out") as debugger:
            assert f"held_out/{number}/0/0/0" in debugger.try_task(0, rollouts=1)
            with pytest.raises(DataError, match="no row 3; choose a row from 0 to 2"):
                debugger.try_task(3, rollouts=1)


def test_debug_without_a_terminal_ends_after_one_round(config: Path, tmp_path: Path) -> None:
    page, profile = tmp_path / "page.html", tmp_path / "profile"
    files = ("--html", str(page), "--profile", str(profile))
    ended = call_cli("debug", str(config), "--task", "2", "--folder", str(tmp_path / "debug"), *files)
    assert ended.code == 0, ended
    assert "taskset_0/0/2/0/0" in page.read_text()
    assert f"profile in {profile}, the slowest functions:" in ended.out and "cumtime" in ended.out
    names = [name for _, _, name in pstats.Stats(str(profile)).stats]  # type: ignore[attr-defined]
    assert "_roll_out" in names and any("simple_workflow" in name for name in names)
    assert "2+1=" in ended.out
    assert f"rftdask view {tmp_path / 'debug'}" in ended.err
    assert call_cli("trace", str(tmp_path / "debug"), "taskset_0/0/2/0/0").code == 0


def test_debug_rejects_train_mode_and_unknown_tasksets(config: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="taskset 'mine' does not exist; choose one of taskset_0, held_out"):
        Debugger(load_config(config, []), tmp_path / "debug", taskset="mine")
    ended = call_cli("debug", str(config), "--folder", "s3://bucket/debug")
    assert (ended.code, "give a folder on this machine" in ended.err) == (2, True)
    only_trains = load_config(config, ["mode=train"])
    with pytest.raises(UserError, match="mode train has no explorer"):
        Debugger(only_trains, tmp_path / "debug")
