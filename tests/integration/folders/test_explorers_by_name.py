"""Explorers with different names on one run, each a command with its own cluster. Promises:

- they share the work units: each completes some, and without a death none is completed twice;
- killing one with signal 9 costs only time: the other takes over its units and finishes, and a trainer, during the run
  or afterwards, trains everything once;
- a second explorer of the same name is refused before anything starts. tests/unit/run/test_run_folder.py tests other
  conflicts.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from rftdask.buffer.log.shard import ShardName, repeated_shards
from rftdask.storage import open_storage
from tests.integration import run_cases as runs

STEPS = 16
SETTINGS = (
    f"buffer.total_steps={STEPS}",
    "trainer.total_steps=null",
    "synchronizer.sync_style=fully_async",
    "synchronizer.max_staleness=100",
    "explorer.max_commit_delay_s=null",
    "buffer.explorer_input.default_workflow_type=tests.integration.roles.slow_workflow.slow",
)


def explore(config: Path, name: str) -> runs.RunProcess:
    return runs.RunProcess(*command(config, "explore", f"explorer.name={name}"))


def command(config: Path, mode: str, *settings: str) -> tuple[str, ...]:
    return "run", str(config), *SETTINGS, f"mode={mode}", *settings, "--progress", "plain"


def shards(folder: Path) -> list[ShardName]:
    names = map(ShardName.try_parse, (path.name for path in folder.glob("experiences/0*/*.parquet")))
    return [name for name in names if name is not None]


def assert_all_is_trained_once(folder: Path) -> None:
    counts = runs.assert_sound(folder)["experiences"]
    assert counts["trained"] == STEPS * runs.BATCH_SIZE * runs.REPEAT_TIMES, counts
    assert counts["waiting"] == 0, counts


def num_rows_by_explorer(folder: Path) -> Counter[str]:
    lines = [line for path in folder.glob("metrics/explorer/*.jsonl") for line in path.read_text().splitlines()]
    return Counter(json.loads(line)["explorer"] for line in lines)


@pytest.mark.slow
def test_two_explorers_share_a_run_and_one_is_killed(config: Path, folder: Path) -> None:
    with (
        explore(config, "a") as first,
        explore(config, "b") as second,
        runs.RunProcess(*command(config, "train")) as trainer,
    ):
        first.wait_until(lambda: len(num_rows_by_explorer(folder)) == 2)
        for explorer in (first, second):
            explorer.pause()  # so that they work for as long as the next command takes
        again = runs.call_cli(*command(config, "explore", "explorer.name=b"))
        for explorer in (first, second):
            explorer.resume()
        assert again.code == 2
        assert "explorer.b is process" in again.err
        assert "give this command another explorer.name" in again.err
        assert runs.num_shards(folder) < 2 * STEPS, "the explorers had already finished"
        first.kill()
        ended = second.end()
        assert ended.code == 0, ended
        trained = trainer.end()
        assert trained.code == 0, trained
    assert_all_is_trained_once(folder)
    assert open_storage(folder).list("control/claims") == []


@pytest.mark.slow
def test_two_explorers_share_units_and_a_trainer_gets_all(config: Path, folder: Path) -> None:
    with explore(config, "a") as first, explore(config, "b") as second:
        for explorer in (first, second):
            ended = explorer.end()
            assert ended.code == 0, ended
    made = shards(folder)
    assert num_rows_by_explorer(folder).keys() == {"a", "b"}
    assert {(name.explore_step, name.unit) for name in made} == {(s, u) for s in range(1, STEPS + 1) for u in (0, 1)}
    assert repeated_shards(made) == [], "a unit was made twice"
    assert runs.call_cli(*command(config, "train")).code == 0
    assert_all_is_trained_once(folder)
