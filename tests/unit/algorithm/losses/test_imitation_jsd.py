"""Distillation by derivation: divergences and gradients over a vocabulary in float64, compared with explicit formulas;
the sampled form has the same expected gradient.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rftdask.algorithm.advantages.base import AdvantageInputs
from rftdask.algorithm.compose import make_algorithm
from rftdask.algorithm.losses.base import LossInputs
from rftdask.algorithm.losses.imitation import Jsd
from rftdask.errors import UserError
from tests.numerics import shifted_seed

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]
NUM_WORDS = 11


def logits(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(shifted_seed(seed))
    return 3.0 * torch.randn(*shape, NUM_WORDS, generator=generator, dtype=torch.float64)


def words(logits_V: Tensor, temperature: float = 1.0) -> list[float]:
    """Probabilities, by hand."""
    powers = [math.exp(float(z) / temperature) for z in logits_V]
    return [power / sum(powers) for power in powers]


def kl(a: list[float], b: list[float]) -> float:
    return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))


def by_hand(policy_V: Tensor, teacher_V: Tensor, beta: float, temperature: float) -> float:
    """GKD's equation 1, and the two KLs at its ends."""
    p, q = words(teacher_V, temperature), words(policy_V, temperature)
    if beta in (0.0, 1.0):
        return kl(q, p) if beta else kl(p, q)
    m = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("beta", BETAS)
def test_jsd_equals_the_formula_over_the_vocabulary(beta: float, temperature: float) -> None:
    policy_QV, teacher_QV = logits(0, 5), logits(1, 5)
    got_Q = Jsd(beta, temperature).divergence(policy_QV, teacher_QV)
    for got, policy_V, teacher_V in zip(got_Q, policy_QV, teacher_QV, strict=True):
        assert float(got) == pytest.approx(by_hand(policy_V, teacher_V, beta, temperature), rel=1e-12)
        assert float(got) > 0
    assert Jsd(beta, temperature).divergence(policy_QV, policy_QV).tolist() == pytest.approx([0.0] * 5, abs=1e-15)


@pytest.mark.parametrize("beta", BETAS)
def test_the_jsd_gradient_moves_toward_the_teacher(beta: float) -> None:
    """Derived in `Jsd`, and for the two KLs: Q_v - P_v, and Q_v (log(Q_v / P_v) - KL(Q || P))."""
    policy_V, teacher_V = logits(2)[None].requires_grad_(), logits(3)[None]
    (got_1V,) = torch.autograd.grad(Jsd(beta).divergence(policy_V, teacher_V).sum(), policy_V)
    q, p = words(policy_V[0].detach()), words(teacher_V[0])
    m = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    if beta == 0.0:
        expected = [y - x for x, y in zip(p, q, strict=True)]
    else:
        share = 1.0 if beta == 1.0 else 1.0 - beta
        expected = [share * y * (math.log(y / z) - kl(q, m)) for y, z in zip(q, m, strict=True)]
    assert got_1V[0].tolist() == pytest.approx(expected, rel=1e-10, abs=1e-14)


def test_jsd_at_the_ends_is_the_limit_of_values_between() -> None:
    policy_QV, teacher_QV = logits(4, 6), logits(5, 6)
    small = 1e-7
    near_forward = Jsd(small).divergence(policy_QV, teacher_QV) / small
    torch.testing.assert_close(near_forward, Jsd(0.0).divergence(policy_QV, teacher_QV), rtol=1e-4, atol=0.0)
    near_reverse = Jsd(1 - small).divergence(policy_QV, teacher_QV) / small
    torch.testing.assert_close(near_reverse, Jsd(1.0).divergence(policy_QV, teacher_QV), rtol=1e-4, atol=0.0)


def test_zero_probabilities_stay_finite() -> None:
    policy_QV, teacher_QV = torch.tensor([[0.0, 300.0, -300.0]]), torch.tensor([[0.0, -300.0, 300.0]])
    for beta in BETAS:
        policy_QV = policy_QV.detach().requires_grad_()
        divergence_Q = Jsd(beta).divergence(policy_QV, teacher_QV)
        (gradient_QV,) = torch.autograd.grad(divergence_Q.sum(), policy_QV)
        assert divergence_Q.isfinite().all() and gradient_QV.isfinite().all()


