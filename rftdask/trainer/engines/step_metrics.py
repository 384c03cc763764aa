"""Metrics of a step, computed from those of its updates; shared by the train engines. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rftdask.algorithm.algorithm import Algorithm
from rftdask.algorithm.kl import MAX_LOG_RATIO
from rftdask.algorithm.losses.base import LossInputs

_MEANS = {"mismatch_kl": "mismatch_tokens", "router_agreement": "routed_choices"}
"""Metrics that are means over a count of their own, by the name of the count; both are sums until `finish_means`."""


def finish_means(metrics: dict[str, float]) -> None:
    """Divide the sums of an update by their counts, in place, and remove the counts."""
    for name in _MEANS.keys() & metrics.keys():
        metrics[name] /= max(metrics.pop(_MEANS[name]), 1.0)


def over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each metric's mean over the updates that have it; counts (num_...) are summed."""
    columns = {name: [update[name] for update in updates if name in update] for update in updates for name in update}
    return {name: sum(values) / (1 if "num_" in name else len(values)) for name, values in columns.items()}


def next_kl_coefs(
    algorithm: Algorithm, coefs: Sequence[float], metrics: Mapping[str, float], num_rows: int
) -> list[float]:
    """Return the coefficients of KL loss and KL penalty for the next step, from the metrics of this one."""
    loss, penalty = coefs
    if "kl" in metrics:
        # The loss term is weighted by tokens; divided by their weights it is the mean KL that the controller aims at.
        loss = algorithm.kl_loss_fn.next_coef(loss, metrics["kl"] / max(metrics["weight_sum"], 1e-12), num_rows)
    if "kl_penalty" in metrics:
        penalty = algorithm.kl_penalty_fn.next_coef(penalty, metrics["kl_penalty"], num_rows)
    return [loss, penalty]


@torch.no_grad()
def mismatch(inputs: LossInputs) -> dict[str, Tensor]:
    """Return sums over the sampled tokens that are trained: mismatch_kl and mismatch_tokens, their number.

    mismatch_kl sums w - 1 - log w with w = p_trainer / p_sampler. Its mean estimates KL(sampler, trainer) and is never
    negative (Schulman, "Approximating KL Divergence", 2020).
    """
    # Demonstrations were not sampled, so they have no mismatch.
    mask_BT = inputs.loss_mask_BT
    if inputs.expert_mask_B is not None:
        mask_BT = mask_BT & ~inputs.expert_mask_B[:, None]
    # Clamped: exp of a single outlier would dominate the sum.
    gap_BT = (inputs.policy_logprobs_BT - inputs.rollout_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "mismatch_kl": (torch.expm1(gap_BT) - gap_BT).masked_fill(~mask_BT, 0.0).sum(),
        "mismatch_tokens": mask_BT.sum(),
    }
