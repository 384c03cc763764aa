"""TOPR: imitates all successes, and avoids failures only while the policy would still produce them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss


@dataclass(frozen=True)
class Topr(PolicyLoss):
    """-sg(alpha) A log p, alpha = min(r, 1) where A <= threshold, else 1. TOPR, arXiv:2503.14286.

    Successes have full weight; the weight of a failure decreases with its ratio.
    """

    advantage_threshold: float = 0.0

    loss_name = "topr"

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        A_BT, r_BT = inputs.advantages(), inputs.log_ratio().detach().exp()
        # A failure that has become unlikely gets no further push, so that its log pi does not diverge.
        alpha_BT = torch.where(self.advantage_threshold >= A_BT, r_BT.clamp(max=1.0), 1.0)
        return -(alpha_BT * A_BT) * inputs.policy_logprobs_BT, {"topr_alpha": inputs.weighted(alpha_BT)}


class ToprAlgorithm(AlgorithmType):
    """Plain rewards, without a baseline."""

    algorithm_type = "topr"
    advantage_fn = "reinforce"
    policy_loss_fn = "topr"