def exact_policy_gradient(log_q_V: Tensor, log_p_V: Tensor, leaf_V: Tensor) -> Tensor:
    """Expectation over the vocabulary of the gradient that on_policy_distill takes for a sampled word."""
    algorithm = make_algorithm("on_policy_distill")
    # A row of one token for each word.
    given = AdvantageInputs(
        torch.zeros(NUM_WORDS),
        torch.arange(NUM_WORDS),
        tokens_N=torch.ones(NUM_WORDS, dtype=torch.int64),
        loss_mask_Q=torch.ones(NUM_WORDS, dtype=torch.bool),
        rollout_logprobs_Q=log_q_V.detach(),
        teacher_logprobs_Q=log_p_V,
    )
    advantages_Q = algorithm.compute_advantages(given).per_token(given)
    inputs = LossInputs(
        policy_logprobs_BT=log_q_V[:, None],
        rollout_logprobs_BT=log_q_V.detach()[:, None],
        loss_mask_BT=torch.ones(NUM_WORDS, 1, dtype=torch.bool),
        token_weights_BT=log_q_V.detach().exp()[:, None],
        advantages_BT=advantages_Q[:, None].double(),
    )
    (gradient_V,) = torch.autograd.grad(algorithm.compute_loss(inputs)[0], leaf_V, retain_graph=True)
    return gradient_V


def test_on_policy_distill_has_the_reverse_kl_gradient() -> None:
    policy_V, teacher_V = logits(6).requires_grad_(), logits(7)
    reverse = Jsd(1.0).divergence(policy_V[None], teacher_V[None])
    (expected_V,) = torch.autograd.grad(reverse.sum(), policy_V)
    got_V = exact_policy_gradient(policy_V.log_softmax(-1), teacher_V.log_softmax(-1), policy_V)
    torch.testing.assert_close(got_V, expected_V, rtol=1e-5, atol=1e-6)  # advantages are float32


def inputs(algorithm: Any, policy_BTV: Tensor, teacher_BTV: Tensor, mask_BT: Tensor) -> LossInputs:
    divergence_Q = algorithm.policy_loss_fn.divergence(policy_BTV.flatten(0, 1), teacher_BTV.flatten(0, 1))
    policy_BT = policy_BTV.log_softmax(-1)[..., 0]
    weights_BT = algorithm.token_weights(mask_BT, dtype=torch.float64)
    return LossInputs(policy_BT, policy_BT.detach(), mask_BT, weights_BT, divergence_BT=divergence_Q.view_as(policy_BT))


def test_masked_tokens_have_no_gradient() -> None:
    """The loss is a mean over the tokens of each sequence, as the paper's L_GKD."""
    algorithm = make_algorithm("jsd")
    mask_BT = torch.tensor([[True, True, False], [True, False, False]])
    policy_BTV, teacher_BTV = logits(8, 2, 3).requires_grad_(), logits(9, 2, 3)
    loss, metrics = algorithm.compute_loss(inputs(algorithm, policy_BTV, teacher_BTV, mask_BT))
    (gradient_BTV,) = torch.autograd.grad(loss, policy_BTV)
    assert ((gradient_BTV != 0).any(-1) == mask_BT).all()
    one, two, other = (by_hand(policy_BTV[b, t].detach(), teacher_BTV[b, t], 0.5, 1.0) for b, t in mask_BT.nonzero())
    assert float(loss.detach()) == float(metrics["jsd"]) == pytest.approx((one + two) / 4 + other / 2)


def test_mismatched_parts_are_errors() -> None:
    with pytest.raises(UserError, match="beta must be within"):
        make_algorithm("jsd", policy_loss_fn_args={"beta": 1.5})
    with pytest.raises(UserError, match="temperature must be > 0"):
        make_algorithm("jsd", policy_loss_fn_args={"temperature": 0.0})
    # As other systems write it: there it is an advantage of the sampled tokens.
    with pytest.raises(UserError, match=r"takes no advantages.*policy_loss_fn_args"):
        make_algorithm("jsd", advantage_fn_args={"lambda_coef": 0.5})
    one = torch.ones(1, 1, dtype=torch.bool)
    batch = replace(inputs(make_algorithm("jsd"), logits(0, 1, 1), logits(1, 1, 1), one), divergence_BT=None)
    with pytest.raises(ValueError, match="needs divergence_BT"):
        Jsd()(batch)
