"""Errors that a user can fix are reported before anything runs. Promises, for every case:

- exit code 2, and a message with the key, the value and what to do;
- nothing is explored or trained.
"""

import json
from pathlib import Path

import pytest

from tests.integration.run_cases import call_cli, num_shards, num_steps, run_folder, write_config

TASKSET = "buffer.explorer_input.taskset"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def refused(config: Path, *overrides: str) -> str:
    """Return the error message of a run that must not start."""
    ended = call_cli("run", str(config), *overrides)
    assert ended.code == 2, ended
    assert ended.err.startswith("error: ") and "Traceback" not in ended.err
    assert num_shards(run_folder(config)) == num_steps(run_folder(config)) == 0
    return ended.err


def test_a_missing_taskset_file(config: Path) -> None:
    assert "no-such.jsonl" in refused(config, f"{TASKSET}.path={config.parent}/no-such.jsonl")


def test_an_empty_taskset(config: Path) -> None:
    (config.parent / "empty.jsonl").write_text("")
    message = refused(config, f"{TASKSET}.path={config.parent}/empty.jsonl")
    assert "empty.jsonl" in message and "empty" in message.replace("empty.jsonl", "")


def test_a_taskset_that_is_not_json(config: Path) -> None:
    (config.parent / "torn.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n{"question": "1+')
    assert "torn.jsonl" in refused(config, f"{TASKSET}.path={config.parent}/torn.jsonl")


@pytest.mark.parametrize("key", ["prompt_key", "response_key"])
def test_a_column_that_is_not_there_is_named_with_those_that_are(config: Path, key: str) -> None:
    message = refused(config, f"{TASKSET}.format.{key}=questions")
    assert f"format.{key}" in message and "'questions'" in message
    assert "columns: question, answer" in message


def test_an_unknown_reward_error_lists_the_known_rewards(config: Path) -> None:
    message = refused(config, "buffer.explorer_input.default_reward_fn_type=acuracy_reward")
    assert "acuracy_reward" in message and "accuracy_reward" in message


def test_a_model_folder_that_is_missing_or_has_no_tokenizer(config: Path) -> None:
    engines = ("explorer.rollout_model.engine_type=transformers", "trainer.trainer_type=torch")
    assert "does not exist" in refused(config, f"model.model_path={config.parent}/no-model", *engines)
    model = config.parent / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (model / "model.safetensors").write_bytes(b"")
    assert "has no tokenizer" in refused(config, f"model.model_path={model}", *engines)


def test_a_root_below_a_file_cannot_be_written(config: Path) -> None:
    message = refused(config, f"checkpoint_root_dir={config}/runs")
    assert "checkpoint_root_dir" in message and str(config) in message


def test_batch_sizes_that_do_not_fit_repeat_times(config: Path) -> None:
    message = refused(config, "buffer.train_batch_size=7")
    assert "buffer.train_batch_size: 7 is not a multiple of algorithm.repeat_times 2" in message


def test_a_batch_larger_than_all_tasks_there_are(config: Path) -> None:
    message = refused(config, "buffer.batch_size=64", "buffer.total_epochs=1")
    assert "buffer.batch_size 64 exceeds the 16 tasks of all epochs" in message


def test_all_mistakes_are_reported_at_once(config: Path) -> None:
    message = refused(config, "buffer.bach_size=7", "trainer.total_steps=none", "mode=boht")
    for wrong, right in (("bach_size", "batch_size"), ("trainer.total_steps", "none"), ("boht", "both")):
        assert wrong in message and right in message


def test_a_folder_that_is_not_a_run(config: Path) -> None:
    for command in ("status", "report"):
        ended = call_cli(command, str(config.parent))
        assert ended.code == 2 and "is not a run folder" in ended.err
