"""Promise: a whole run rolls out tasks in the order of its selector."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rftdask.buffer.log.file_log import ParquetLog
from rftdask.storage import open_storage
from tests.integration import run_cases as runs

NUM_TASKS = 16


def write_selector_config(folder: Path, selector: dict[str, Any]) -> Path:
    """Write a `write_config` whose tasks have the columns weak and strong, and the selector."""
    config = runs.write_config(folder, NUM_TASKS)
    tasks = folder / "tasks.jsonl"
    rows = [json.loads(line) for line in tasks.read_text().splitlines()]
    columns = [{"weak": i * 7 % NUM_TASKS / 32, "strong": 0.5 + i * 7 % NUM_TASKS / 32} for i in range(NUM_TASKS)]
    tasks.write_text("".join(json.dumps({**row, **more}) + "\n" for row, more in zip(rows, columns, strict=True)))
    tree = yaml.safe_load(config.read_text())
    tree["buffer"]["explorer_input"]["taskset"]["data_selector"] = selector
    config.write_text(yaml.safe_dump(tree))
    return config


def tasks_of(folder: Path) -> dict[int, list[int]]:
    """Return the rows that each explore step ran, in order."""
    log = ParquetLog(open_storage(folder))
    steps: dict[int, list[int]] = {}
    for name in log.shards():
        steps.setdefault(name.explore_step, []).extend(dict.fromkeys(log.read(name)["task_index"].to_pylist()))
    return steps


def test_easy_to_hard_is_run_from_easy_to_hard_in_each_epoch(tmp_path: Path) -> None:
    config = write_selector_config(tmp_path, {"selector_type": "offline_easy2hard", "feature_keys": ["strong"]})
    ended = runs.finish(config)
    folder = runs.run_folder(config)
    # The fake engine's answers are random, so nothing is learned, which the run reports during and after it.
    line = "all rewards of the last"
    assert ended.out.count(f"note: warning: {line}") == 1 and f"warning: grpo: {line}" in " ".join(ended.out.split())
    assert line in runs.assert_sound(folder)["warnings"][0]
    steps = tasks_of(folder)
    assert len(steps) >= runs.num_steps(folder) == 10
    easy_to_hard = sorted(range(NUM_TASKS), key=lambda i: -(i * 7 % NUM_TASKS))
    for step, tasks in steps.items():
        first = (step - 1) * runs.BATCH_SIZE % NUM_TASKS
        assert tasks == easy_to_hard[first : first + runs.BATCH_SIZE], step


def schedule_of(folder: Path) -> list[Any]:
    """Return the scheduled tasks of each explore step, in order."""
    return [json.loads(path.read_text()) for path in sorted((folder / "schedule").glob("*.json"))]


@pytest.mark.slow
def test_a_learned_order_is_recorded_and_survives_interruption(tmp_path: Path) -> None:
    """Style fixed: which steps a step learns from is a rule, independent of speed."""
    selector = {
        "selector_type": "difficulty_based",
        "feature_keys": ["weak", "strong"],
        "kwargs": {"target_reward": 0.5, "do_sample": True},
    }
    whole = write_selector_config(tmp_path / "whole", selector)
    runs.finish(whole)
    killed = write_selector_config(tmp_path / "killed", selector)
    with runs.RunProcess("run", str(killed), "--progress", "plain") as run:
        run.wait_until(lambda: runs.num_steps(runs.run_folder(killed)) >= 3)
        run.kill()
    before = schedule_of(runs.run_folder(killed))
    runs.finish(killed)

    for config in (whole, killed):
        runs.assert_sound(runs.run_folder(config))
        choices = {choice["step"]: choice for choice in schedule_of(runs.run_folder(config))}
        for step, tasks in tasks_of(runs.run_folder(config)).items():
            assert tasks == [index for _, _, index in choices[step]["tasks"]], step
            assert choices[step]["learned_from"] == max(0, step - 2), "one step off policy"
    after, other = schedule_of(runs.run_folder(killed)), schedule_of(runs.run_folder(whole))
    assert after[: len(before)] == before
    common = min(len(after), len(other))  # how far an explorer is ahead when the trainer ends depends on speed
    assert common >= 10
    assert after[:common] == other[:common]
