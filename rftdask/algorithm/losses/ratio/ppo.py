"""PPO: a token whose probability has moved far enough has no gradient."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import require
from rftdask.algorithm.losses.base import ClipRange, LossInputs, PolicyLoss, ratio_metrics


@dataclass(frozen=True)
class Ppo(ClipRange, PolicyLoss):
    """max(-A r, -A clip(r, 1 - low, 1 + high)), bounded by c |A| where A < 0 (dual clip).

    Sources: PPO, arXiv:1707.06347, equation 7; dual clip, arXiv:1912.09729, equation 5; clip-higher, DAPO,
    arXiv:2503.14476; sequence masking, DeepSeek-V3.2, arXiv:2512.02556, section 3.1.
    """

    clip_ratio_c: float | None = 3.0
    """c of the dual clip, > 1. None: no dual clip."""
    enable_sequence_masking: bool = False
    """Drop tokens with A < 0 in sequences whose mean -log r exceeds `delta_sequence_masking`."""
    delta_sequence_masking: float = 0.1
    """Threshold in nats per token."""
    fallback_to_policy_gradient: bool = False
    """Use r = 1 with the gradient of log p: plain policy gradient, without recorded logprobs."""

    loss_name = "ppo"

    def __post_init__(self) -> None:
        super().__post_init__()
        c = self.clip_ratio_c
        require(c is None or c > 1.0, f"clip_ratio_c must be > 1 or None, got {c}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_pi_BT = inputs.policy_logprobs_BT
        # log r = 0 with the gradient of log pi, so the clip is never active.
        log_r_BT = log_pi_BT - log_pi_BT.detach() if self.fallback_to_policy_gradient else inputs.log_ratio()
        loss_BT, metrics = self.clipped(inputs, log_r_BT)
        if self.enable_sequence_masking:
            # M of DeepSeek-V3.2: failures that the policy has moved far away from are not reliable.
            far_BT = inputs.spread(inputs.sequence_means(-log_r_BT.detach()) > self.delta_sequence_masking)
            dropped_BT = far_BT & (inputs.advantages() < 0)
            loss_BT = loss_BT.masked_fill(dropped_BT, 0.0)
            metrics["sequence_mask_frac"] = inputs.weighted(dropped_BT)
        return loss_BT, metrics

    def clipped(self, inputs: LossInputs, log_r_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """[B, T] clipped loss for log r, with metrics clip_frac, ppo_kl and dual_clip_frac."""
        A_BT, r_BT = inputs.advantages(), log_r_BT.exp()
        c = math.inf if self.clip_ratio_c is None else self.clip_ratio_c
        # L^CLIP, equation 7 of PPO: the pessimistic objective, with the sign of a loss.
        loss_BT = torch.maximum(-A_BT * r_BT, -A_BT * r_BT.clamp(1.0 - self.low, 1.0 + self.high))
        # Dual clip, equation 5. Where A < 0 the maximum is unbounded, so one extreme token would dominate the batch.
        # Elsewhere it is at most 0, so the bound has no effect.
        if self.clip_ratio_c is not None:
            loss_BT = torch.minimum(loss_BT, c * A_BT.abs())
        # A token has no gradient where the clipped term, which is constant, is the larger one.
        up_BT, down_BT = A_BT >= 0, A_BT < 0
        clipped_BT = (up_BT & (r_BT > 1.0 + self.high)) | (down_BT & (r_BT < 1.0 - self.low))
        return loss_BT, {
            **ratio_metrics(inputs, log_r_BT, clipped_BT),
            "dual_clip_frac": inputs.weighted(down_BT & (r_BT > c)),
        }


class PpoAlgorithm(AlgorithmType):
    """PPO with a critic: generalized advantage estimation, one rollout per task."""

    algorithm_type = "ppo"
    repeat_times = 1
    advantage_fn = "ppo"
    has_critic = True
