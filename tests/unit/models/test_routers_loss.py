"""Promises of the router loss: it equals that of transformers, terms add up to a mean over the tokens, experts are used
more evenly, and a model without experts is rejected.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rftdask.algorithm.compose import make_algorithm
from rftdask.buffer.batches.batch import TrainingBatch, supervised_batch
from rftdask.errors import DataError
from rftdask.models.toy import build_toy_model
from rftdask.trainer.engines.torch_engine import TorchEngine
from tests.numerics import shifted_seed
from tests.unit.trainer.trainer_cases import engine_config

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS, TAKEN = 4, 2


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A mixture of experts whose routers send most tokens to the same two."""
    folder = tmp_path_factory.mktemp("experts")
    build_toy_model(folder, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2)
    vocab_size = transformers.AutoConfig.from_pretrained(folder).vocab_size
    torch.manual_seed(shifted_seed(0))
    config = transformers.Qwen3MoeConfig(
        **SIZES,
        vocab_size=vocab_size,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_experts=EXPERTS,
        num_experts_per_tok=TAKEN,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    yield folder
    torch.use_deterministic_algorithms(False)


def engine(folder: Path, **overrides: Any) -> TorchEngine:
    config = engine_config(folder, **{"deterministic": True, **overrides})
    return TorchEngine(config, make_algorithm("sft"))


def texts(num_rows: int) -> TrainingBatch:
    random = np.random.default_rng(shifted_seed(0))
    rows = [(random.integers(2, 200, 9).tolist(), 3, None) for _ in range(num_rows)]
    return supervised_batch(rows, [f"row/{number}" for number in range(num_rows)])


def test_the_loss_of_a_pass_is_that_of_transformers(experts: Path) -> None:
    batch, coef = texts(1), 0.5
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(experts, dtype=torch.float32)
    out = model(input_ids=torch.tensor(batch.tokens, dtype=torch.int64)[None], output_router_logits=True)
    assert out.aux_loss is not None
    told = engine(experts, trainer__router_aux_loss_coef=coef).train_step(batch, 1)
    assert told["router_aux_loss"] == pytest.approx(coef * float(out.aux_loss.detach()), rel=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_terms_add_up_and_loss_stays_the_algorithms(experts: Path, checkpointing: bool) -> None:
    batch, settings = texts(4), {"trainer__gradient_checkpointing": checkpointing}
    alone = [engine(experts, trainer__router_aux_loss_coef=0.5).train_step(texts(4), 1)["router_aux_loss"]]
    cut = engine(experts, trainer__router_aux_loss_coef=0.5, trainer__micro_batch_size=1, **settings)
    told = cut.train_step(batch, 1)
    assert told["router_aux_loss"] == pytest.approx(alone[0], rel=0.2), "a mean over the passes"
    without = engine(experts, **settings)
    assert without.train_step(batch, 1)["loss"] == pytest.approx(told["loss"], rel=1e-6)
    assert without.weights() != cut.weights()


def test_experts_are_used_more_evenly(experts: Path) -> None:
    balanced = engine(experts, trainer__router_aux_loss_coef=1.0)
    used = [balanced.train_step(texts(8), step)["router_aux_loss"] for step in range(1, 13)]
    assert used[0] > 1.02 * TAKEN and used[-1] - TAKEN < 0.5 * (used[0] - TAKEN)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    build_toy_model(tmp_path, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2)
    with pytest.raises(DataError, match=r"router_aux_loss_coef 0.1: Qwen2ForCausalLM has no routers of experts"):
        engine(tmp_path, trainer__router_aux_loss_coef=0.1)
