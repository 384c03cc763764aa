"""Promises of the KL estimates: literal values, what their gradients descend, and the coefficient over a run."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rftdask.algorithm.compose import make_algorithm
from rftdask.errors import UserError
from tests.numerics import assert_close, shifted_seed
from tests.unit.algorithm.algorithm_cases import KL_FNS


def close(expected: list[float]) -> Any:
    return pytest.approx(expected, abs=2e-6)


def test_kl_estimators() -> None:
    policy, ref = torch.full((3,), -1.0, dtype=torch.float64), torch.tensor([0.0, -15.0, -30.0], dtype=torch.float64)
    values = {name: KL_FNS[name]().per_token(policy, ref).tolist() for name in ("k1", "k2", "abs", "low_var_kl")}
    assert values["k1"] == close([-1.0, 14.0, 29.0])
    assert values["k2"] == close([0.5, 98.0, 420.5])
    assert values["abs"] == close([1.0, 14.0, 29.0])
    assert values["low_var_kl"] == close([0.718282, 10.0, 10.0])
    assert KL_FNS["k3"]().per_token(policy, ref).tolist() == close([0.718282, 13.000001, 28.0])
    bounded = {name: KL_FNS[name](max_kl=10.0).per_token(policy, ref).tolist() for name in ("k1", "k2", "k3")}
    assert bounded == {"k1": close([-1.0, 10.0, 10.0]), "k2": close([0.5, 10.0, 10.0]), "k3": close([0.718282, 10, 10])}


@pytest.mark.parametrize("name", sorted(KL_FNS.keys() - {"none"}))
def test_the_reference_kl_is_float32_under_autocast(name: str) -> None:
    torch.manual_seed(4)
    policy, ref, old = (torch.randn(3, 5).float() - 3 for _ in range(3))
    expected = KL_FNS[name]().per_token(policy, ref, old)
    with torch.autocast("cpu", torch.bfloat16):
        found = KL_FNS[name]().per_token(policy, ref, old)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def enumerated(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return [V] logits of a policy of eight words, and the logprobs of it, of a distant sampler and of a reference."""
    draw = torch.Generator().manual_seed(shifted_seed(seed))
    logits_V, old_V, ref_V = (2.0 * torch.randn(8, generator=draw, dtype=torch.float64) for _ in range(3))
    logits_V.requires_grad_()
    return logits_V, logits_V.log_softmax(-1), old_V.log_softmax(-1), ref_V.log_softmax(-1)


def kl(of_V: Tensor, to_V: Tensor) -> Tensor:
    """KL of one distribution from another, from logprobs."""
    return (of_V.exp() * (of_V - to_V)).sum()


@pytest.mark.parametrize("seed", range(5))
def test_corrected_k3_is_the_kl_for_any_sampling_policy(seed: int) -> None:
    logits_V, policy_V, old_V, ref_V = enumerated(seed)
    assert (policy_V - old_V).max() > math.log(2.0)  # where Trinity-RFT's bound begins
    wanted = kl(policy_V, ref_V)
    found = (old_V.exp() * KL_FNS["corrected_k3"]().per_token(policy_V, ref_V, old_V)).sum()
    assert_close([found.item()], [wanted.item()])
    (wanted_V,) = torch.autograd.grad(wanted, logits_V, retain_graph=True)
    (found_V,) = torch.autograd.grad(found, logits_V)
    assert_close(found_V, wanted_V)


DESCENDS = {
    "k1": lambda policy_V, ref_V: 0.0 * policy_V.sum(),
    "k2": kl,
    "k3": lambda policy_V, ref_V: kl(ref_V, policy_V),
    "abs": lambda policy_V, ref_V: (policy_V.exp() - ref_V.exp()).abs().sum(),
    "corrected_k3": kl,
}
"""Estimate -> what its mean gradient in a loss is the gradient of, where the policy itself samples."""


