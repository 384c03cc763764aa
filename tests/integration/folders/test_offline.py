"""Exploring and training as two commands over one run folder."""

import json
from collections import Counter
from pathlib import Path

import pytest

from rftdask.buffer.log.shard import ShardName, repeated_shards
from rftdask.monitor.metrics import read_metrics
from rftdask.storage import open_storage
from tests.integration import run_cases as runs

STEPS = 12
SETTINGS = (
    f"buffer.total_steps={STEPS}",
    "trainer.total_steps=null",
    "trainer.save_interval=5",
    "synchronizer.sync_style=fully_async",
    "buffer.explorer_input.eval_tasksets=[]",
)


@pytest.fixture(scope="module")
def batch_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a run that was explored first and trained afterwards."""
    config = runs.write_config(tmp_path_factory.mktemp("offline"))
    runs.finish(config, *SETTINGS, "mode=explore")
    status = runs.assert_sound(runs.run_folder(config))
    assert status["sealed"] and status["explore_step"] == STEPS
    assert status["experiences"]["waiting"] == status["experiences"]["committed"] > 0
    runs.finish(config, *SETTINGS, "mode=train")
    return config


@pytest.mark.slow
def test_training_after_exploring_uses_everything(batch_run: Path) -> None:
    status = runs.assert_sound(runs.run_folder(batch_run))
    assert status["step"] == status["checkpoint"] == STEPS
    assert status["experiences"]["trained"] == status["experiences"]["committed"]


@pytest.mark.slow
def test_training_during_exploration_ends_with_the_log(config: Path, folder: Path, batch_run: Path) -> None:
    with runs.RunProcess("run", str(config), *SETTINGS, "mode=train") as trainer:
        trainer.wait_until(
            lambda: (folder / "log" / "trainer-rank-0.log").exists()
        )  # the trainer waits for experiences
        with runs.RunProcess("run", str(config), *SETTINGS, "mode=explore") as explorer:
            explorer.end(code=0)  # otherwise the trainer would wait for another explorer
            trainer.end(code=0)
    status = runs.assert_sound(folder)
    assert status["step"] == STEPS and status["experiences"]["waiting"] == 0
    committed = runs.assert_sound(runs.run_folder(batch_run))["experiences"]["committed"]
    assert status["experiences"]["committed"] == committed  # a slow machine commits a batch in more parts


@pytest.mark.slow
def test_stopping_the_explorer_does_not_stop_another_trainer(config: Path, folder: Path) -> None:
    settings = (*SETTINGS[1:], "buffer.total_steps=2000")
    with runs.RunProcess("run", str(config), *settings, "mode=explore") as explorer:
        explorer.wait_until(lambda: runs.num_shards(folder) > 0)
        with runs.RunProcess("run", str(config), *settings, "mode=train") as trainer:
            trainer.wait_until(lambda: runs.num_steps(folder) >= 1)
            explorer.interrupt()
            explorer.end(code=130)
            assert trainer.process.poll() is None
            assert not (folder / "control" / "STOP").exists()
            trainer.interrupt()
            trainer.end(code=130)
    runs.assert_sound(folder)


@pytest.mark.slow
def test_bench_evaluates_initial_weights_and_all_checkpoints(batch_run: Path) -> None:
    held_out = runs.run_folder(batch_run).parents[2] / "held_out.jsonl"
    columns = "format: {prompt_type: raw, prompt_key: question, response_key: answer}"
    held_out_taskset = f"{{name: held_out, path: {held_out}, repeat_times: 2, {columns}}}"
    again = f"{{name: again, path: {held_out}, {columns}}}"
    taskset = f"buffer.explorer_input.eval_tasksets=[{held_out_taskset}, {again}]"
    runs.finish(batch_run, *SETTINGS[:-1], taskset, "mode=bench")
    told_of = read_metrics(open_storage(runs.run_folder(batch_run)), "eval").sort_values("step")
    evals = told_of[told_of["taskset"] == "held_out"]
    assert evals["step"].tolist() == told_of[told_of["taskset"] == "again"]["step"].tolist() == [0, 5, 10, STEPS]
    assert set(evals["num_rollouts"]) == {2 * runs.NUM_EVAL_TASKS}
    metrics = {f"bench/{name}@2" for name in ("reward/mean", "reward/std", "accuracy/best", "accuracy/worst")}
    assert {"bench/accuracy", *metrics} <= set(evals)


NAMED_STEPS = 16
NAMED = (
    f"buffer.total_steps={NAMED_STEPS}",
    "trainer.total_steps=null",
    "synchronizer.sync_style=fully_async",
    "synchronizer.max_staleness=100",
    "explorer.max_commit_delay_s=null",
    "buffer.explorer_input.default_workflow_type=tests.integration.roles.slow_workflow.slow",
)


def explore(config: Path, name: str) -> runs.RunProcess:
    return runs.RunProcess(*command(config, "explore", f"explorer.name={name}"))


def command(config: Path, mode: str, *settings: str) -> tuple[str, ...]:
    return "run", str(config), *NAMED, f"mode={mode}", *settings, "--progress", "plain"


def shards(folder: Path) -> list[ShardName]:
    names = map(ShardName.try_parse, (path.name for path in folder.glob("experiences/0*/*.parquet")))
    return [name for name in names if name is not None]


def assert_all_is_trained_once(folder: Path) -> None:
    counts = runs.assert_sound(folder)["experiences"]
    assert counts["trained"] == NAMED_STEPS * runs.BATCH_SIZE * runs.REPEAT_TIMES, counts
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
        assert runs.num_shards(folder) < 2 * NAMED_STEPS, "the explorers had already finished"
        first.kill()
        second.end(code=0)
        trainer.end(code=0)
    assert_all_is_trained_once(folder)
    assert open_storage(folder).list("control/claims") == []


@pytest.mark.slow
def test_two_explorers_share_units_and_a_trainer_gets_all(config: Path, folder: Path) -> None:
    with explore(config, "a") as first, explore(config, "b") as second:
        for explorer in (first, second):
            explorer.end(code=0)
    made = shards(folder)
    assert num_rows_by_explorer(folder).keys() == {"a", "b"}
    assert {(name.explore_step, name.unit) for name in made} == {
        (s, u) for s in range(1, NAMED_STEPS + 1) for u in (0, 1)
    }
    assert repeated_shards(made) == [], "a unit was made twice"
    assert runs.call_cli(*command(config, "train")).code == 0
    assert_all_is_trained_once(folder)
