"""What a difference to a peer does to a policy of eight words, whose expectations are sums: exact numbers, no samples.

Float64. The loss of a batch is its expectation over the words, so an estimate's bias is a number and not a guess; what
samples add is its variance, which is a sum, too. Each function gives (ours, theirs) for a seed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rftdask.algorithm import aggregation, kl

WORDS = 8
FAR = 2.0
"""Standard deviations, of the logits' own, from what samples to the policy."""
Estimate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""[V] log p of the policy, of what samples, of the reference -> [V] what a token of each word adds to the loss."""


def corrected_k3(policy_V: Tensor, old_V: Tensor, ref_V: Tensor) -> Tensor:
    """Ours: r K3."""
    return kl.CorrectedK3().per_token(policy_V, ref_V, old_V)


def bounded_k3(policy_V: Tensor, old_V: Tensor, ref_V: Tensor) -> Tensor:
    """Trinity-RFT's, whose ratio is 2 at most."""
    return (policy_V - old_V).exp().clamp(max=2.0) * kl.K3().per_token(policy_V, ref_V)


def kl_of(policy_V: Tensor, ref_V: Tensor) -> Tensor:
    """KL(policy, reference), from logprobs."""
    return (policy_V.exp() * (policy_V - ref_V)).sum()


def kl_of_logits(policy_V: Tensor, ref_V: Tensor) -> Tensor:
    """The same from logits."""
    return kl_of(policy_V.log_softmax(-1), ref_V.log_softmax(-1))


def draw_logits(seed: int, distance: float) -> tuple[Tensor, Tensor, Tensor]:
    """[V] logits of a policy, of what sampled for it at a distance, and of the reference."""
    draw = torch.Generator().manual_seed(seed)
    ref_V, old_V, step_V = (torch.randn(WORDS, generator=draw, dtype=torch.float64) for _ in range(3))
    return (old_V + distance * step_V).requires_grad_(), old_V, ref_V


def bias_and_deviation(estimate: Estimate, seed: int, distance: float) -> tuple[float, float]:
    """Bias of the gradient by one token, and its standard deviation; both over the norm of the KL's gradient."""
    logits_V, old_V, ref_V = draw_logits(seed, distance)
    policy_V, old_V, ref_V = (each_V.log_softmax(-1) for each_V in (logits_V, old_V, ref_V))
    wanted_V = torch.autograd.grad(kl_of(policy_V, ref_V), logits_V, retain_graph=True)[0]
    found_V = estimate(policy_V, old_V, ref_V)
    words_VV = torch.stack([torch.autograd.grad(each, logits_V, retain_graph=True)[0] for each in found_V])
    mean_V = old_V.exp() @ words_VV
    variance = old_V.exp() @ (words_VV - mean_V).square().sum(-1)
    return float((mean_V - wanted_V).norm() / wanted_V.norm()), float(variance.sqrt() / wanted_V.norm())


def bias_of_corrected_k3(seed: int) -> tuple[float, float]:
    """Of the gradient, far away."""
    return bias_and_deviation(corrected_k3, seed, FAR)[0], bias_and_deviation(bounded_k3, seed, FAR)[0]


def deviation_of_corrected_k3(seed: int) -> tuple[float, float]:
    """Of the gradient by one token, as far away; that of n tokens is less by the root of n."""
    return bias_and_deviation(corrected_k3, seed, FAR)[1], bias_and_deviation(bounded_k3, seed, FAR)[1]


def way_back(estimate: kl.KlFn, certainty: float) -> float:
    """KL from a uniform reference after 100 steps of descent of the expected estimate, each as long as half the clip
    of the gradient allows; before them one word's logit is above the others' by `certainty`."""
    logits_V = torch.zeros(WORDS, dtype=torch.float64)
    logits_V[0] = certainty
    ref_V = torch.zeros(WORDS, dtype=torch.float64).log_softmax(-1)
    for _ in range(100):
        policy_V = logits_V.requires_grad_().log_softmax(-1)
        loss = (policy_V.detach().exp() * estimate.per_token(policy_V, ref_V)).sum()
        gradient_V = torch.autograd.grad(loss, logits_V)[0]
        logits_V = logits_V.detach() - 0.5 * gradient_V / gradient_V.norm().clamp(min=1.0)
    return float(kl_of(logits_V.log_softmax(-1), ref_V))


def back_from_certainty(seed: int) -> tuple[float, float]:
    """A word of nearly all the probability: 8 nats above the others, a little more with each seed."""
    return tuple(way_back(each, 8.0 + seed / 2) for each in (kl.K3(), kl.LowVarKl()))  # type: ignore[return-value]


def step_of_the_masked(seed: int) -> tuple[float, float]:
    """Weight of what is trained of a batch of 64 rows of which some are masked, over that of a batch without these."""
    draw = torch.Generator().manual_seed(seed)
    counts_B = torch.randint(1, 9, (64,), generator=draw) * (torch.rand(64, generator=draw) < 0.5)
    weight = {
        part: float((aggregation.row_weights(kept_B, "seq-mean-token-mean", dtype=torch.float64) * kept_B).sum())
        for part, kept_B in (("masked", counts_B), ("dropped", counts_B[counts_B > 0]))
    }
    theirs = float((counts_B > 0).double().mean())  # the mean over all 64 rows
    return weight["masked"] / weight["dropped"], theirs
