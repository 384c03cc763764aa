"""Promises of `rftdask sweep`: every combination is a separate run, and table and chart show its state."""

import contextlib
import csv
from pathlib import Path

import pytest

from rftdask.cli.sweep import Outcome, plan_sweep, render_table, values_of
from rftdask.errors import ConfigError, UserError
from tests.integration.run_cases import RunProcess, assert_sound, call_cli, num_steps, write_config


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-6,2e-6", ["1e-6", "2e-6"]),
        ("0..2", ["0", "1", "2"]),
        ("-1..1", ["-1", "0", "1"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("{a: 1, b: 2}", ["{a: 1, b: 2}"]),
        ("'a,b','c'", ["'a,b'", "'c'"]),
        ("one", ["one"]),
        ("s3://b/a..b", ["s3://b/a..b"]),
    ],
)
def test_values_of_an_axis(text: str, values: list[str]) -> None:
    assert values_of(text) == values


def test_every_combination_is_a_run_in_its_own_folder(tmp_path: Path) -> None:
    path = str(write_config(tmp_path))
    points = plan_sweep(path, ["algorithm.optimizer.lr=1e-6,2e-6", "seed=0..2", "trainer.total_steps=4"])
    assert [point.config.name for point in points][:2] == ["lr-1e-6_seed-0", "lr-1e-6_seed-1"]
    folders = {point.config.checkpoint_job_dir for point in points}
    assert len(points) == len(folders) == 6
    assert {Path(folder).parent for folder in folders} == {tmp_path / "runs" / "rftdask" / "fake"}
    printed = {(p.config.algorithm.optimizer.lr, p.config.seed, p.config.trainer.total_steps) for p in points}
    assert printed == {(lr, seed, 4) for lr in (1e-6, 2e-6) for seed in range(3)}


@pytest.mark.parametrize(
    ("settings", "printed"),
    [
        (["seed=1"], "no key has several values"),
        (["seed=0..2000"], "2001 runs"),
        (["algorithm.repeat_times=2, 2"], "share the folder repeat_times-2"),
        (["seed=0..1", "continue_from_checkpoint=false"], "continue_from_checkpoint: false: a sweep continues"),
    ],
)
def test_invalid_sweeps_are_rejected(tmp_path: Path, settings: list[str], printed: str) -> None:
    with pytest.raises(UserError, match=printed):
        plan_sweep(str(write_config(tmp_path)), settings)


def test_a_mistake_in_one_run_stops_the_sweep_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="repeat_times"):
        plan_sweep(str(write_config(tmp_path)), ["algorithm.repeat_times=2,none_of_it"])
    assert not (tmp_path / "runs").exists()


def test_the_table_has_a_line_per_run_and_per_arm(tmp_path: Path) -> None:
    points = plan_sweep(str(write_config(tmp_path)), ["algorithm.optimizer.lr=1e-6,2e-6", "seed=0..1"])
    outcomes = [
        Outcome(point, "finished", step=4, reward=reward, last_accuracy=reward / 2, first_accuracy=0.0)
        for point, reward in zip(points, (0.25, 0.75, 1.0, 1.0), strict=True)
    ]
    lines = render_table(outcomes).splitlines()
    assert lines[1].split() == ["lr-1e-6_seed-0", "finished", "4", "0.250", "0.000", "->", "0.125"]
    assert lines[-2].split() == ["lr=1e-6", "2", "runs", "0.500", "+-", "0.354", "0.250", "+-", "0.177"]
    assert lines[-1].split()[:4] == ["lr=2e-6", "2", "runs", "1.000"]


@pytest.mark.slow
def test_a_sweep_runs_continues_and_reports(tmp_path: Path) -> None:
    sweep = ("sweep", str(write_config(tmp_path)), "seed=0..1", "trainer.total_steps=2")
    before = call_cli(*sweep, "--table")
    assert before.code == 0 and before.out.count("not started") == 2
    ended = call_cli(*sweep, "--at-most", "2")
    assert ended.code == 0 and ended.out.count("finished") == 2, ended
    folder = tmp_path / "runs" / "rftdask" / "fake"
    rows = list(csv.DictReader((folder / "sweep.csv").read_text().splitlines()))
    assert [(row["seed"], row["state"], row["step"]) for row in rows] == [
        ("0", "finished", "2"),
        ("1", "finished", "2"),
    ]
    assert (folder / "sweep.svg").read_text().count("<path") > 2
    again = call_cli(*sweep)
    assert again.code == 0 and "begins" not in again.err, "finished runs are kept"


@pytest.mark.slow
def test_a_killed_sweep_is_continued_by_the_same_command(tmp_path: Path) -> None:
    """A run ends with a killed sweep; the next sweep waits for that and continues the run."""
    settings = ("trainer.total_steps=100", "synchronizer.sync_offset=0", "explorer.eval_interval=1000")
    sweep = ("sweep", str(write_config(tmp_path)), "seed=0..1", *settings)
    folders = [tmp_path / "runs" / "rftdask" / "fake" / f"seed-{seed}" for seed in range(2)]
    with contextlib.ExitStack() as ends:
        for folder, step in zip(folders, (3, 4), strict=True):
            killed = ends.enter_context(RunProcess(*sweep))
            killed.wait_until(lambda folder=folder, step=step: num_steps(folder) >= step)  # type: ignore[misc]
            killed.process.kill()
        ended = ends.enter_context(RunProcess(*sweep)).end(code=0)
    assert ended.out.count("finished") == 2, ended
    for folder in folders:
        assert assert_sound(folder)["step"] == 100
