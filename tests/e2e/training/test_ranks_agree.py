"""Ranks that share a model compute what one rank computes, in float32 on a CPU, up to a relative 1e-5."""

import hashlib
import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from rftdask.algorithm.compose import make_algorithm
from rftdask.buffer.batches.batch import TrainingBatch, join_batches, supervised_batch
from rftdask.config.schema.trainer import TrainerConfig
from rftdask.models.toy import build_toy_model
from rftdask.processes.ranks import Ranks
from rftdask.trainer import model as policies
from rftdask.trainer.engines.strategies.base import DDP, Strategy
from rftdask.trainer.engines.strategies.fsdp2 import FSDP2
from rftdask.trainer.engines.strategies.tensor import TensorParallel
from rftdask.trainer.engines.torch_engine import TorchEngine
from rftdask.trainer.model import token_logprobs
from tests.e2e.gloo_ranks import run_ranks
from tests.numerics import shifted_seed
from tests.unit.engines.tiny_models import save_tiny_mixture
from tests.unit.trainer.trainer_cases import engine_config

ALGORITHMS = ("grpo", "ppo", "mix", "dpo", "sft")
STRATEGIES = ("ddp", "fsdp2")
SPLITS = (None, 1, 3)
TOLERANCE = 1e-5
RATE = 100.0
"""Learning rate of plain descent: so large that the weights after a step show the gradient rather than their own
rounding.
"""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "activations again": ("grpo", {"trainer__gradient_checkpointing": True}),
    "adapters": ("grpo", {"model__lora_configs": [{"lora_rank": 4}]}),
    "a KL baseline": ("kto", {"algorithm__optimizer__lr": 1e-2}),
    # At 1e-2 its gradients agree to 2e-7 and its weights to 1e-5: Adam divides elements near 0 by tiny numbers.
    "a head of one number": ("reward_model", {"algorithm__optimizer__lr": 3e-3}),
    "several updates": (
        "grpo",
        {
            "trainer__ppo_epochs": 2,
            "trainer__ppo_mini_batch_size": 16,  # of 32: half a batch
            "algorithm__bypass_old_logprobs": False,
        },
    ),
}
PAIRS = (("ddp", 2, 2), ("fsdp2", 2, 2))
SPLIT_GANGS = {
    "grpo": (*PAIRS, ("ddp", 4, 2), ("fsdp2", 4, 4)),
    "gspo": (*PAIRS, ("fsdp2", 4, 2)),
    "dpo": PAIRS,
    "ppo": PAIRS,
}
"""Algorithm -> (strategy, ranks, ranks of a group). gspo and dpo have losses of whole rows, ppo a critic."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    # Widths that four ranks do not divide: 18 and 33 rows.
    build_toy_model(folder, hidden_size=18, intermediate_size=33, num_layers=2, num_heads=3)
    return str(folder)


@pytest.fixture(scope="module")
def model_of_four_heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model-of-four-heads")
    build_toy_model(folder, hidden_size=16, intermediate_size=34, num_layers=2, num_heads=4)
    return str(folder)


@pytest.fixture(scope="module")
def model_of_normed_heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model-of-normed-heads")
    build_toy_model(folder)
    torch.manual_seed(shifted_seed(1))
    sizes = {"vocab_size": 201, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 4}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def strategy_of(name: str, ranks: Ranks) -> Strategy:
    if name == "fsdp2":
        return FSDP2(ranks, torch.device("cpu"), TrainerConfig(prefetch_layers=1))
    return DDP(ranks) if name == "ddp" else Strategy(ranks)


def engine(
    model: str, algorithm: str, strategy: Strategy, *, sequence: Ranks | None = None, **overrides: Any
) -> TorchEngine:
    defaults = {
        "deterministic": True,
        "model__max_response_tokens": 9,
        "algorithm__optimizer__lr": 1e-3,
        "algorithm__optimizer__weight_decay": 0.1,
        "trainer__critic__lr": 1e-3,
    }
    config = engine_config(model, **{**defaults, **overrides})
    return TorchEngine(config, make_algorithm(algorithm), strategy, sequence)


def batch_for(algorithm: str, seed: int, num_groups: int = 3) -> TrainingBatch:
    """Return 12 rows of very different lengths, and two more for mix."""
    random = np.random.default_rng(shifted_seed(seed))
    size = {"dpo": 2, "reward_model": 2, "kto": 1}.get(algorithm, 4)
    count = num_groups * size
    rows = [(random.integers(2, 200, 2 + random.integers(1, 10)).tolist(), 2, None) for _ in range(count)]
    batch = supervised_batch(rows, [f"t/0/{i // size}/{i % size}/0" for i in range(count)], size)
    if algorithm == "kto":
        return replace(batch, rewards=np.arange(count, dtype=np.float32) % 2)
    if algorithm in ("sft", "dpo", "reward_model"):
        return batch
    if algorithm == "jsd":
        batch = replace(batch, uids=(*(f"u/{uid}" for uid in batch.uids[:size]), *batch.uids[size:]))
    own = replace(
        batch,
        rewards=random.random(count).astype(np.float32),
        rollout_logprobs=-5.0 - random.random(len(batch.rollout_logprobs)).astype(np.float32),
        experts=np.zeros(count, bool),
        # The replayed experts of a tiny mixture: two of eight in both layers.
        routed_experts=random.permuted(np.tile(np.arange(8), (len(batch.tokens), 2, 1)), axis=2)[:, :, :2]
        .reshape(-1, 4)
        .astype(np.int16),
    )
    shown = supervised_batch([([5, 6, 7, 8], 2, None), ([9, 8, 7], 2, None)], ["dataset:x/0/0", "dataset:x/1/1"])
    return join_batches([own, shown]) if algorithm == "mix" else own


def given(engine: TorchEngine, batch: TrainingBatch, ranks: Ranks, step: int) -> TrainingBatch:
    """Return the part of a batch that a rank receives: one of several has only the tokens of its own rows."""
    rows = engine.rows_to_compute(batch.holding([]), step) if ranks.size > 1 else None
    return batch if rows is None else batch.holding(rows)


def trained(
    model: str, algorithm: str, strategy: Strategy, **options: Any
) -> tuple[list[dict[str, float]], Any, dict[str, torch.Tensor]]:
    """Return the metrics of two steps (for sft and dpo those of held-out rows), the logits afterwards, the files of
    this rank, and all weights.
    """
    made = engine(model, algorithm, strategy, **options)
    metrics = [made.train_step(given(made, batch_for(algorithm, seed), strategy.ranks, seed), seed) for seed in (1, 2)]
    if algorithm in ("sft", "dpo"):
        metrics.append(made.evaluate([batch_for(algorithm, seed) for seed in (3, 4)]))
    if algorithm != "reward_model":
        said = made.fingerprint().logprobs
        metrics.append({f"logprob_{n}": value for n, value in enumerate(value for row in said for value in row)})
    if not isinstance(strategy, FSDP2):
        whole = [p.detach() for p in made._model.parameters() if not isinstance(p, DTensor)]
        held = b"".join(tensor.numpy().tobytes() for tensor in whole)
        hashes = strategy.ranks.all_gather(hashlib.sha256(held).hexdigest())
        assert len(set(hashes)) == 1, "ranks hold different weights"
    files = made.state_files()
    own = {name: data for name, data in files.items() if "model" in Path(name).name}  # also of adapters and a critic
    return metrics, files, weights_of({name: d for part in exchange(strategy.ranks, own) for name, d in part.items()})


def gradient(model: str, algorithm: str, strategy: Strategy, **options: Any) -> dict[str, torch.Tensor]:
    """Return the gradient of the policy, from a step of plain descent."""
    plain = {f"algorithm__optimizer__{key}": value for key, value in (("lr", RATE), ("weight_decay", 0.0))}
    plain |= {"algorithm__optimizer__optimizer_type": "sgd", "trainer__grad_clip": 1e9, **options}
    made, states = engine(model, algorithm, strategy, **plain), []
    for step in (0, 1):
        if step:
            made.train_step(given(made, batch_for(algorithm, step), strategy.ranks, step), step)
        own = {name: bytes(data) for name, data in made.state_files().items() if is_policy(name)}
        states.append(weights_of({n: data for part in exchange(strategy.ranks, own) for n, data in part.items()}))
    return {name: (states[0][name] - states[1][name]) / RATE for name in states[0]}


def is_policy(file: str) -> bool:
    return file.startswith("actor/") and "model" in Path(file).name  # or adapter_model


def compare(gangs: dict[int, Ranks], model: str) -> dict[str, float]:
    """Return the largest relative difference from one rank, by case and quantity; on rank 0 of each gang."""
    differences: dict[str, float] = {}
    turns = itertools.cycle(SPLITS)
    for algorithm in ALGORITHMS:
        alone, _, expected = trained(model, algorithm, Strategy(gangs[1]))
        descent = gradient(model, algorithm, Strategy(gangs[1]))
        for number, name in enumerate(STRATEGIES):
            for size in (2, 4):
                split = next(turns)  # alternating, so that each strategy and each size occurs
                if size == 2 and dist.get_rank() // 2 != number:
                    continue  # the other two ranks run it
                down = gradient(model, algorithm, strategy_of(name, gangs[size]))
                if gangs[size].is_rank0:
                    differences[f"gradient: {algorithm}, {name}, {size} ranks"] = weight_difference(down, descent)
                found, _, weights = trained(
                    model, algorithm, strategy_of(name, gangs[size]), trainer__micro_batch_size=split
                )
                assert [m.keys() for m in found] == [m.keys() for m in alone]
                if gangs[size].is_rank0:
                    case = f"{algorithm}, {name}, {size} ranks, {split} rows a pass"
                    differences[f"metrics: {case}"] = metric_difference(found, alone)
                    differences[f"weights: {case}"] = weight_difference(weights, expected)
    return differences


def compare_variants(gangs: dict[int, Ranks], model: str) -> dict[str, float]:
    """Like `compare`, for further options."""
    differences: dict[str, float] = {}
    # One step, also for options about several updates or their size.
    plain = {"algorithm__optimizer__lr": RATE, "trainer__ppo_epochs": 1, "trainer__ppo_mini_batch_size": None}
    for variant, (algorithm, options) in VARIANTS.items():
        alone, _, expected = trained(model, algorithm, Strategy(gangs[1]), **options)
        descent = gradient(model, algorithm, Strategy(gangs[1]), **{**options, **plain})
        for name in STRATEGIES:
            more = {"trainer__micro_batch_size": 3, **options}
            found, _, weights = trained(model, algorithm, strategy_of(name, gangs[2]), **more)
            down = gradient(model, algorithm, strategy_of(name, gangs[2]), **{**more, **plain})
            if gangs[2].is_rank0:
                differences[f"gradient: {variant}, {name}"] = weight_difference(down, descent)
                differences[f"metrics: {variant}, {name}"] = metric_difference(found, alone)
                differences[f"weights: {variant}, {name}"] = weight_difference(weights, expected)
    return differences


def compare_splits(gangs: dict[int, Ranks], model: str) -> dict[str, float]:
    """Like `compare`, for groups of ranks that split sequences; with one row per pass, 4 ranks also split 3 tokens."""
    differences: dict[str, float] = {}
    for algorithm, cases in SPLIT_GANGS.items():
        alone, _, expected = trained(model, algorithm, Strategy(gangs[1]))
        descent = gradient(model, algorithm, Strategy(gangs[1]))
        for name, size, parts in cases:
            if size == 2 and dist.get_rank() // 2 != STRATEGIES.index(name):
                continue  # the other two ranks run it
            options = (
                {"trainer__micro_batch_size": 1, "trainer__gradient_checkpointing": True}
                if parts == 4
                else {"trainer__micro_batch_size": 3}
            )
            sequence = gangs[size].neighbors(parts)
            found, _, weights = trained(model, algorithm, strategy_of(name, gangs[size]), sequence=sequence, **options)
            assert [m.keys() for m in found] == [m.keys() for m in alone]
            down = gradient(model, algorithm, strategy_of(name, gangs[size]), sequence=sequence, **options)
            if gangs[size].is_rank0:
                case = f"{algorithm}, {name}, {size} ranks, {parts} split a row"
                differences[f"gradient: {case}"] = weight_difference(down, descent)
                differences[f"metrics: {case}"] = metric_difference(found, alone)
                differences[f"weights: {case}"] = weight_difference(weights, expected)
    return differences


def compare_cuts(gangs: dict[int, Ranks], models: list[str]) -> dict[str, float]:
    """Like `compare`, for two ranks that split layers, for two groups of two, and for two whose parts are sharded over
    the groups; and the state loaded from what they saved.
    """
    differences: dict[str, float] = {}
    across = gangs[4].across(2)
    replay: dict[str, Any] = {"algorithm__enable_router_replay": True}
    for (algorithm, options), model in zip((("ppo", {}), ("grpo", {}), ("grpo", replay)), models, strict=True):
        alone, _, expected = trained(model, algorithm, Strategy(gangs[1]), **options)
        descent = gradient(model, algorithm, Strategy(gangs[1]), **options)
        for name, size in (("ddp", 2), ("ddp", 4), ("fsdp2", 4)) if algorithm == "ppo" else (("ddp", 4), ("fsdp2", 4)):
            more = {"trainer__micro_batch_size": 3, "trainer__gradient_checkpointing": size == 4}
            found, files, weights = trained(model, algorithm, cut_in_two(gangs, size, across, name), **more, **options)
            if size == 4:
                held = {name: data for part in exchange(gangs[4], files) for name, data in part.items()}
                back = engine(model, algorithm, strategy_of(name, gangs[4]), seed=8)
                back.load_state_files(held)
                passed_on = {n: d for part in exchange(gangs[4], back.state_files()) for n, d in part.items()}
                cut = engine(model, algorithm, cut_in_two(gangs, size, across, name), seed=7)
                cut.load_state_files(passed_on)
                assert cut.state_files() == files, "what is read at other cuts is not what was saved"
            down = gradient(model, algorithm, cut_in_two(gangs, size, across, name), **more, **options)
            if gangs[size].is_rank0:
                case = f"{Path(model).name}, {name}, {size} ranks"
                differences[f"gradient: {case}"] = weight_difference(down, descent)
                differences[f"metrics: {case}"] = metric_difference(found, alone)
                differences[f"weights: {case}"] = weight_difference(weights, expected)
    return differences


def compare_students(gangs: dict[int, Ranks], model: str) -> dict[str, float]:
    """Like `compare`, for two teachers, one with a third of the rows, and for every way to share a model."""
    teachers = [{"model_path": f"{model}-1", "teacher_for": ["u"]}, {"model_path": f"{model}-2"}]
    students: dict[str, Any] = {"algorithm__algorithm_type": "jsd", "explorer__auxiliary_models": teachers}
    alone, _, expected = trained(model, "jsd", Strategy(gangs[1]), **students)
    differences: dict[str, float] = {}
    # Four positions at a time, so that the backward pass also uses both heads.
    policies.token_logprobs = partial(token_logprobs, max_logits=4 * 4 * 258)
    ways = {name: {"strategy": strategy_of(name, gangs[2])} for name in STRATEGIES}
    ways["cut layers"] = {"strategy": cut_in_two(gangs, 2, gangs[1])}
    ways["cut and spread"] = {"strategy": cut_in_two(gangs, 2, gangs[1], "fsdp2")}
    ways["split rows"] = {"strategy": strategy_of("fsdp2", gangs[2]), "sequence": gangs[2].neighbors(2)}
    for name, options in ways.items():
        found, _, weights = trained(model, "jsd", **options, trainer__micro_batch_size=3, **students)
        if gangs[2].is_rank0:
            differences[f"metrics: {name}"] = metric_difference(found, alone)
            differences[f"weights: {name}"] = weight_difference(weights, expected)
    return differences


def cut_in_two(gangs: dict[int, Ranks], size: int, across: Ranks, name: str = "ddp") -> Strategy:
    cpu = torch.device("cpu")
    cut = TensorParallel(gangs[size], gangs[2], across if size == 4 else gangs[1], cpu)
    return cut if name == "ddp" else FSDP2(gangs[size], cpu, TrainerConfig(), cut)


def weights_of(files: dict[str, bytes]) -> dict[str, torch.Tensor]:
    return {
        f"{file.partition('/')[0]}/{name}": tensor
        for file in files
        for name, tensor in load(bytes(files[file])).items()
    }


def metric_difference(found: list[dict[str, float]], expected: list[dict[str, float]]) -> float:
    return max(
        abs(ours[key] - theirs[key]) / max(abs(theirs[key]), 1e-3)
        for ours, theirs in zip(found, expected, strict=True)
        for key in ("loss", "grad_norm", *(k for k in theirs if k.startswith(("critic_", "logprob_"))))
        if key in theirs
    )


def weight_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of weights or of a gradient. A step of Adam is about 1e-3 per element, and the
    largest weight is 1.
    """
    assert found.keys() == expected.keys()
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    return max(float((found[n] - expected[n]).abs().max()) for n in expected) / largest


