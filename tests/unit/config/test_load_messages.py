"""Problems and warnings of settings, word for word (load_messages.yaml); all mistakes are reported at once."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from config_cases import config, grpo, problems, sft

from rftdask.config import load_config
from rftdask.errors import ConfigError

MESSAGES = yaml.safe_load(Path(__file__).with_name("load_messages.yaml").read_text())
CASES = [pytest.param(case, id=f"{promise} {n}") for promise, cases in MESSAGES.items() for n, case in enumerate(cases)]


def listed(value: str | list[str]) -> list[str]:
    return value if isinstance(value, list) else [value]


@pytest.mark.parametrize("case", CASES)
def test_a_setting_has_these_problems_or_warnings(case: dict[str, Any]) -> None:
    tree, overrides = (grpo(), case["grpo"]) if "grpo" in case else (sft(), case["sft"])
    if "problems" in case:
        assert problems(tree, *listed(overrides)) == listed(case["problems"])
    else:
        assert config(tree, *listed(overrides)).warnings == tuple(listed(case["warnings"]))


def test_all_mistakes_are_reported_at_once_sorted_by_path() -> None:
    source = {
        "mode": "bth",
        "name": "../elsewhere",
        "algorithm": {"repeat_time": 4, "lr": 3, "optimizer": {"lr": -1, "betas": [0.9]}},
        "model": {
            "max_model_len": 64,
            "max_prompt_tokens": 50,
            "max_response_tokens": 30,
            "top_p": 1.5,
            "temperature": True,
        },
        "buffer": {"batch_size": 2.5, "explorer_input": {"taskset": {"path": "t.jsonl"}}},
        "trainer": {"grad_clip": "much", "num_ranks": 2, "trainer_strategy": "single"},
        "explorers": {},
    }
    assert problems(source) == [
        "algorithm.lr: unknown key; lr is a key of algorithm.optimizer, trainer.critic",
        "algorithm.optimizer.betas: the list is too short",
        "algorithm.optimizer.lr: -1 is too small; it must be at least 0",
        "algorithm.repeat_time: unknown key; did you mean repeat_times?",
        "buffer.batch_size: 2.5 is not a whole number",
        "explorers: unknown key; did you mean explorer?",
        "mode: 'bth' is not one of both, explore, train, bench, serve, colocate; did you mean both?",
        "model.max_model_len: max_prompt_tokens 50 + max_response_tokens 30 = 80 exceeds max_model_len 64; "
        "lower one of them or raise max_model_len",
        "model.model_path: required, and not given",
        "model.temperature: true is not a number",
        "model.top_p: 1.5 is too large; it must be at most 1",
        "name: '../elsewhere' is not a folder name, or folder names joined by /",
        "trainer.grad_clip: 'much' is not a number",
        "trainer.num_ranks: 2 ranks cannot share a model by trainer_strategy single; use ddp or fsdp2",
    ]


def test_the_error_counts_the_problems_and_names_the_file(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {model_path: tiny, max_model_len: 64}\nmode: bench\nseed: x\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value) == (
        f"2 problems in {file}:\n"
        "  - buffer.explorer_input.eval_tasksets: required in mode bench: what to evaluate\n"
        "  - seed: 'x' is not a whole number"
    )


def test_invalid_yaml_is_reported_with_the_line_where_it_begins(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("algorithm:\n  algorithm_type: grpo\n  repeat_times 4\n  kl_loss_fn: k2\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert caught.value.problems == [
        "not valid YAML: line 4, column 3: could not find expected ':' while scanning a simple key that begins in "
        "line 3"
    ]


def test_each_mode_needs_its_data() -> None:
    at = "buffer.explorer_input"
    assert problems(grpo(buffer={})) == [f"{at}.taskset.path: required in mode both: the tasks to explore"]
    assert problems(grpo(mode="explore", buffer={})) == [
        f"{at}.taskset.path: required in mode explore: the tasks to explore"
    ]
    assert problems(grpo(mode="bench")) == [f"{at}.eval_tasksets: required in mode bench: what to evaluate"]
    assert problems(sft(buffer={})) == [
        "buffer.trainer_input.experience_buffer.path: required for sft: the dataset to learn from"
    ]
    assert config(grpo(mode="train", buffer={})).mode == "train"


def test_secrets_are_refused_and_never_shown() -> None:
    source = grpo(
        explorer={
            "rollout_model": {"api_key": "sk-1"},
            "env_vars": {"OPENAI_API_KEY": "sk-2", "HF_TOKEN": "sk-3", "PLAIN": "fine"},
            "auxiliary_models": [{"api_key": "sk-4"}],
        },
        monitor={"monitor_type": "wandb", "monitor_args": {"nested": {"password": "sk-5"}, "api_key_env": "NAME"}},
    )
    lines = problems(source)
    assert [line.split(":")[0] for line in lines] == [
        "explorer.auxiliary_models[0].api_key",
        "explorer.env_vars.HF_TOKEN",
        "explorer.env_vars.OPENAI_API_KEY",
        "explorer.rollout_model.api_key",
        "monitor.monitor_args.nested.password",
    ]
    assert not any("sk-" in line for line in lines)


def test_a_password_in_an_address_is_not_shown() -> None:
    (line,) = problems(grpo(), "mode=postgresql://user:hunter2@host/db")
    assert "hunter2" not in line


def test_reward_models_are_not_evaluated_on_tasks() -> None:
    tasks = "buffer.explorer_input.eval_tasksets=[{path: e}]"
    loaded = config(sft(), tasks, "trainer.eval_interval=5", "explorer.eval_interval=7")
    assert loaded.evaluates_training and loaded.eval_interval == 5 and loaded.warnings == ()
    ignored = config(sft(algorithm={"algorithm_type": "reward_model"}), tasks)
    assert not ignored.has_explorer
    told = "ignored: a reward model generates no answers; use eval_buffer"
    assert ignored.warnings == (f"buffer.explorer_input.eval_tasksets: {told}",)


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("synchronizer.sync_method", "online", "nccl"),
        ("synchronizer.sync_method", "offline", "checkpoint"),
        ("synchronizer.sync_style", "dynamic_by_explorer", "explorer_driven"),
        ("synchronizer.sync_style", "dynamic_by_trainer", "trainer_driven"),
        ("trainer.trainer_type", "verl", "torch"),
        ("trainer.trainer_strategy", "fsdp", "fsdp2"),
        ("trainer.trainer_strategy", "megatron", "fsdp2"),
        ("algorithm.algorithm_type", "grpo_verl", "grpo"),
        ("algorithm.advantage_fn", "grpo_verl", "grpo"),
        ("algorithm.sample_strategy", "warmup", "default"),
    ],
)
def test_an_old_value_is_replaced_with_a_warning(key: str, old: str, new: str) -> None:
    loaded = config(grpo(), f"{key}={old}")
    section, name = key.split(".")
    assert getattr(getattr(loaded, section), name) == new
    assert len(loaded.warnings) == 1 and loaded.warnings[0].startswith(f"{key}: {old} is taken as {new}: ")


def test_an_old_key_is_replaced_with_a_warning() -> None:
    loaded = config(grpo(), "algorithm.optimizer.warmup_style=cosine")
    assert loaded.algorithm.optimizer.lr_scheduler_type == "cosine"
    assert loaded.warnings == ("algorithm.optimizer.warmup_style: old name of lr_scheduler_type",)


def test_a_workflow_of_a_plugin_is_accepted_unimported() -> None:
    taskset = {"path": "t.jsonl", "default_workflow_type": "no_such_module.workflow"}
    assert load_config(grpo(buffer={"explorer_input": {"taskset": taskset}}))


def test_models_apart_share_no_gpu_with_the_policy() -> None:
    both = {
        "rollout_model": {"engine_type": "vllm"},
        "auxiliary_models": [{"engine_type": "vllm", "model_path": "judge", "engine_num": 1}],
    }
    assert [model.asked_name for model in config(grpo(explorer=both)).models_apart] == ["judge"]
