"""The reference system's own golden losses: its test draws these tensors from seed 42, shape (5, 20), in this order.

Its GSPO golden is for seq-mean-token-mean, as the paper has it. Its DPO golden is one logit for all pairs, so here
all even rows are one chosen sequence and all odd rows one rejected sequence. Its MIX golden multiplies each part
with its number of rows. Its PPO and MIX goldens are older than its dual clip, so they are for clip_ratio_c None.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rftdask.algorithm.losses.base import LossInputs
from tests.unit.algorithm.algorithm_cases import loss_only


def golden_batch(name: str) -> tuple[LossInputs, Any]:
    generator = torch.Generator().manual_seed(42)
    shape = (5, 20)

    def uniform() -> torch.Tensor:
        return 2 * torch.rand(shape, generator=generator) - 1

    policy, rollout, ref = uniform(), uniform(), uniform()
    mask = torch.rand(shape, generator=generator) > 0.5
    advantages = uniform()
    expert = torch.rand(shape[0], generator=generator) > 0.5
    algorithm = loss_only(name, **({"clip_ratio_c": None} if name in ("ppo", "mix") else {}))
    if name == "gspo":
        algorithm = replace(algorithm, loss_agg_mode="seq-mean-token-mean")
    if name == "dpo":
        pair = (policy, rollout, mask, advantages, ref)
        policy, rollout, mask, advantages, ref = (chosen_and_rejected(tensor) for tensor in pair)
    weights = algorithm.token_weights(mask, expert_mask_B=expert)
    return LossInputs(policy, rollout, mask, weights, advantages, ref, None, expert), algorithm


def chosen_and_rejected(rows: torch.Tensor) -> torch.Tensor:
    """Two rows: the even ones one after another, then the odd ones and padding."""
    return torch.stack([rows[0::2].flatten(), torch.cat([rows[1::2], torch.zeros_like(rows[:1])]).flatten()])


def close(expected: float) -> Any:
    return pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ppo", 0.28560468554496765),
        ("gspo", 0.27235108613967896),
        ("sft", -0.07560186833143234),
        ("dpo", 0.5406752228736877),
        ("opmd", -0.009589947760105133),
    ],
)
def test_loss_equals_the_golden_value(name: str, expected: float) -> None:
    batch, algorithm = golden_batch(name)
    assert algorithm.compute_loss(batch)[0].item() == close(expected)


def test_metrics_equal_the_golden_values() -> None:
    batch, algorithm = golden_batch("ppo")
    metrics = algorithm.compute_loss(batch)[1]
    assert metrics["clip_frac"].item() == close(0.3541666567)
    assert metrics["ppo_kl"].item() == close(-0.2166344672)
    batch, algorithm = golden_batch("dpo")
    metrics = algorithm.compute_loss(batch)[1]
    assert metrics["reward_chosen"].item() == close(0.7082431316)
    assert metrics["reward_rejected"].item() == close(0.3757950783)


def test_mix_equals_the_golden_value_times_rows() -> None:
    batch, algorithm = golden_batch("mix")
    metrics = algorithm.compute_loss(batch)[1]
    assert batch.expert_mask_B is not None
    num_experts = int(batch.expert_mask_B.sum())
    total = metrics["usual_loss"] * (5 - num_experts) + metrics["expert_loss"] * num_experts
    assert total.item() == close(0.6581965088844299)
    assert (metrics["usual_loss"] * (5 - num_experts) / 0.9).item() == close(0.7236452102661133)


def test_a_dual_clip_of_two_equals_the_golden_truncation() -> None:
    batch, _ = golden_batch("ppo")
    loss = loss_only("ppo", clip_ratio_c=2.0).compute_loss(batch)[0]
    assert loss.item() == close(0.2230827361345291)
