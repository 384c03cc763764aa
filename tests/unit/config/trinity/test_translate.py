"""Promises of translations: keys that the reference system has in other places keep their meaning and are reported."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from rftdask.config import load_config
from rftdask.config.trinity.translate import OF_THE_POLICY, translate
from rftdask.errors import ConfigError

TREE: dict[str, Any] = {
    "name": "x",
    "model": {"model_path": "m", "max_prompt_tokens": 8, "max_response_tokens": 8},
    "buffer": {"total_steps": 4, "explorer_input": {"taskset": {"name": "math", "path": "t.jsonl"}}},
}


def loaded(*overrides: str) -> Any:
    return load_config(copy.deepcopy(TREE), overrides)


def test_keys_of_verl_take_their_place_and_the_others_are_named() -> None:
    config = loaded(
        "algorithm.algorithm_type=ppo",
        "trainer.trainer_config.trainer.max_actor_ckpt_to_keep=5",
        "trainer.trainer_config.actor_rollout_ref.actor={ppo_epochs: 2, grad_clip: 0.5, optim: {lr: 3.0e-6}}",
        "trainer.trainer_config.actor_rollout_ref.model.use_remove_padding=true",
        "trainer.trainer_config.actor_rollout_ref.model.enable_gradient_checkpointing=true",
        "trainer.trainer_config.critic={optim: {lr: 2.0e-5}, cliprange_value: 0.25}",
        "trainer.trainer_config.actor_rollout_ref.rollout.n=8",
    )
    trainer = config.trainer
    assert (trainer.max_checkpoints_to_keep, trainer.ppo_epochs, trainer.grad_clip) == (5, 2, 0.5)
    assert (trainer.critic.lr, trainer.critic.cliprange_value, trainer.gradient_checkpointing) == (2e-5, 0.25, True)
    assert config.algorithm.optimizer.lr == 3e-6
    told = "\n".join(config.warnings)
    at = "trainer.trainer_config.actor_rollout_ref"
    assert f"{at}.actor.optim.lr: taken as algorithm.optimizer.lr" in told
    assert f"{at}.model.use_remove_padding: ignored: rows are always packed" in told
    assert f"{at}.rollout.n: ignored: it configures veRL, which is not used, and no key here replaces it" in told
    assert len(config.warnings) >= 9


def test_tasks_of_type_queue_are_read_from_their_path() -> None:
    taskset = "buffer.explorer_input.taskset"
    config = loaded(f"{taskset}.storage_type=queue")
    assert config.buffer.explorer_input.train_tasksets[0].storage_type == "file"
    assert f"{taskset}.storage_type: taken as file, the type of its path" in "\n".join(config.warnings)
    held_out = "[{name: h, storage_type: queue, path: 'sqlite:////t.db'}]"
    [held] = loaded(f"buffer.explorer_input.eval_tasksets={held_out}").buffer.explorer_input.eval_tasksets
    assert held.storage_type == "sql"


def test_sizes_of_megatron_are_those_that_cut_and_split_here() -> None:
    sizes = "tensor_model_parallel_size: 2, expert_model_parallel_size: 2, sequence_parallel: false"
    config = loaded("trainer.trainer_strategy=megatron", f"trainer.megatron={{{sizes}}}")
    assert (config.trainer.trainer_strategy, config.trainer.tensor_parallel_size) == ("fsdp2", 2)
    told = "\n".join(config.warnings)
    assert "trainer.megatron.tensor_model_parallel_size: taken as trainer.tensor_parallel_size" in told
    assert loaded("trainer.megatron.context_parallel_size=4").trainer.ulysses_sequence_parallel_size == 4
    assert loaded("trainer.megatron.expert_model_parallel_size=8").trainer.tensor_parallel_size == 8


@pytest.mark.parametrize(
    ("settings", "sizes", "told"),
    [
        ([], (1, 1), []),
        (
            ["trainer.megatron={tensor_model_parallel_size: 2, expert_model_parallel_size: 2}"],
            (2, 1),
            ["trainer.megatron.tensor_model_parallel_size: taken as trainer.tensor_parallel_size"],
        ),
        (
            ["trainer.megatron.context_parallel_size=4"],
            (1, 4),
            ["trainer.megatron.context_parallel_size: taken as trainer.ulysses_sequence_parallel_size"],
        ),
        (
            ["trainer.megatron.tensor_model_parallel_size=2", "trainer.tensor_parallel_size=4"],
            (4, 1),
            ["trainer.megatron.tensor_model_parallel_size: ignored: trainer.tensor_parallel_size is given and wins"],
        ),
    ],
)
def test_megatron_keys_are_translated_with_notes(settings: list[str], sizes: tuple[int, int], told: list[str]) -> None:
    tree = {**copy.deepcopy(TREE), "trainer": {"trainer_strategy": "megatron"}}
    config = load_config(tree, settings, origin="trinity")
    trainer = config.trainer
    assert trainer.trainer_strategy == "fsdp2"
    assert (trainer.tensor_parallel_size, trainer.ulysses_sequence_parallel_size) == sizes
    strategy = (
        "trainer.trainer_strategy: megatron is taken as fsdp2: fsdp2 takes the place of PyTorch's first FSDP and of "
        "Megatron, whose sizes are tensor_parallel_size and ulysses_sequence_parallel_size here"
    )
    assert config.warnings == (*told, strategy)
    assert {"- trainer.trainer_strategy: megatron", "+ trainer.trainer_strategy: fsdp2"} <= set(config.changes)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ("pipeline_model_parallel_size: 2", "pipeline parallelism: packed micro-batches differ in length"),
        (
            "tensor_model_parallel_size: 2, expert_model_parallel_size: 4",
            "expert parallelism apart from tensor parallelism",
        ),
    ],
)
def test_unsupported_megatron_sizes_are_refused(sizes: str, why: str) -> None:
    for place in ("trainer.megatron", "trainer.trainer_config.actor_rollout_ref.actor.megatron"):
        with pytest.raises(ConfigError, match=rf"{place}\.(pipeline|expert)_model_parallel_size: .*{why}"):
            loaded(f"{place}={{{sizes}}}")


def test_a_stage_has_keys_of_verl_of_its_own() -> None:
    stages = "[{stage_name: one, mode: both, trainer: {trainer_config: {actor_rollout_ref: {actor: {ppo_epochs: 2}}}}}]"
    [stage] = loaded(f"stages={stages}").stage_configs()
    assert stage.trainer.ppo_epochs == 2


def test_a_key_of_ours_wins_over_that_of_verl() -> None:
    config = loaded("trainer.ppo_epochs=3", "trainer.trainer_config.actor_rollout_ref.actor.ppo_epochs=2")
    assert config.trainer.ppo_epochs == 3
    assert any("ignored: trainer.ppo_epochs is given and wins" in text for text in config.warnings)


def test_verl_keys_are_checked_like_ours() -> None:
    with pytest.raises(ConfigError, match="ppo_epochs"):
        loaded("trainer.trainer_config.actor_rollout_ref.actor.ppo_epochs=none")


def test_one_name_for_training_and_evaluation() -> None:
    config = loaded("buffer.explorer_input.eval_tasksets=[{name: math, path: e.jsonl}, {name: other, path: o.jsonl}]")
    assert [taskset.name for taskset in config.buffer.explorer_input.eval_tasksets] == ["math_eval", "other"]
    assert any("this one is renamed to math_eval" in text for text in config.warnings)
    with pytest.raises(ConfigError, match="2 tasksets are named 'math"):
        loaded("buffer.explorer_input.eval_tasksets=[{name: math, path: e.jsonl}, {name: math, path: o.jsonl}]")


def test_a_database_of_a_relative_path_is_where_it_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    taskset = "buffer.explorer_input.taskset"
    config = loaded(f"{taskset}.storage_type=sql", f"{taskset}.path=sqlite:///tasks.db")
    assert config.buffer.explorer_input.taskset.path == f"sqlite:///{tmp_path}/tasks.db"


def test_thinking_of_the_engine_is_that_of_the_model() -> None:
    config = loaded("explorer.rollout_model.enable_thinking=false")
    assert config.model.enable_thinking is False
    with pytest.raises(ConfigError, match="enable_thinking"):
        loaded("explorer.rollout_model.enable_thinking=false", "model.enable_thinking=true")


@pytest.mark.parametrize(("key", "ours"), OF_THE_POLICY.items())
def test_a_key_of_the_policys_engine_is_that_of_the_model(key: str, ours: str) -> None:
    values = {"chat_template": "{{ messages }}", "enable_thinking": True, "enable_prompt_truncation": False}
    values |= {"temperature": 0.5, "top_p": 0.5, "repetition_penalty": 1.5, "max_model_len": 64}
    value = values.get(key, 7)
    given = loaded(f"model.{ours}=null", f"explorer.rollout_model.{key}={json.dumps(value)}")
    assert getattr(given.model, ours) == value != getattr(loaded().model, ours)


def test_passes_of_one_experience() -> None:
    assert loaded("trainer.use_dynamic_bsz=false").trainer.max_rows_per_micro_batch == 1
    assert loaded("trainer.use_dynamic_bsz=false", "trainer.micro_batch_size=4").trainer.max_rows_per_micro_batch == 4
    assert loaded().trainer.max_rows_per_micro_batch is None


@pytest.mark.parametrize(
    "setting",
    [
        "explorer.rollout_model.enable_history=true",
        "explorer.rollout_model.enable_openai_api=true",
        "buffer.trainer_input.experience_buffer.enable_progress_bar=true",
        "buffer.trainer_input.experience_buffer.schema_type=experience",
    ],
)
def test_keys_may_request_the_only_behavior(setting: str) -> None:
    assert any(setting.partition("=")[0] in text for text in loaded(setting).warnings)


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"trainer": 3},
        {"trainer": {"trainer_config": 3}},
        {"trainer": {"trainer_config": {"critic": {"optim": {"lr": 1}}}, "critic": 3}},
        {"buffer": {"explorer_input": {"eval_tasksets": 3}}},
        {"buffer": {"explorer_input": {"tasksets": "x", "eval_tasksets": ["y", None]}}},
        {"explorer": {"rollout_model": {"enable_thinking": True}}, "model": None},
        {"mode": "colocate", "cluster": "x"},
    ],
)
def test_a_tree_of_other_shapes_is_left_to_the_checks(tree: dict[str, Any]) -> None:
    before = copy.deepcopy(tree)
    translate(tree)
    assert tree == before, "what is given is not changed"
