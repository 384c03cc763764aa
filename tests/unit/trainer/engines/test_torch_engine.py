"""Promises of the PyTorch engine: micro-batches do not change results, a checkpoint restores to the bit."""

import json
import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from rftdask.algorithm.compose import make_algorithm
from rftdask.algorithm.losses.base import LossInputs
from rftdask.buffer.batches.batch import TrainingBatch, join_batches, supervised_batch
from rftdask.config.schema.model import LoraConfig
from rftdask.errors import DataError, RoleError
from rftdask.models.toy import build_toy_model
from rftdask.storage.base import Data
from rftdask.trainer import model as policies
from rftdask.trainer.checkpoint import STATE_FILE, Checkpoints
from rftdask.trainer.engines.critic import value_loss
from rftdask.trainer.engines.strategies.base import DDP, Strategy
from rftdask.trainer.engines.strategies.fsdp2 import FSDP2
from rftdask.trainer.engines.torch_engine import TorchEngine
from rftdask.trainer.model import load_policy
from tests.thread_ranks import ThreadRanks
from tests.unit.trainer.trainer_cases import SIZES, engine_config, new_storage, rollouts


def engine(models: Path, name: str, parts: dict[str, Any] | None = None, **overrides: Any) -> TorchEngine:
    overrides = {"deterministic": True, **overrides}
    if name in ("on_policy_distill", "jsd"):
        overrides.setdefault("explorer__auxiliary_models", [{"model_path": str(models / "teacher")}])
    lora = overrides.pop("lora", None)
    return TorchEngine(engine_config(models / "policy", lora, **overrides), make_algorithm(name, **(parts or {})))


def batch_for(name: str) -> TrainingBatch:
    own = rollouts()
    if name in ("dpo", "reward_model"):
        return replace(rollouts(6, 2), experts=np.ones(12, bool))
    if name == "kto":
        return replace(rollouts(6, 1), experts=np.ones(6, bool), rewards=np.arange(6, dtype=np.float32) % 2)
    shown = supervised_batch([([5, 6, 7, 8], 2, None), ([9, 8, 7], 2, None)], ["shown 0", "shown 1"])
    return join_batches([own, shown]) if name == "mix" else own


NAMES = ["grpo", "ppo", "mix", "dpo", "kto", "reward_model", "remax", "on_policy_distill", "jsd", "sapo"]
NAMES += ["reinforceplusplus"]


class Chosen(TorchEngine):
    """Engine without a model that keeps the strategy of its ranks."""

    def __init__(self, config: Any, algorithm: Any, strategy: Any, sequence: Any, **more: Any) -> None:
        self.strategy, self.sequence = type(strategy), sequence


@pytest.mark.parametrize(
    ("section", "size", "strategy"),
    [
        ({}, 1, Strategy),
        ({}, 2, FSDP2),
        ({"trainer_strategy": "ddp"}, 2, DDP),
        ({"offload_policy": True}, 1, FSDP2),  # whose weights lie in host memory
        ({"ulysses_sequence_parallel_size": 2}, 2, FSDP2),
    ],
)
def test_ranks_shard_a_model_as_configured(
    tmp_path: Path, section: dict[str, Any], size: int, strategy: type[Strategy]
) -> None:
    ranks = ThreadRanks(0, [None] * size, threading.Barrier(size))
    config = engine_config(tmp_path, **{f"trainer__{key}": value for key, value in section.items()})
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        chosen = Chosen.from_config(config, make_algorithm("grpo"), None, ranks)
    finally:
        dist.destroy_process_group()
    assert isinstance(chosen, Chosen)
    assert (chosen.strategy, chosen.sequence) == (strategy, ranks if "ulysses" in "".join(section) else None)


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_change_the_gradient_only_by_rounding(models: Path, name: str) -> None:
    batch = batch_for(name)
    results = []
    for size in (None, 3):
        trained = engine(models, name, trainer__micro_batch_size=size)
        metrics = trained.train_step(batch, 1)
        # Not the weights: Adam's first step is the sign of the gradient, where rounding shows.
        results.append({k: v for k, v in metrics.items() if not k.startswith("lr")})
    assert results[0].keys() == results[1].keys()
    for key, value in results[0].items():
        assert results[1][key] == pytest.approx(value, rel=2e-4, abs=1e-6), key