@pytest.mark.parametrize("name", sorted(DESCENDS))
def test_gradients_of_kl_estimates_in_a_loss(name: str) -> None:
    logits_V, policy_V, _, ref_V = enumerated(0)
    sampled_V = policy_V.detach()
    loss = (sampled_V.exp() * KL_FNS[name]().per_token(policy_V, ref_V, sampled_V)).sum()
    (found_V,) = torch.autograd.grad(loss, logits_V, retain_graph=True)
    (wanted_V,) = torch.autograd.grad(DESCENDS[name](policy_V, ref_V), logits_V)
    assert_close(found_V, wanted_V, size=10.0)


PENALIZES = {
    "k1": kl,
    # The others hold nothing: 0 to second order near the reference, or of the sign of d.
    "k2": lambda policy_V, ref_V: (policy_V.exp() * ((policy_V - ref_V).square() / 2 - (policy_V - ref_V))).sum(),
    "k3": lambda policy_V, ref_V: kl(policy_V, ref_V) - kl(ref_V, policy_V),
    "abs": lambda policy_V, ref_V: (
        (policy_V - ref_V).sign() * (policy_V.exp() * (policy_V - ref_V - 1) + ref_V.exp())
    ).sum(),
}
"""Estimate -> what a policy descends whose rewards pay for it."""


@pytest.mark.parametrize("name", sorted(PENALIZES))
def test_gradients_of_kl_estimates_as_a_reward_penalty(name: str) -> None:
    logits_V, policy_V, _, ref_V = enumerated(0)
    cost_V = KL_FNS[name]().per_token(policy_V, ref_V).detach()
    (found_V,) = torch.autograd.grad((policy_V.detach().exp() * cost_V * policy_V).sum(), logits_V, retain_graph=True)
    (wanted_V,) = torch.autograd.grad(PENALIZES[name](policy_V, ref_V), logits_V)
    assert_close(found_V, wanted_V, size=10.0)


def test_the_adaptive_coefficient_follows_the_measured_kl() -> None:
    args = {"kl_coef": 0.1, "adaptive": True, "target_kl": 0.01, "horizon": 1000}
    controller = make_algorithm("grpo", kl_loss_fn_args=args).kl_loss_fn
    assert controller.next_coef(0.1, 0.011, 100) == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    assert controller.next_coef(0.1, 9.0, 100) == pytest.approx(0.1 * 1.02)
    assert controller.next_coef(0.1, 0.0, 100) == pytest.approx(0.1 * 0.98)
    assert make_algorithm("grpo").kl_loss_fn.next_coef(0.1, 9.0, 100) == 0.1


def test_a_kl_coefficient_can_follow_a_schedule() -> None:
    args: dict[str, Any] = {"kl_coef": 0.4, "final_coef": 0.0, "schedule_steps": 4}
    linear = make_algorithm("grpo", kl_loss_fn_args=args).kl_loss_fn
    assert [linear.coef_at(step, 9.0) for step in range(1, 8)] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0])
    cosine = make_algorithm("grpo", kl_loss_fn_args={**args, "schedule": "cosine"}).kl_loss_fn
    want = [0.4 * (1 + math.cos(math.pi * min(step, 4) / 4)) / 2 for step in range(6)]
    assert [cosine.coef_at(step, 9.0) for step in range(1, 7)] == pytest.approx(want)
    assert make_algorithm("grpo").kl_loss_fn.coef_at(5, 0.25) == 0.25, "without one it is what it was"
    # It may begin at 0, and needs the reference from the start.
    assert make_algorithm(
        "grpo", kl_loss_fn_args={"kl_coef": 0.0, "final_coef": 0.1, "schedule_steps": 2}
    ).use_reference
    for wrong, message in (
        ({"final_coef": 0.1}, "final_coef and schedule_steps must be set together"),
        ({"final_coef": 0.1, "schedule_steps": 0}, "schedule_steps must be > 0"),
        ({**args, "schedule": "wavy"}, "schedule"),
        ({**args, "adaptive": True, "target_kl": 0.1, "horizon": 10}, "adaptive"),
    ):
        with pytest.raises(UserError, match=message):
            make_algorithm("grpo", kl_loss_fn_args=wrong)
