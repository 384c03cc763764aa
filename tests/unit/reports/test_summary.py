"""Summary. Promise: it shows the result, its standard error and the changes in any terminal."""

import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from rftdask.reports.summary import (
    Change,
    RunSummary,
    SampleAnswer,
    StageSummary,
    learned,
    next_commands,
    print_summary,
    render_summary,
    shorten,
)

SUMMARY = RunSummary(
    run_name="countdown",
    run_url="/scratch/runs/demo/countdown",
    status="finished",
    mode="both",
    started_at_s=1_760_000_000,
    seconds=4321,
    stages=(
        StageSummary("warmup", "train", "sft", 10, 300, 0.1, 0.3),
        StageSummary("rl", "both", "grpo", 50, 4021, 0.3, 0.8),
    ),
    accuracy_before=0.1,
    accuracy_after=0.8,
    num_answers=(40, 80),
    seed=7,
    changes=(Change("warmup", "loss", 2.0, 1.0, 0.1), Change("rl", "reward", 0.25, 0.75, 0.05)),
    samples=tuple(SampleAnswer(f"task {n} <script>", "41", "wrong", 0.0, "<answer>41</answer>", 1.0) for n in range(7)),
    counts={"committed": 1280, "trained": 1200, "waiting": 16, "too stale": 50, "group has no spread": 14},
    versions={"rftdask": "0.1.0"},
    config_yaml="mode: both",
    files={"global_step_50/": "newest checkpoint"},
    next_commands={"rftdask resume": "train on"},
)


def drawn(width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render_summary(SUMMARY))
    return console.export_text()


def test_without_tasks_the_result_is_the_held_out_loss() -> None:
    stages = (StageSummary("warmup", "train", "sft", 10, 300, eval_losses=(2.5, 0.25)),)
    summary = replace(SUMMARY, stages=stages, accuracy_before=None, accuracy_after=None)
    assert learned(summary) == "held-out loss of warmup 2.5 -> 0.25"


def test_the_terminal_summary_has_result_and_next_commands():
    text = drawn(100)
    result = "accuracy 10.0% -> 80.0% (+70.0 points, 40 and 80 answers, seed 7 only)"
    assert f"countdown finished after 1:12:01\n{result}" in text
    assert re.search(r"rl +both +grpo +50 +1:07:01 +30.0% +80.0%", text)
    assert "task 4 <script>" in text and "task 5" not in text  # five of seven
    assert "1,280 committed = 1,200 trained, 50 dropped (too stale), 14 dropped" in text
    assert "Files are in /scratch/runs/demo/countdown" in text
    assert "\n  # train on\n  rftdask resume" in text


def test_paths_and_commands_are_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    folder = "/scratch/" + "long/" * 30
    commands = {f"/opt/env/bin/rftdask status {folder}": "where it stands"}
    print_summary(replace(SUMMARY, run_url=folder, next_commands=commands, files={f"{folder}run.json": "settings"}))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert f"Files are in {folder}" in lines and f"  /opt/env/bin/rftdask status {folder}" in lines
    assert f"  {folder}run.json  settings" in lines


def test_next_commands_use_the_current_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rftdask", "tensorboard"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert list(next_commands("tensorboard", "/runs/my run")) == [
        f"{tmp_path}/rftdask status '/runs/my run'",
        f"{tmp_path}/rftdask report '/runs/my run'",
        f"{tmp_path}/tensorboard --logdir '/runs/my run'",
    ]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert next(iter(next_commands("none", "/run"))) == "rftdask status /run"
    (tmp_path / "rftdask").unlink()
    assert list(next_commands("none", "/run"))[1] == f"{tmp_path}/python -m rftdask report /run"


def test_a_shortened_answer_keeps_its_end():
    assert shorten("a " * 200 + "<answer>7</answer>", 60).endswith("<answer>7</answer>")
    assert len(shorten("x" * 500, 60)) <= 60


def test_the_result_has_its_standard_error():
    sentence = learned(replace(SUMMARY, accuracy_error=0.083))
    assert sentence == "accuracy 10.0% -> 80.0% (+70.0 points, standard error 8.3, 40 and 80 answers, seed 7 only)"
    assert learned(replace(SUMMARY, num_answers=(9, 9), seed=None)).endswith("(+70.0 points, 9 answers each)")


def test_changes_fit_into_80_columns():
    lines = drawn(80).splitlines()
    assert any(re.fullmatch(r" Reward +0.25 +0.75 +0.05 *", line) for line in lines)
    assert not any("Loss" in line for line in lines), "only the last stage is shown"
    assert any(re.search(r"\btask +truth +before +after", line) for line in lines)
    assert max(map(len, lines)) <= 80