def save_and_load(gangs: dict[int, Ranks], model: str) -> dict[str, bool]:
    """Return what fsdp2 on 4 ranks saved, loaded by every kind of gang and saved again."""
    four = strategy_of("fsdp2", gangs[4])
    _, own, _ = trained(model, "ppo", four)
    files = {name: data for part in exchange(gangs[4], own) for name, data in part.items()}
    made: dict[str, bool] = {}
    for name, size in (("single", 1), ("ddp", 2), ("fsdp2", 2), ("fsdp2", 4)):
        again = engine(model, "ppo", strategy_of(name, gangs[size]), seed=9)
        again.load_state_files(files)
        theirs = {n: d for part in exchange(gangs[size], again.state_files()) for n, d in part.items()}
        back = engine(model, "ppo", four, seed=8)
        back.load_state_files(theirs)
        made[f"{name}, {size} ranks"] = back.state_files() == own
    return made


def exchange(ranks: Ranks, files: dict[str, bytes]) -> list[dict[str, bytes]]:
    parts = ranks.all_gather({name: data.hex() for name, data in files.items()})
    return [{name: bytes.fromhex(data) for name, data in part.items()} for part in parts]


def test_several_ranks_compute_the_same_as_one_rank(model: str, tmp_path: Path) -> None:
    merged = {case: value for part in run_ranks(4, tmp_path, compare, model) for case, value in part.items()}
    assert len(merged) == len(ALGORITHMS) * len(STRATEGIES) * 2 * 3
    worst = dict(sorted(merged.items(), key=lambda item: -item[1])[:5])
    assert max(worst.values()) <= TOLERANCE, worst