@pytest.mark.parametrize(("dynamic", "num_passes"), [(True, 1), (False, 12)])
def test_without_dynamic_batches_each_row_is_a_pass_of_its_own(models: Path, dynamic: bool, num_passes: int) -> None:
    trained, passes = engine(models, "sapo", trainer__use_dynamic_bsz=dynamic), list[torch.nn.Module]()
    trained._model.get_input_embeddings().register_forward_hook(lambda layer, inputs, output: passes.append(layer))
    trained.train_step(rollouts(), 1)
    assert len(passes) == num_passes


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_a_checkpoint_restores_to_the_bit(models: Path, name: str) -> None:
    adaptive = {"kl_coef": 0.5, "adaptive": True, "target_kl": 0.01, "horizon": 50}
    parts = {"kl_loss_fn_args": adaptive, "kl_penalty_fn": "k1", "kl_penalty_fn_args": adaptive}
    first = engine(models, name, parts)
    for step in (1, 2):
        first.train_step(rollouts(seed=step), step)
    checkpoints = Checkpoints(new_storage(), "main")
    checkpoints.save(2, first.state_files(), {})
    files = checkpoints.files(2)
    assert files is not None
    second = engine(models, name, parts, seed=9)
    second.load_state_files(files)
    assert second.state_files() == {file: data for file, data in files.items() if file != STATE_FILE}
    for each in (first, second):
        each.train_step(rollouts(seed=3), 3)
    assert first.state_files() == second.state_files()
    assert load(bytes(first.state_files()["actor/kl_coefs.safetensors"]))["kl"].tolist() != [0.5, 0.5]


def test_returned_memory_is_reused_for_the_next_weights(models: Path) -> None:
    trained, kept = (engine(models, "grpo", explorer__rollout_model={"dtype": "bfloat16"}) for _ in range(2))
    first = trained.weights()["model.safetensors"]
    place = np.frombuffer(first, np.uint8).ctypes.data
    assert np.frombuffer(trained.weights()["model.safetensors"], np.uint8).ctypes.data != place, "it may be read still"
    trained.reuse({"model.safetensors": first})
    for each in (trained, kept):
        each.train_step(rollouts(), 1)
    again = trained.weights()["model.safetensors"]
    assert np.frombuffer(again, np.uint8).ctypes.data == place
    assert again == kept.weights()["model.safetensors"]


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_returned_memory_is_reused_for_the_next_checkpoint(models: Path, name: str) -> None:
    trained, kept = engine(models, name), engine(models, name)
    for each in (trained, kept):
        each.train_step(rollouts(), 1)

    def places(files: Mapping[str, Data]) -> dict[str, int]:
        staged = ("model.safetensors", "optim.safetensors")
        return {n: np.frombuffer(data, np.uint8).ctypes.data for n, data in files.items() if n.endswith(staged)}

    first = trained.state_files()
    second = trained.state_files()
    assert not set(places(first).values()) & set(places(second).values()), "they may be read still"
    given_back = places(first)
    trained.reuse(first)
    for each in (trained, kept):
        each.train_step(rollouts(seed=1), 2)
    again = trained.state_files()
    assert places(again) == given_back and len(given_back) == (4 if name == "ppo" else 2)
    assert again == kept.state_files()


@pytest.mark.parametrize("key", ["trainer__grad_clip", "algorithm__optimizer__clip_grad"])
def test_an_sgd_step_has_the_length_of_rate_times_clip(models: Path, key: str) -> None:
    section = {"algorithm__optimizer__optimizer_type": "sgd", "algorithm__optimizer__lr": 0.5}
    trained = engine(models, "grpo", **section, **{key: 0.01})
    before = load(bytes(trained.weights()["model.safetensors"]))
    assert trained.train_step(rollouts(), 1)["grad_norm"] > 0.1
    after = load(bytes(trained.weights()["model.safetensors"]))
    moved = [(after[name].double() - tensor.double()).square().sum() for name, tensor in before.items()]
    assert float(torch.stack(moved).sum().sqrt()) == pytest.approx(0.5 * 0.01, rel=1e-3)


