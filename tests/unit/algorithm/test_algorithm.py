"""Promises of the terms of a loss: aggregation, correction of the ratio, KL penalty on rewards, entropy bonus."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rftdask.algorithm.advantages.base import AdvantageInputs
from rftdask.algorithm.aggregation import row_weights
from rftdask.algorithm.compose import make_algorithm
from rftdask.algorithm.correction import Correction
from tests.unit.algorithm import algorithm_cases
from tests.unit.algorithm.algorithm_cases import inputs


def close(expected: float | list[float]) -> Any:
    return pytest.approx(expected, abs=2e-6)


def masked_mean(values: list[list[float]], lengths: list[int], mode: str, max_tokens: int | None = None) -> float:
    mask = torch.arange(len(values[0]))[None] < torch.tensor(lengths)[:, None]
    weights = row_weights(mask.sum(-1), mode, max_tokens=max_tokens, dtype=torch.float64)
    return float((algorithm_cases.rows(values) * mask * weights[:, None]).sum())


def test_aggregations() -> None:
    openrlhf = ([[1.0, 2.0, 0.0], [3.0, 4.0, 5.0], [7.0, 0.0, 0.0]], [2, 3, 1])
    assert masked_mean(*openrlhf, "token-mean") == close(22 / 6)
    uneven = ([[1.0, 3.0, 9.0], [2.0, 4.0, 0.0], [8.0, 0.0, 0.0]], [2, 2, 1])
    assert masked_mean(*uneven, "seq-mean-token-mean") == close(4.333333)
    ours = ([[-1.0, 2.0, 0.0], [0.5, 1.0, -3.0]], [2, 3])
    assert masked_mean(*ours, "token-mean") == close(-0.1)
    assert masked_mean(*ours, "seq-mean-token-sum") == close(-0.25)
    assert masked_mean(*ours, "seq-mean-token-mean") == close(0.0)
    assert masked_mean(*ours, "seq-mean-token-sum-norm", 4) == close(-0.0625)


def correction(log_w: list[float], mask: list[int] | None = None, **args: object) -> list[float]:
    batch = inputs([0.0] * len(log_w), [-x for x in log_w], mask=mask)
    factors, _ = Correction(**args).factors(batch)  # type: ignore[arg-type]
    return factors.flatten().tolist()


def test_icepop_drops_weights_outside_its_band() -> None:
    log_w = [-0.5, 2.5, -0.2]
    weights = correction(log_w, method="mask", low=0.5, high=5.0)
    assert weights == close([0.606531, 0.0, 0.818731])
    mean = -sum(w * a for w, a in zip(weights, [1.0, -1.0, 2.0], strict=True)) / 3
    assert mean == close(-0.747997)


def test_truncated_importance_sampling_by_token_and_sequence() -> None:
    log_w = [0.5, -0.5, 1.0]
    batch = inputs([-1.0, -1.5, -0.5], [-1.5, -1.0, -1.5])
    factors, metrics = Correction(method="truncate", high=2.0).factors(batch)
    assert factors.flatten().tolist() == close([1.648721, 0.606531, 2.0])
    assert metrics["is_clip_frac"].item() == close(1 / 3)
    assert correction(log_w, method="truncate", level="sequence", high=5.0) == close([math.e] * 3)
    assert correction(log_w, [1, 0, 1], method="truncate", level="sequence", high=10.0) == close([4.481689] * 3)
    assert correction([1.0, 1.0, 1.0], method="truncate", level="sequence", high=5.0) == close([5.0] * 3)
    assert correction([1.0, 0.0, 0.1], method="mask", high=2.0) == close([0.0, 1.0, math.exp(0.1)])


def test_geometric_mask_keeps_or_drops_whole_sequences() -> None:
    band = {"method": "geometric_mask", "low": 0.9, "high": 1.1}
    assert correction([0.1, -0.1, 0.0], **band) == [1.0, 1.0, 1.0]
    assert correction([0.3, 0.3, 0.0], **band) == [0.0, 0.0, 0.0]


def test_rollout_correction_applies_only_to_the_policy_loss() -> None:
    more = {
        "proximal_logprobs_BT": torch.tensor([[-1.0, -1.0]]).double(),
        "ref_logprobs_BT": torch.zeros(1, 2).double(),
    }
    batch = inputs([-1.0, -1.0], [-1.0 - math.log(1.5), -1.0 - math.log(3.0)], [1.0, 1.0], **more)
    parts = {"kl_loss_fn": "k2", "kl_loss_fn_args": {"kl_coef": 0.1}}
    algorithm = make_algorithm("grpo", rollout_correction={"method": "mask", "high": 2.0}, **parts)
    loss, metrics = algorithm.compute_loss(batch)
    assert loss.item() == pytest.approx(-(1.5 + 0.0) / 2 + 0.1 * 0.5)
    assert metrics["is_clip_frac"].item() == 0.5


def test_the_entropy_bonus_reaches_the_entropy() -> None:
    algorithm = make_algorithm("ppo", entropy_loss_fn="default", entropy_loss_fn_args={"entropy_coef": 0.01})
    batch = algorithm_cases.with_weights(algorithm_cases.random_batch(0), algorithm)
    loss, _ = algorithm.compute_loss(batch)
    assert batch.entropy_BT is not None
    (grad,) = torch.autograd.grad(loss, batch.entropy_BT)
    torch.testing.assert_close(grad, -0.01 * batch.token_weights_BT)


@pytest.mark.parametrize("algorithm_type", ["grpo", "reinforceplusplus"])
def test_the_kl_penalty_lowers_the_rewards_before_the_advantages(algorithm_type: str) -> None:
    algorithm = make_algorithm(algorithm_type, kl_penalty_fn="k1", kl_penalty_fn_args={"kl_coef": 0.5})
    assert algorithm.use_reference and algorithm.advantage_fn is not None
    inputs = algorithm_cases.random_advantage_inputs(8)
    assert inputs.rollout_logprobs_Q is not None and inputs.ref_logprobs_Q is not None
    assert inputs.loss_mask_Q is not None
    kl = torch.where(inputs.loss_mask_Q, inputs.rollout_logprobs_Q - inputs.ref_logprobs_Q, 0.0)
    # Summed over the two turns, since the penalty applies to the reward of the rollout.
    of_rollout = kl.view(-1, 2 * algorithm_cases.WIDTH).sum(-1).repeat_interleave(2)
    penalized: dict[str, Any] = {"rewards_N": inputs.rewards_N - 0.5 * of_rollout}
    if algorithm_type == "reinforceplusplus":
        penalized = {"token_rewards_Q": inputs.token_rewards() - 0.5 * kl}
    want = algorithm.advantage_fn(replace(inputs, **penalized))
    got = algorithm.compute_advantages(inputs)
    torch.testing.assert_close(got.per_token(inputs), want.per_token(inputs))
    assert got.metrics["kl_penalty"] == pytest.approx((kl.sum() / inputs.loss_mask_Q.sum()).item(), rel=1e-5)
    with pytest.raises(ValueError, match="ref_logprobs_Q"):
        algorithm.compute_advantages(replace(inputs, ref_logprobs_Q=None))


def test_the_kl_penalty_covers_all_turns_of_a_rollout() -> None:
    algorithm = make_algorithm(
        "grpo", kl_penalty_fn="k1", kl_penalty_fn_args={"kl_coef": 1.0}, advantage_fn_args={"std": "none"}
    )
    # One task: a rollout of two turns, which drift by 0.25 and 0.5 nats, and one of a turn that does not.
    given = AdvantageInputs(
        rewards_N=torch.tensor([1.0, 1.0, 0.0]),
        group_N=torch.zeros(3, dtype=torch.int64),
        rollout_N=torch.tensor([0, 0, 1]),
        turn_N=torch.tensor([0, 1, 0]),
        tokens_N=torch.ones(3, dtype=torch.int64),
        loss_mask_Q=torch.ones(3, dtype=torch.bool),
        rollout_logprobs_Q=torch.tensor([-0.75, -0.5, -1.0]),
        ref_logprobs_Q=torch.full((3,), -1.0),
    )
    assert algorithm.compute_advantages(given).advantages_N.tolist() == [0.125, 0.125, -0.125]
