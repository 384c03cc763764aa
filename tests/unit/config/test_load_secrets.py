"""What a configuration must not hold, and what it may leave to the environment."""

import json
from typing import Any

import pytest
from config_cases import config, grpo, problems

from rftdask.config import check_plugins, fill_from_environment, load_config, replace
from rftdask.errors import ConfigError

TASKSET = "buffer.explorer_input.taskset"
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{TASKSET}.workflow_args.url", "https://me:hunter2@judge/v1"),
        (f"{TASKSET}.workflow_args.deep[0].header", f"Bearer {TOKEN}"),
        (f"{TASKSET}.reward_fn_args.endpoint", "https://judge/v1?token=hunter2"),
        (f"{TASKSET}.path", "https://bucket/rows.jsonl?X-Amz-Date=1&X-Amz-Signature=hunter2"),
        (f"{TASKSET}.dataset_args.token_of_mine", TOKEN),
        ("monitor.monitor_args.key", "0123456789abcdef"),
        ("explorer.env_vars.ADDRESS", "redis://:hunter2@cache"),
        ("explorer.rollout_model.extra_engine_args.hf_token", "hunter2"),
        ("cluster.slurm.trainer.prologue", ["module load x", "export WANDB_API_KEY=hunter2"]),
        ("cluster.slurm.explorer.directives", [f"--export=HF_TOKEN={TOKEN}"]),
        ("checkpoint_root_dir", "s3://key:hunter2@bucket/runs"),
        ("model.model_path", f"https://user:{TOKEN}@hub/model"),
        ("buffer.trainer_input.experience_buffer.path", "postgresql://me:hunter2@host/db"),
        ("buffer.trainer_input.experience_buffer.path", "postgresql://host/db?user=me&password=hunter2"),
        ("name", TOKEN),
    ],
)
def test_a_secret_is_refused_at_any_key_and_not_shown(key: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_API_KEY", "0123456789abcdef")
    tree = grpo()
    *sections, last = key.replace("[0]", "").split(".")
    node = tree
    for section in sections:
        node = node.setdefault(section, {})
    node[last] = value
    (line,) = problems(tree)
    assert line.startswith(key.split("[")[0]) and "does not belong in a configuration" in line
    assert not any(secret in line for secret in ("hunter2", TOKEN, "0123456789abcdef"))
    # In a stage it is also found, and reported once.
    if sections and sections[0] == "buffer":
        tree["stages"] = [{"stage_name": "rl", "buffer": tree.pop("buffer")}]
        tree["buffer"] = grpo()["buffer"]
        assert any(f"{last}" in line and "does not belong" in line for line in problems(tree))


@pytest.mark.parametrize("url", ["https://judge:8000/v1", "https://judge/a?page=2", "postgresql://me@host/db"])
def test_urls_without_secrets_are_taken(url: str) -> None:
    assert config(grpo(), f"{TASKSET}.workflow_args={{url: '{url}'}}")


def test_arguments_are_filled_in_only_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE", "https://me:hunter2@judge")
    monkeypatch.setenv("ROWS", "tasks.jsonl")
    tree = grpo(
        monitor={"monitor_type": "wandb", "monitor_args": {"notes": ["at ${oc.env:JUDGE}", 3]}},
        explorer={"env_vars": {"OPENAI_API_KEY": "${oc.env:JUDGE}"}},
    )
    arguments = {"api_key": "${oc.env:JUDGE}", "near": "${model.model_path}/x", "plain": "\\${oc.env:NOBODY}"}
    tree["buffer"]["explorer_input"]["taskset"] |= {"path": "${oc.env:ROWS}", "workflow_args": arguments}
    loaded = config(tree)
    check_plugins(replace(loaded, {f"{TASKSET}.workflow_args": {}}))
    for again in (loaded, load_config(loaded.to_dict()), load_config(json.loads(json.dumps(loaded.to_dict())))):
        assert "hunter2" not in json.dumps(again.to_dict()) + again.to_yaml() + repr(again)
        (taskset,) = again.buffer.explorer_input.train_tasksets
        assert taskset.path == "tasks.jsonl"
        assert taskset.workflow_args["api_key"] == "${oc.env:JUDGE}" and taskset.workflow_args["near"] == "tiny/x"
        assert fill_from_environment(taskset.workflow_args["api_key"]) == "https://me:hunter2@judge"
        assert fill_from_environment(again.explorer.env_vars) == {"OPENAI_API_KEY": "https://me:hunter2@judge"}
        filled = fill_from_environment(again.monitor.monitor_args)
        assert filled == {"notes": ("at https://me:hunter2@judge", 3)} and type(filled) is type(
            again.monitor.monitor_args
        )
    assert load_config(loaded.to_dict()) == loaded


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("postgresql://me:${oc.env:SECRET_OF_DB}@host/db", "hunter2"),
        ("${oc.env:SECRET_OF_DB}", "postgresql://host/db?user=me&password=hunter2"),
    ],
)
def test_a_password_may_come_from_the_environment(path: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_DB", value)
    at = "buffer.trainer_input.experience_buffer"
    loaded = config(grpo(), f"{at}.storage_type=sql", f"{at}.path={path}")
    again = load_config(loaded.to_dict())
    for read in (loaded, again, load_config(again.to_dict()), replace(loaded, {"seed": 1})):
        assert read.buffer.trainer_input.experience_buffer.path == path
        assert fill_from_environment(path) == path.replace("${oc.env:SECRET_OF_DB}", value)
        assert "hunter2" not in read.to_yaml() + str(read.to_dict()) + repr(read)


def test_a_password_next_to_another_key_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE", "https://me:hunter2@judge")
    (line,) = problems(grpo(), TASKSET + ".workflow_args.url=${oc.env:JUDGE}/${model.model_path}")
    assert line.startswith(f"{TASKSET}.workflow_args.url: a password in a URL") and "hunter2" not in line
    (line,) = problems(grpo(), "checkpoint_root_dir=${oc.env:JUDGE}")
    assert "leave it in the environment" in line and "hunter2" not in line
    (line,) = problems(grpo(), TASKSET + ".workflow_args.api_key='${oc.env:NOBODY,hunter2hunter2}'")
    assert "hunter2" not in line


def test_an_unset_variable_is_reported_with_its_name_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = f"{TASKSET}.workflow_args.key"
    (line,) = problems(grpo(), key + "=${oc.env:NOT_SET_HERE}")
    assert line.startswith(f"{key}: cannot be resolved") and "NOT_SET_HERE" in line
    monkeypatch.setenv("NOT_SET_HERE", "x")
    loaded = config(grpo(), key + "=${oc.env:NOT_SET_HERE}", f"{TASKSET}.workflow_args.more=[a]")
    monkeypatch.delenv("NOT_SET_HERE")
    again = load_config(loaded.to_dict())  # commands that inspect a run do not need its environment
    with pytest.raises(ConfigError) as caught:
        check_plugins(again)
    (line,) = caught.value.problems
    assert line.startswith(f"{key}: ") and "'NOT_SET_HERE' is not set" in line
    with pytest.raises(ConfigError, match="NOT_SET_HERE"):
        fill_from_environment(again.buffer.explorer_input.train_tasksets[0].workflow_args)


def test_arguments_are_held_against_their_types_as_they_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODE", "high")
    argument = "algorithm.policy_loss_fn_args.clip_range"
    written = problems(grpo(), f"{argument}=high")
    assert problems(grpo(), argument + "=${oc.env:MODE}") == written


def test_a_config_written_by_an_older_start_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = config(grpo()).to_dict()
    tree["buffer"]["explorer_input"]["taskset"]["workflow_args"] = {"url": "https://me:hunter2@judge"}
    with pytest.raises(ConfigError, match="does not belong"):
        load_config(tree)
    assert load_config(tree, was_checked=True)
    with pytest.raises(ConfigError, match="does not belong"):
        replace(config(grpo()), {"name": TOKEN})


def test_a_dashboard_that_others_reach_is_warned_of() -> None:
    assert config(grpo()).cluster.dashboard_address is None, "it has no password"
    for address in ("127.0.0.1:8787", "localhost:8787", "[::1]:8787"):
        assert config(grpo(), f"cluster.dashboard_address='{address}'").warnings == ()
    for address in (":8787", "0.0.0.0:8787", "10.0.0.7:8787"):
        (warning,) = config(grpo(), f"cluster.dashboard_address='{address}'").warnings
        assert "has no password" in warning and address in warning