def test_only_the_critic_learns_during_warm_up(models: Path) -> None:
    trained = engine(models, "ppo", trainer__critic_warmup=2)
    start, errors = trained.weights(), []
    for step in (1, 2):
        metrics = trained.train_step(rollouts(), step)
        errors.append(metrics["critic_error"])
        assert step > 1 or metrics["critic_explained_variance"] == 0.0, "all values are 0 at first"
        assert trained.weights() == start
    metrics = trained.train_step(rollouts(), 3)
    assert trained.weights() != start
    assert errors[0] > errors[1] > metrics["critic_error"]
    assert metrics["value_mean"] != 0.0


def test_value_loss_is_clipped_around_the_old_value() -> None:
    values = torch.tensor([[0.2, 2.0, -2.0]], requires_grad=True)
    loss = value_loss(values, torch.zeros(1, 3), torch.ones(1, 3), 0.5)
    # 0.5 (0.2 - 1)^2; max of 0.5 (2 - 1)^2 and 0.5 (0.5 - 1)^2; max of 0.5 (-2 - 1)^2 and 0.5 (-0.5 - 1)^2
    assert loss.tolist() == [pytest.approx([0.32, 0.5, 4.5])]
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [pytest.approx([-0.8, 1.0, -3.0])]


def test_demonstrations_are_imitated_and_enter_no_baseline(models: Path) -> None:
    own, both = batch_for("grpo"), batch_for("mix")
    metrics = [engine(models, "mix", {"policy_loss_fn_args": {"mu": 0.0}}).train_step(b, 1) for b in (own, both)]
    for key in ("num_groups", "usual_loss"):
        assert metrics[0][key] == pytest.approx(metrics[1][key]), key
    assert metrics[0]["grad_norm"] == pytest.approx(metrics[1]["grad_norm"], rel=1e-4)
    assert engine(models, "mix").train_step(both, 1)["expert_loss"] > 0


def test_the_kl_baseline_of_kto_uses_mismatched_responses(models: Path) -> None:
    batch = replace(batch_for("kto"), rewards=np.ones(6, np.float32))  # all desirable: their likelihood rises
    trained = engine(models, "kto", algorithm__optimizer__lr=0.01)
    assert trained.train_step(batch, 1)["kl_baseline"] == 0.0, "policy and reference are equal"
    policy, _ = load_policy(str(models / "policy"), "float32", "cpu")
    reference, _ = load_policy(str(models / "policy"), "float32", "cpu")
    policy.load_state_dict(load(bytes(trained.weights()["model.safetensors"])))
    tokens, ratios = batch.row_tokens(), []
    for row in range(6):
        response = tokens[row - 1][2:]
        joined = torch.tensor(np.concatenate([tokens[row][:2], response]))[None].long()
        with torch.no_grad():
            both = [torch.log_softmax(model(joined).logits[0, 1:-1], -1) for model in (policy, reference)]
        ratios.append((both[0] - both[1])[range(len(response)), response].sum().item())
    expected = sum(ratios) / 6
    assert expected > 0.01
    assert trained.train_step(batch, 2)["kl_baseline"] == pytest.approx(expected, rel=1e-3)


def test_a_teacher_of_another_vocabulary_is_refused(models: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(models / "teacher", vocab_size=99)
    build_toy_model(tmp_path / "other", **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    with pytest.raises(DataError, match="has a vocabulary of 99 tokens"):
        engine(models, "on_policy_distill", explorer__auxiliary_models=[{"model_path": str(tmp_path / "other")}])


def test_dropout_is_only_active_in_imitation(models: Path, tmp_path: Path) -> None:
    build_toy_model(tmp_path / "policy", **SIZES)
    settings = json.loads((tmp_path / "policy" / "config.json").read_text())
    (tmp_path / "policy" / "config.json").write_text(json.dumps({**settings, "attention_dropout": 0.5}))
    build_toy_model(tmp_path / "teacher", **SIZES)
    # The policy is its reference before the first step: every margin is 0, and the loss -log sigmoid(0).
    for own in ({}, {"lora": LoraConfig(lora_rank=2, lora_alpha=2)}):
        trained = engine(tmp_path, "dpo", **own)
        assert trained.train_step(batch_for("dpo"), 1)["loss"] == pytest.approx(math.log(2), abs=1e-6)
    first, second = engine(tmp_path, "ppo"), engine(models, "ppo")  # the same weights, with dropout and without
    assert first.train_step(rollouts(), 1) == second.train_step(rollouts(), 1)
    shown = supervised_batch([([5, 6, 7, 8], 2, None), ([9, 8, 7], 2, None)], ["shown 0", "shown 1"])
    losses = [engine(folder, "sft").train_step(shown, 1)["loss"] for folder in (tmp_path, models)]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "reward_model"])
