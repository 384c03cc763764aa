"""Promise: a run whose engine samples from another policy than the trainer begins with ends before its first update."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rftdask.algorithm.compose import make_algorithm
from rftdask.algorithm.losses.base import LossInputs
from rftdask.buffer.batches.batch import TrainingBatch
from rftdask.errors import MismatchError
from rftdask.processes.ranks import Ranks
from rftdask.trainer.engines.base import mismatch
from rftdask.trainer.engines.strategies.base import DDP
from rftdask.trainer.engines.torch_engine import TorchEngine
from tests.thread_ranks import in_threads
from tests.unit.trainer.trainer_cases import engine_config, rollouts

FACTOR = 3.0
"""Ratio of the probabilities of engine and trainer."""


def engine(model: Path, name: str = "grpo", ranks: Ranks | None = None, **overrides: Any) -> TorchEngine:
    config = engine_config(model, **overrides)
    made = TorchEngine(config, make_algorithm(name, kl_loss_fn="none"), None if ranks is None else DDP(ranks))
    made.compares_first_update = True
    return made


def sampled(model: Path, share: float, num_groups: int = 6, factor: float = FACTOR) -> TrainingBatch:
    """Rollouts whose logprobs are those of the model, except for a share of the tokens."""
    batch = rollouts(num_groups)
    tested = engine(model)
    device_batch = tested._device_batch(batch)
    logprobs = tested._plan(batch, np.arange(len(batch))).score_tokens(device_batch, lambda **x: tested._policy(**x)[0])
    logprobs[: round(share * len(logprobs))] += math.log(factor)
    return replace(batch, rollout_logprobs=logprobs.numpy())


def test_the_share_counts_sampled_tokens_off_by_a_factor_of_two() -> None:
    gaps = torch.tensor([[0.0, 0.6, -0.6, 0.8, -0.8, 9.0, 9.0], [9.0] * 7])
    inputs = LossInputs(
        policy_logprobs_BT=gaps,
        rollout_logprobs_BT=torch.zeros_like(gaps),
        loss_mask_BT=torch.tensor([[True] * 6 + [False], [True] * 7]),
        token_weights_BT=torch.ones_like(gaps),
        expert_mask_B=torch.tensor([False, True]),
    )
    sums = {name: float(value) for name, value in mismatch(inputs).items()}
    assert (sums["mismatch_share"], sums["mismatch_tokens"]) == (3.0, 6.0)


def test_a_step_reports_the_share_of_its_first_update(model: Path) -> None:
    tested = engine(model, trainer__ppo_epochs=2)
    tested.compares_first_update = False
    metrics = tested.train_step(sampled(model, 0.5), 1)
    assert metrics["mismatch_share"] == pytest.approx(0.5, abs=0.01)
    assert "mismatch_tokens" not in metrics


@pytest.mark.parametrize("factor", [FACTOR, 1 / FACTOR])
def test_another_policy_is_refused_before_any_update(model: Path, factor: float) -> None:
    tested = engine(model)
    before = tested.weights()
    with pytest.raises(MismatchError, match=r"step 1: for 30% of the \d+ tokens .* run again under another name"):
        tested.train_step(sampled(model, 0.3, factor=factor), 1)
    assert tested.weights() == before


def test_rounding_and_few_tokens_are_not_refused(model: Path) -> None:
    assert engine(model).train_step(sampled(model, 0.15), 1)["mismatch_share"] > 0.1
    assert engine(model).train_step(sampled(model, 1.0, factor=1.9), 1)["mismatch_share"] == 0.0
    few = sampled(model, 1.0, num_groups=2)
    assert few.num_trained.sum() < 64
    assert engine(model).train_step(few, 1)["mismatch_share"] == 1.0


def test_only_the_first_update_is_compared(model: Path) -> None:
    tested = engine(model)
    tested.train_step(sampled(model, 0.0), 1)
    assert tested.train_step(sampled(model, 1.0), 2)["mismatch_share"] > 0.9
    off_policy = sampled(model, 1.0)
    newer = replace(off_policy, min_policy_versions=np.ones(len(off_policy), np.int64))
    engine(model).train_step(newer, 1)  # of another trainer


def test_the_first_update_after_a_warm_up_of_the_critic_is_compared(model: Path) -> None:
    tested, batch = engine(model, "ppo", trainer__critic_warmup=1), sampled(model, 1.0)
    assert "mismatch_share" not in tested.train_step(batch, 1)
    with pytest.raises(MismatchError, match="step 2"):
        tested.train_step(batch, 2)


def test_all_ranks_refuse_another_policy(model: Path) -> None:
    batch = sampled(model, 0.3)

    def refused(ranks: Ranks) -> str:
        with pytest.raises(MismatchError) as error:
            engine(model, ranks=ranks).train_step(batch, 1)
        return str(error.value)

    texts = in_threads(2, refused)
    assert texts[0] == texts[1] and f"of the {int(batch.num_trained.sum())} tokens" in texts[0]
