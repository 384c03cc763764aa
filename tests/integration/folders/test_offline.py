"""Exploring and training as two commands over one run folder. Promises:

- `mode=train` trains everything from `mode=explore`, with the same weights whether it starts afterwards or at the same
  time;
- both end without help, with every experience accounted for;
- `mode=bench` then evaluates the initial weights and every checkpoint.
"""

from pathlib import Path

import pytest

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
            explored = explorer.end()
            assert explored.code == 0, explored  # otherwise the trainer would wait for another explorer
            trained = trainer.end()
    assert trained.code == 0, trained
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
            assert explorer.end().code == 130
            assert trainer.process.poll() is None
            assert not (folder / "control" / "STOP").exists()
            trainer.interrupt()
            assert trainer.end().code == 130
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