def test_evaluation_equals_one_batch_and_trains_nothing(models: Path, name: str) -> None:
    whole = batch_for(name)
    halves = [subset(whole, range(6)), subset(whole, range(6, len(whole)))] if len(whole) > 6 else [whole]
    trained = engine(models, name, trainer__max_token_len_per_gpu=16)
    found = trained.evaluate(halves)
    expected = engine(models, name).train_step(whole, 1)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert trained.train_step(whole, 1) == engine(models, name, trainer__max_token_len_per_gpu=16).train_step(whole, 1)
    assert trained.evaluate(halves)["loss"] < found["loss"]
    if name == "dpo":
        assert {"reward_accuracy", "reward_chosen", "reward_rejected"} <= found.keys()


def subset(batch: TrainingBatch, members: range) -> TrainingBatch:
    tokens, prompts = batch.row_tokens(), batch.prompt_lengths
    rows = [(tokens[row].tolist(), int(prompts[row]), None, float(batch.rewards[row])) for row in members]
    return supervised_batch(rows, [batch.uids[row] for row in members], 2 if len(set(batch.groups)) < len(batch) else 1)


def test_recomputed_logprobs_begin_at_ratio_one(models: Path) -> None:
    parts = {"kl_loss_fn": "none"}
    recorded = engine(models, "grpo", parts).train_step(rollouts(), 1)
    recomputed = engine(models, "grpo", parts, algorithm__bypass_old_logprobs=False).train_step(rollouts(), 1)
    assert recomputed["ppo_kl"] == 0.0 != recorded["ppo_kl"]


def test_an_infinite_logprob_names_the_row(models: Path) -> None:
    batch = rollouts()
    batch.rollout_logprobs[0] = np.nan
    with pytest.raises(ValueError, match=r".*row 0"):
        engine(models, "grpo").train_step(batch, 7)


@pytest.mark.parametrize("name", ["clipb", "clipv"])
def test_tokens_dropped_by_the_advantage_are_not_trained(models: Path, name: str) -> None:
    parts = {"advantage_fn": name, "advantage_fn_args": {"mu": 0.1}, "kl_loss_fn": "none"}
    metrics = engine(models, "grpo", parts).train_step(rollouts(), 1)
    assert 0.0 < metrics["token_filter_frac"] < 1.0
    none = engine(models, "grpo", {**parts, "advantage_fn_args": {"mu": 100.0}}).train_step(rollouts(), 1)
    assert none["token_filter_frac"] == 0.0
    assert metrics["grad_norm"] != none["grad_norm"]


def spoil(batch: TrainingBatch) -> TrainingBatch:
    """Rewards so far apart that the gradient overflows."""
    return replace(batch, rewards=np.where(np.arange(len(batch)) % 2, 1e30, -1e30).astype(np.float32))


def test_the_third_infinite_gradient_in_a_row_is_an_error(models: Path) -> None:
    parts = {"advantage_fn_args": {"std": "none"}, "kl_loss_fn": "none"}
    trained = engine(models, "grpo", parts)
    for step in (1, 2, 3):
        start = trained.weights()
        metrics = trained.train_step(spoil(rollouts()) if step != 2 else rollouts(), step)
        assert (metrics["num_skipped_steps"], "grad_norm" in metrics) == ((0.0, True) if step == 2 else (1.0, False))
        assert (trained.weights() == start) == (step != 2)
    again = engine(models, "grpo", parts)
    again.load_state_files(trained.state_files())
    for each in (trained, again):  # a resumed engine goes on counting
        each.train_step(spoil(rollouts()), 4)
        with pytest.raises(RoleError, match=r"step 5: the gradient norm is .* not finite in the 2 updates before"):
            each.train_step(spoil(rollouts()), 5)


