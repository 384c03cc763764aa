"""Promises of `model.tinker`, whose package is not needed for any of them."""

from typing import Any

import pytest

from rftdask.algorithm.compose import make_algorithm
from rftdask.cluster.layout import count_gpus, num_ranks, plan_layout
from rftdask.config import Config, load_config
from rftdask.errors import NotInstalledError, UserError
from rftdask.models.tinker_service import API_KEY, TinkerService, require_key
from rftdask.trainer.engines.tinker import check_algorithm
from tests.unit.config.config_cases import grpo, problems, sft

HOSTED = {"model_path": "Qwen/Qwen3-8B", "max_model_len": 64, "tinker": {"enable": True}}
HOT = "it only trains logprobs of temperature 1; leave it out"
IS_TOLD = "true: trainer.trainer_type and explorer.rollout_model.engine_type are tinker"


def hosted(*overrides: str, **sections: Any) -> Config:
    return load_config(grpo(model=HOSTED, **sections), overrides)


def test_enable_chooses_trainer_and_engine_with_one_warning() -> None:
    config = hosted("trainer.trainer_type=verl", "explorer.rollout_model.engine_type=vllm", "seed=5")
    assert (config.trainer.trainer_type, config.explorer.rollout_model.engine_type) == ("tinker", "tinker")
    assert config.warnings == (f"model.tinker.enable: {IS_TOLD}",)
    tinker = config.model.tinker
    assert (tinker.rank, tinker.seed) == (16, None)
    assert tinker.train_mlp and tinker.train_attn and tinker.train_unembed
    again = load_config(config.to_dict())
    assert again == config and again.warnings == ()
    assert load_config(grpo(), ["model.tinker.rank=8"]).trainer.trainer_type == "torch"


def test_a_stage_inherits_it() -> None:
    config = hosted(stages=[{"stage_name": "one"}])
    [stage] = config.stage_configs()
    assert stage.trainer.is_hosted and stage.explorer.rollout_model.traits.is_hosted


def test_weights_are_files_and_no_gpu_is_planned() -> None:
    config = hosted("checkpoint_root_dir=s3://bucket/runs")
    assert config.sync_method == "checkpoint"
    assert load_config(grpo(), ["checkpoint_root_dir=s3://b"]).sync_method == "memory"
    assert count_gpus(config) == 0
    assert num_ranks(config, plan_layout([config], 8, 4)) == 1


@pytest.mark.parametrize(
    ("override", "why"),
    {
        "model.lora_configs=[{}]": "the adapter is configured in model.tinker; leave it out",
        "model.min_response_tokens=2": "its sampler has no such limit; leave it out",
        "model.repetition_penalty=1.2": "its sampler has none; leave it out",
        "model.temperature=0.7": HOT,
        "buffer.explorer_input.taskset.rollout_args.temperature=0.7": HOT,
        "trainer.num_ranks=2": "the service has its own ranks; leave it out",
        "trainer.tensor_parallel_size=2": "the service has its own; leave it out",
        "trainer.ulysses_sequence_parallel_size=2": "the service has its own; leave it out",
        "trainer.router_aux_loss_coef=0.1": "it does not report routers; leave it out",
        "trainer.save_hf_checkpoint=always": "the service keeps the model; use `tinker checkpoint download` for its "
        "adapter",
        "algorithm.optimizer.optimizer_type=sgd": "it only has AdamW; use adamw",
        "algorithm.optimizer.optimizer_args={amsgrad: true}": "its AdamW takes only eps and the keys of this section; "
        "leave others out",
        "algorithm.algorithm_type=ppo": "ppo needs a critic, a teacher or a head, and the service only returns "
        "logprobs; choose another, or trainer_type torch",
        "algorithm.entropy_loss_fn_args={entropy_coef: 0.01}": "it returns no entropies; set none",
        "algorithm.advantage_fn=clipb": "it returns no entropies; choose another",
        "synchronizer.sync_method=memory": "weights stay at the service, and files name them; leave it out",
        "synchronizer.full_publish_interval=4": "the service keeps them; leave it out",
        "mode=colocate": "no GPU is shared; leave it out (mode: both)",
    }.items(),
)
def test_unsupported_keys_are_rejected_by_name(override: str, why: str) -> None:
    key = (
        "cluster.colocate"
        if override == "mode=colocate"
        else override.partition("=")[0].replace("loss_fn_args", "loss_fn")
    )
    assert problems(grpo(model=HOSTED), override) == [f"{key}: not available with trainer_type tinker: {why}"]


def test_a_baseline_over_other_prompts_is_rejected() -> None:
    [line] = problems(sft(model=HOSTED, algorithm={"algorithm_type": "kto"}))
    assert line.startswith("algorithm.policy_loss_fn: not available with trainer_type tinker: it computes no KL over")


def test_router_replay_and_images_are_rejected() -> None:
    told = problems(grpo(model=HOSTED), "algorithm.enable_router_replay=true")
    refusal = "not available with trainer_type tinker: it does not report experts; leave it out"
    assert f"algorithm.enable_router_replay: {refusal}" in told
    [told_of_images] = problems(grpo(model=HOSTED), "buffer.explorer_input.taskset.format.image_key=image")
    assert "engine_type tinker does not support images here" in told_of_images


def test_an_adapter_in_no_layer_is_refused() -> None:
    none = {"train_mlp": False, "train_attn": False, "train_unembed": False}
    [line] = problems(grpo(model={**HOSTED, "tinker": {"enable": True, **none}}))
    assert line == "model.tinker: the adapter has no layers; set train_mlp, train_attn or train_unembed to true"


def test_keys_of_computing_here_are_warned_of() -> None:
    config = hosted("trainer.gradient_checkpointing=true", "trainer.micro_batch_size=4")
    ignored = "ignored: the Tinker service decides"
    keys = ("trainer.gradient_checkpointing", "trainer.micro_batch_size")
    assert set(config.warnings) == {f"model.tinker.enable: {IS_TOLD}", *(f"{key}: {ignored}" for key in keys)}


@pytest.mark.parametrize("name", ["grpo", "gspo", "dapo", "cispo", "rec", "topr", "opmd", "mix", "sft", "dpo", "simpo"])
def test_algorithms_that_need_only_logprobs_are_trained(name: str) -> None:
    check_algorithm(load_config(sft() if name == "sft" else grpo()), make_algorithm(name))


@pytest.mark.parametrize(
    ("name", "parts", "what"),
    [
        ("grpo", {"entropy_loss_fn_args": {"entropy_coef": 0.01}}, "algorithm.entropy_loss_fn: entropies; set none"),
        ("on_policy_distill", {}, "algorithm.policy_loss_fn: a teacher"),
        ("kto", {}, "algorithm.policy_loss_fn: a KL baseline over other prompts"),
        ("ppo", {}, "algorithm.advantage_fn: a critic"),
    ],
)
def test_an_algorithm_that_needs_more_is_refused(name: str, parts: dict[str, Any], what: str) -> None:
    with pytest.raises(
        UserError, match=f"^{what}.*which only returns logprobs; choose another one, or trainer_type torch"
    ):
        check_algorithm(load_config(grpo()), make_algorithm(name, **parts))


def test_an_error_about_a_missing_key_or_package_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY, raising=False)
    with pytest.raises(UserError, match=r"export TINKER_API_KEY=tml-\.\.\. before starting the run"):
        require_key()
    monkeypatch.setenv(API_KEY, "tml-x")
    monkeypatch.setitem(__import__("sys").modules, "tinker", None)
    with pytest.raises(NotInstalledError, match=r"pip install 'rftdask\[tinker\]'"):
        TinkerService(None)
