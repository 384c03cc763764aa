"""Effect of differences from peers on a policy of eight words, whose expectations are sums: exact numbers without
sampling.

Float64. The loss of a batch is its expectation over the words, so the bias of an estimate is exact; the noise of
sampling is its variance, which is also a sum. Each function returns (ours, the peer's) for a seed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rftdask.algorithm import aggregation, kl

WORDS = 8
FAR = 2.0
"""Distance of the sampling policy from the policy, in standard deviations of the logits."""
Estimate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""[V] log p of the policy, of the sampling policy and of the reference -> [V] loss of a token of each word."""


def corrected_k3(policy_V: Tensor, old_V: Tensor, ref_V: Tensor) -> Tensor:
    """Ours: r K3."""
    return kl.CorrectedK3().per_token(policy_V, ref_V, old_V)


def bounded_k3(policy_V: Tensor, old_V: Tensor, ref_V: Tensor) -> Tensor:
    """Trinity-RFT's, whose ratio is at most 2."""
    return (policy_V - old_V).exp().clamp(max=2.0) * kl.K3().per_token(policy_V, ref_V)


def kl_of(policy_V: Tensor, ref_V: Tensor) -> Tensor:
    """KL(policy, reference), from logprobs."""
    return (policy_V.exp() * (policy_V - ref_V)).sum()


def kl_of_logits(policy_V: Tensor, ref_V: Tensor) -> Tensor:
    """KL(policy, reference), from logits."""
    return kl_of(policy_V.log_softmax(-1), ref_V.log_softmax(-1))


def draw_logits(seed: int, distance: float) -> tuple[Tensor, Tensor, Tensor]:
    """Draw [V] logits of a policy, of a sampling policy at a distance, and of the reference."""
    draw = torch.Generator().manual_seed(seed)
    ref_V, old_V, step_V = (torch.randn(WORDS, generator=draw, dtype=torch.float64) for _ in range(3))
    return (old_V + distance * step_V).requires_grad_(), old_V, ref_V


def bias_and_deviation(estimate: Estimate, seed: int, distance: float) -> tuple[float, float]:
    """Bias of the gradient of one token, and its standard deviation, both relative to the norm of the KL's gradient."""
    logits_V, old_V, ref_V = draw_logits(seed, distance)
    policy_V, old_V, ref_V = (each_V.log_softmax(-1) for each_V in (logits_V, old_V, ref_V))
    wanted_V = torch.autograd.grad(kl_of(policy_V, ref_V), logits_V, retain_graph=True)[0]
    found_V = estimate(policy_V, old_V, ref_V)
    words_VV = torch.stack([torch.autograd.grad(each, logits_V, retain_graph=True)[0] for each in found_V])
    mean_V = old_V.exp() @ words_VV
    variance = old_V.exp() @ (words_VV - mean_V).square().sum(-1)
    return float((mean_V - wanted_V).norm() / wanted_V.norm()), float(variance.sqrt() / wanted_V.norm())


def bias_of_corrected_k3(seed: int) -> tuple[float, float]:
    """Bias of the gradient at a large distance."""
    return bias_and_deviation(corrected_k3, seed, FAR)[0], bias_and_deviation(bounded_k3, seed, FAR)[0]


def deviation_of_corrected_k3(seed: int) -> tuple[float, float]:
    """Standard deviation of the gradient of one token at that distance; for n tokens, divide it by the root of n."""
    return bias_and_deviation(corrected_k3, seed, FAR)[1], bias_and_deviation(bounded_k3, seed, FAR)[1]


def way_back(estimate: kl.KlFn, certainty: float) -> float:
    """KL from a uniform reference after 100 descent steps on the expected estimate, each as long as half the gradient
    clip allows. Initially one word's logit exceeds the others by `certainty`.
    """
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
    """The same from a policy with nearly all probability on one word: 8 nats above the others, a little more with each
    seed.
    """
    return tuple(way_back(each, 8.0 + seed / 2) for each in (kl.K3(), kl.LowVarKl()))  # type: ignore[return-value]


def step_of_the_masked(seed: int) -> tuple[float, float]:
    """Weight of the trained rows of a batch of 64 rows with masked rows, relative to a batch without masked rows."""
    draw = torch.Generator().manual_seed(seed)
    counts_B = torch.randint(1, 9, (64,), generator=draw) * (torch.rand(64, generator=draw) < 0.5)
    weight = {
        part: float((aggregation.row_weights(kept_B, "seq-mean-token-mean", dtype=torch.float64) * kept_B).sum())
        for part, kept_B in (("masked", counts_B), ("dropped", counts_B[counts_B > 0]))
    }
    theirs = float((counts_B > 0).double().mean())  # the mean over all 64 rows
    return weight["masked"] / weight["dropped"], theirs