@pytest.mark.parametrize(
    ("algorithm", "lora"),
    [("dpo", LoraConfig(lora_rank=2)), *((name, None) for name in ("dpo", "grpo", "on_policy_distill", "jsd"))],
)
def test_frozen_weights_keep_16_bits_and_compute_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, lora: LoraConfig | None
) -> None:
    """References, teachers and weights under adapters keep 16 bits; the loss has the bits of float32 weights."""
    build_toy_model(tmp_path, hidden_size=16, intermediate_size=16, num_layers=2, num_heads=2)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    pairs = supervised_batch([([1, 2, 3, 4], 2, None), ([1, 2, 9], 2, None)], ["t/0/0", "t/0/1"], 2)
    batch = pairs if algorithm == "dpo" else rollouts()
    taught = algorithm in ("on_policy_distill", "jsd")
    more = {"explorer__auxiliary_models": [{"model_path": str(tmp_path)}]} if taught else {}

    def trained() -> tuple[set[torch.dtype], list[dict[str, float]]]:
        engine = TorchEngine(engine_config(tmp_path, lora, **more), make_algorithm(algorithm))
        (held,) = [engine._model] if lora else engine._frozen
        with torch.no_grad():  # adapters begin with the rounding of their layers
            for name, parameter in engine._model.named_parameters():
                if "lora_" in name:
                    parameter.fill_(0.25)
        inputs_of, seen = engine._loss_inputs, []

        def noted(*given: Any) -> LossInputs:
            seen.append(inputs_of(*given))
            return seen[-1]

        engine._loss_inputs = noted  # type: ignore[method-assign]  # to see what the loss is given
        steps = [engine.train_step(batch, step) for step in (1, 2, 3)]
        said = {value.dtype for inputs in seen for value in vars(inputs).values() if isinstance(value, torch.Tensor)}
        assert said <= {torch.float32, torch.bool}
        return {p.dtype for p in held.parameters() if not p.requires_grad}, steps

    dtypes, steps = trained()
    monkeypatch.setattr(policies, "frozen_dtype", lambda path: "float32")
    assert dtypes == {torch.bfloat16}
    assert trained() == ({torch.float32}, steps)


class Largest(TorchDispatchMode):
    """Number of elements of the largest tensor that any function returns."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, torch.Tensor):
                self.num_elements = max(self.num_elements, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return found


OTHERS = [(name, {}) for name in ("mix", "decoupled_ppo", "reinforceplusplus")]


@pytest.mark.parametrize(("algorithm", "parts"), [("grpo", {}), ("grpo", {"kl_penalty_fn": "k2"}), *OTHERS])
def test_no_array_of_all_rows_by_the_longest_is_made(tmp_path: Path, algorithm: str, parts: dict[str, Any]) -> None:
    build_toy_model(tmp_path, hidden_size=4, intermediate_size=4, num_layers=1, num_heads=1)
    lengths = [1] * 1999 + [1000]
    batch = supervised_batch(
        [([1, *range(2, 2 + length)] if length == 1 else [1, *[5] * length], 1, None) for length in lengths],
        [f"t/0/{i // 4}/{i % 4}/0" for i in range(2000)],
        4,
    )
    random = np.random.default_rng(0)
    batch = replace(batch, rewards=random.random(2000).astype(np.float32), experts=np.arange(2000) // 4 % 5 == 0)
    overrides: dict[str, Any] = {"model__max_model_len": 2000, "algorithm__kl_loss_fn": "k2"}
    engine = TorchEngine(
        engine_config(tmp_path, None, **overrides), make_algorithm(algorithm, kl_loss_fn="k2", **parts)
    )
    with Largest() as largest:
        engine.train_step(batch, 1)
    # A pass has 1,000 tokens, and 258 logits for each.
    assert largest.num_elements <= 300_000


def test_an_unsavable_model_is_not_trained(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(DataError, match=r"policy cannot be saved after training: .*missing"):
        engine(models, "grpo")


def test_a_constant_kl_coefficient_stays_exact(models: Path) -> None:
    parts = {"kl_loss_fn_args": {"kl_coef": 0.001}}
    trained = engine(models, "grpo", parts)
    for step in (1, 2):
        trained.train_step(rollouts(seed=step), step)
    assert load(bytes(trained.state_files()["actor/kl_coefs.safetensors"]))["kl"].tolist() == [0.001, 0.001]


@pytest.mark.parametrize("seed", [0, 2**32, 2**63 - 1])
def test_every_seed_of_a_run_can_train(tmp_path: Path, seed: int) -> None:
    build_toy_model(tmp_path / "policy", **SIZES)
    engine = TorchEngine(engine_config(str(tmp_path / "policy"), seed=seed), make_algorithm("grpo"))
    assert engine.train_step(rollouts(seed=1), 1)["grad_norm"] > 0.0
