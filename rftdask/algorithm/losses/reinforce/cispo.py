"""CISPO: clips the importance weight, so that no token loses its gradient."""

from dataclasses import dataclass

from torch import Tensor

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss, ratio_metrics


@dataclass(frozen=True)
class Cispo(PolicyLoss):
    """-sg(clip(r, 1 - low, 1 + high)) A log p: the weight is clipped, no token loses its gradient. MiniMax-M1,
    arXiv:2506.13585.

    TRL bounds r only from above, and its epsilon_high is the bound itself: clip_range_low 1, clip_range_high
    epsilon_high - 1.
    """

    clip_range_low: float = 1.0
    """Lower bound of r is 1 - low. 1: no lower bound."""
    clip_range_high: float = 0.28
    enable_mask_clip: bool = False
    """Also drop tokens that PPO would clip with the two ranges below (the token mask of the paper)."""
    mask_clip_range_low: float = 1.0
    mask_clip_range_high: float = 0.28

    loss_name = "cispo"

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        A_BT, log_r_BT = inputs.advantages(), inputs.log_ratio().detach()
        r_BT = log_r_BT.exp()
        # The weight is detached, so that the gradient of log pi survives the clip.
        weight_BT = r_BT.clamp(1.0 - self.clip_range_low, 1.0 + self.clip_range_high)
        metrics = ratio_metrics(inputs, log_r_BT, weight_BT != r_BT)
        if self.enable_mask_clip:
            # As in PPO: only where the step would move r further out of the range.
            too_high_BT = (r_BT > 1.0 + self.mask_clip_range_high) & (A_BT > 0)
            too_low_BT = (r_BT < 1.0 - self.mask_clip_range_low) & (A_BT < 0)
            weight_BT = weight_BT.masked_fill(too_high_BT | too_low_BT, 0.0)
            metrics["mask_clip_frac"] = inputs.weighted(too_high_BT | too_low_BT)
        return -(weight_BT * A_BT) * inputs.policy_logprobs_BT, metrics


class CispoAlgorithm(AlgorithmType):
    """GRPO advantages with clipped weights."""

    algorithm_type = "cispo"
    policy_loss_fn = "cispo"