@pytest.mark.long
def test_adapters_and_recomputed_activations_agree_as_well(model: str, tmp_path: Path) -> None:
    differences = [part for part in run_ranks(2, tmp_path, compare_variants, model) if part]
    assert len(differences[0]) == 3 * len(VARIANTS) * len(STRATEGIES)
    assert max(differences[0].values()) <= TOLERANCE, "\n".join(f"{k} {v:.2e}" for k, v in differences[0].items())


@pytest.mark.long
def test_ranks_that_split_sequences_agree_with_one_rank(model_of_four_heads: str, tmp_path: Path) -> None:
    found = run_ranks(4, tmp_path, compare_splits, model_of_four_heads)
    merged = {case: value for part in found for case, value in part.items()}
    assert len(merged) == 3 * sum(len(cases) for cases in SPLIT_GANGS.values())
    worst = dict(sorted(merged.items(), key=lambda item: -item[1])[:5])
    assert max(worst.values()) <= TOLERANCE, worst


@pytest.mark.long
def test_ranks_that_split_layers_agree_with_one_rank(
    model_of_four_heads: str, model_of_normed_heads: str, tmp_path: Path
) -> None:
    mixture = str(save_tiny_mixture(tmp_path / "mixture"))
    found = run_ranks(4, tmp_path, compare_cuts, [model_of_four_heads, model_of_normed_heads, mixture])
    assert len(found[0]) == 21
    assert max(found[0].values()) <= TOLERANCE, found[0]


@pytest.mark.long
def test_students_of_two_teachers_learn_the_same_on_ranks(model_of_four_heads: str, tmp_path: Path) -> None:
    for seed in (1, 2):
        sizes = {"hidden_size": 16, "intermediate_size": 34, "num_layers": 2, "num_heads": 4}
        build_toy_model(f"{model_of_four_heads}-{seed}", seed=seed, **sizes)
    differences, _ = run_ranks(2, tmp_path, compare_students, model_of_four_heads)
    assert len(differences) == 10
    assert max(differences.values()) <= TOLERANCE, differences


def test_a_checkpoint_of_four_ranks_loads_on_any_number(model: str, tmp_path: Path) -> None:
    for found in run_ranks(4, tmp_path, save_and_load, model):
        assert found == {"single, 1 ranks": True, "ddp, 2 ranks": True, "fsdp2, 2 ranks": True, "fsdp2, 4 ranks": True}
