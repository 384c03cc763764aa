"""What a step tells of its updates, whichever engine makes them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rftdask.algorithm.algorithm import Algorithm
from rftdask.algorithm.kl import MAX_LOG_RATIO
from rftdask.algorithm.losses.base import LossInputs

_MEANS = {"mismatch_kl": "mismatch_tokens", "router_agreement": "routed_choices"}
"""Metrics that are means over a number of their own: both are sums over all passes and ranks first."""


def finish_means(metrics: dict[str, float]) -> None:
    """Divide the sums of an update by the numbers that they are means over, which leave."""
    for name in _MEANS.keys() & metrics.keys():
        metrics[name] /= max(metrics.pop(_MEANS[name]), 1.0)


def over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each metric's mean over the updates that tell it; what is counted (num_...) is added."""
    told = {name: [update[name] for update in updates if name in update] for update in updates for name in update}
    return {name: sum(values) / (1 if "num_" in name else len(values)) for name, values in told.items()}


def next_kl_coefs(
    algorithm: Algorithm, coefs: Sequence[float], metrics: Mapping[str, float], num_rows: int
) -> list[float]:
    """Coefficients of the KL loss and of the KL penalty for the next step, from what this one has measured."""
    loss, penalty = coefs
    if "kl" in metrics:
        # The loss term is weighed by tokens; divided by their weights it is a mean KL, which the controller aims at.
        loss = algorithm.kl_loss_fn.next_coef(loss, metrics["kl"] / max(metrics["weight_sum"], 1e-12), num_rows)
    if "kl_penalty" in metrics:
        penalty = algorithm.kl_penalty_fn.next_coef(penalty, metrics["kl_penalty"], num_rows)
    return [loss, penalty]


@torch.no_grad()
def mismatch(inputs: LossInputs) -> dict[str, Tensor]:
    """Sums over the sampled tokens that are trained: mismatch_kl, of w - 1 - log w with w = p_trainer / p_sampler,
    whose mean estimates KL(sampler, trainer) and is never negative (Schulman, "Approximating KL Divergence", 2020);
    and mismatch_tokens, their number.
    """
    # Demonstrations were sampled by nobody here, so nothing can differ.
    mask_BT = inputs.loss_mask_BT
    if inputs.expert_mask_B is not None:
        mask_BT = mask_BT & ~inputs.expert_mask_B[:, None]
    # Clamped, because exp of one wild token would hide all others in the sum.
    gap_BT = (inputs.policy_logprobs_BT - inputs.rollout_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "mismatch_kl": (torch.expm1(gap_BT) - gap_BT).masked_fill(~mask_BT, 0.0).sum(),
        "mismatch_tokens": mask_BT.sum(),
    }
