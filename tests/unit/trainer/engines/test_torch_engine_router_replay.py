"""Promises of router replay: the trainer uses the experts that the engine recorded, for any split of a batch."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rftdask.algorithm.compose import make_algorithm
from rftdask.buffer.batches.batch import TrainingBatch, batch_from_table, join_batches, supervised_batch
from rftdask.buffer.log.columns import experiences_to_table
from rftdask.buffer.log.schema import Experience
from rftdask.config.schema.model import LoraConfig
from rftdask.engines.base import GenerateRequest, SamplingParams
from rftdask.engines.transformers import TransformersEngine
from rftdask.errors import DataError
from rftdask.models.routers import Routers
from rftdask.models.toy import build_toy_model
from rftdask.processes.ranks import Ranks
from rftdask.trainer.engines.torch_engine import TorchEngine
from rftdask.trainer.model import load_policy, token_logprobs
from rftdask.trainer.packing import PackedRows, pack_rows
from rftdask.trainer.trainer import from_bytes, to_bytes
from tests.numerics import assert_same_logprobs
from tests.thread_ranks import in_threads
from tests.unit.engines.tiny_models import MIXTURE, save_tiny_mixture
from tests.unit.trainer.trainer_cases import engine_config

X = 2 * MIXTURE["num_experts_per_tok"]
PROMPTS = [tuple(range(3, 3 + length)) for length in (4, 9, 2, 6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield save_tiny_mixture(tmp_path_factory.mktemp("mixture"))
    torch.use_deterministic_algorithms(False)


def sampled(model: Path, dtype: str) -> list[Experience]:
    """Two rollouts of each prompt, as the engine records them."""
    engine = TransformersEngine(str(model), dtype=dtype)
    engine.record_experts()
    # Of different lengths, so that rows leave the batch while others are under way.
    requests = [
        GenerateRequest(prompt, SamplingParams(max_tokens=6 + 5 * number, ignore_eos=True), seed=10 * number + sibling)
        for number, prompt in enumerate(PROMPTS)
        for sibling in (0, 1)
    ]
    return [
        Experience(
            *("t", 0, number // 2, number % 2, 1),
            tokens=(*request.prompt_tokens, *answer.tokens),
            prompt_length=len(request.prompt_tokens),
            rollout_logprobs=answer.logprobs,
            reward=float(number % 2),
            routed_experts=np.frombuffer(b"".join(answer.routed_experts), np.int16).reshape(-1, X),
        )
        for number, (request, answer) in enumerate(zip(requests, engine.generate(requests), strict=True))
    ]


@pytest.fixture(scope="module")
def in_float32(model: Path) -> TrainingBatch:
    return batch_from_table(experiences_to_table(sampled(model, "float32")))


@pytest.fixture(scope="module")
def in_bfloat16(model: Path) -> TrainingBatch:
    return batch_from_table(experiences_to_table(sampled(model, "bfloat16")))


def packed(batch: TrainingBatch, ranks: Ranks | None = None) -> PackedRows:
    return pack_rows(
        batch.row_tokens(), batch.prompt_lengths, batch.temperatures, sequence=ranks, experts=batch.row_experts()
    )


def engine(model: Path, lora: LoraConfig | None = None, kl: str = "none", **more: Any) -> TorchEngine:
    more = {"deterministic": True, "algorithm__enable_router_replay": True, **more}
    return TorchEngine(engine_config(model, lora, **more), make_algorithm("grpo", kl_loss_fn=kl))


def without_experts(batch: TrainingBatch) -> TrainingBatch:
    return replace(batch, routed_experts=None)


def largest_gap(logprobs: torch.Tensor, batch: TrainingBatch) -> float:
    """Between [B, T] logprobs of the trainer and those recorded."""
    rows = zip(logprobs.tolist(), batch.row_logprobs(), strict=True)
    return max(float(np.abs(np.array(row[: len(own)]) - own).max()) for row, own in rows)


@torch.no_grad()
def test_with_the_same_weights_logprobs_are_the_engines(model: Path, in_float32: TrainingBatch) -> None:
    policy, _ = load_policy(str(model), "float32", "cpu")
    routers = Routers(policy)
    rows = packed(in_float32)
    routers.give(rows.experts_SX)
    logprobs, _ = token_logprobs(policy, rows)
    for row, own in zip(logprobs, in_float32.row_logprobs(), strict=True):
        assert_same_logprobs(row[: len(own)], torch.from_numpy(own.copy()))


@torch.no_grad()
def test_of_a_narrower_engine_the_experts_are_replayed(model: Path, in_bfloat16: TrainingBatch) -> None:
    policy, _ = load_policy(str(model), "float32", "cpu")
    rows = packed(in_bfloat16)
    own, _ = token_logprobs(policy, rows)
    routers = Routers(policy)
    routers.give(rows.experts_SX)
    replayed, _ = token_logprobs(policy, rows)
    same, given = routers.agreement().values()
    assert 0.5 < same / given < 1, "left to itself, the trainer sends some tokens elsewhere"
    # The remaining gap is the rounding of bfloat16.
    assert largest_gap(replayed, in_bfloat16) < 0.5 * largest_gap(own, in_bfloat16)


def test_of_older_weights_the_experts_are_replayed(model: Path, in_float32: TrainingBatch) -> None:
    trained = engine(model, algorithm__optimizer__lr=0.05)
    first = trained.train_step(in_float32, 1)
    assert first["router_agreement"] == 1.0, "the same weights, in the same data type"
    second = trained.train_step(in_float32, 2)
    assert 0.3 < second["router_agreement"] < 1.0
    rows = packed(in_float32)
    routers = trained._routers
    assert routers is not None
    given = rows.experts_SX
    assert given is not None
    with torch.no_grad():
        own, _ = trained._policy(rows=replace(rows, experts_SX=None))
        chosen = routers.taken()
        replayed, _ = trained._policy(rows=rows)
    known = given >= 0
    assert not torch.equal(chosen[known], given[known])
    assert not torch.equal(own, replayed)


def test_micro_batches_and_recomputation_change_nothing(model: Path, in_bfloat16: TrainingBatch) -> None:
    whole = engine(model)
    expected = whole.train_step(in_bfloat16, 1)
    cut = engine(model, trainer__micro_batch_size=1, trainer__gradient_checkpointing=True)
    told = cut.train_step(in_bfloat16, 1)
    for name in ("loss", "grad_norm", "mismatch_kl", "router_agreement"):
        assert told[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name
    left_out = TorchEngine(engine_config(model, deterministic=True), make_algorithm("grpo", kl_loss_fn="none"))
    other = left_out.train_step(without_experts(in_bfloat16), 1)
    assert "router_agreement" not in other and "routed_choices" not in told
    assert other["mismatch_kl"] > 2 * told["mismatch_kl"]


def test_split_sequences_take_the_same_experts(model: Path, in_bfloat16: TrainingBatch) -> None:
    def scores(ranks: Ranks) -> torch.Tensor:
        policy, _ = load_policy(str(model), "float32", "cpu")
        routers = Routers(policy)
        rows = packed(in_bfloat16, ranks)
        routers.give(rows.experts_SX)
        return token_logprobs(policy, rows)[0].detach()

    expected = scores(Ranks())
    for part in in_threads(2, scores):
        assert_same_logprobs(part, expected)


def test_the_reference_uses_its_own_routes(model: Path, in_float32: TrainingBatch) -> None:
    told = in_float32.routed_experts
    assert told is not None
    moved = replace(in_float32, routed_experts=np.where(told < 0, -1, 7 - told).astype(np.int16))
    for lora in (None, LoraConfig(lora_rank=2, lora_alpha=2.0, target_modules=["q_proj"])):
        trained = engine(model, lora, kl="k2")
        rows = packed(moved)
        assert trained._reference is not None
        with torch.no_grad():
            own, _ = trained._reference(rows=rows)
            policy, _ = trained._policy(rows=rows)
        assert largest_gap(own, in_float32) < 1e-4 < largest_gap(policy, in_float32)


def test_dataset_rows_have_no_replayed_experts(model: Path, in_float32: TrainingBatch) -> None:
    shown = supervised_batch([([5, 6, 7, 8], 2, None), ([9, 8, 7], 2, None)], ["shown 0", "shown 1"])
    joined = join_batches([in_float32, shown])
    assert joined.routed_experts is not None
    assert joined.routed_experts.shape == (len(joined.tokens), X)
    assert (joined.routed_experts[len(in_float32.tokens) :] == -1).all()
    assert engine(model).train_step(joined, 1)["router_agreement"] == 1.0


def test_a_batch_travels_between_ranks_with_its_experts(in_float32: TrainingBatch) -> None:
    there = from_bytes(to_bytes(in_float32))
    assert there.routed_experts is not None and in_float32.routed_experts is not None
    assert np.array_equal(there.routed_experts, in_float32.routed_experts)


def test_rollouts_without_fitting_experts_are_rejected(model: Path, in_float32: TrainingBatch, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"^t/0/0/0/0 has no record of the experts .*; set algorithm.enable_router_replay"
    ):
        engine(model).train_step(without_experts(in_float32), 1)
    assert in_float32.routed_experts is not None
    wider = replace(in_float32, routed_experts=np.repeat(in_float32.routed_experts, 2, axis=1))
    with pytest.raises(DataError, match="record 8 experts per token, the policy takes 4"):
        engine(model).train_step(wider, 1)
    build_toy_model(tmp_path, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2)
    with pytest.raises(DataError, match=r"enable_router_replay: Qwen2ForCausalLM has no routers of experts; leave it"):
        engine(tmp_path)
