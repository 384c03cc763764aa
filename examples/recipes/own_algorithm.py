"""GRPO with a custom loss that gives a token less weight the more its probability has changed."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss


@dataclass(frozen=True)
class SoftLoss(PolicyLoss):
    """-A r / (1 + scale |log r|), where r is the ratio of the token's probabilities, new to old."""

    scale: float = 1.0

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_r_BT = inputs.log_ratio()
        loss_BT = -inputs.advantages() * log_r_BT.exp() / (1.0 + self.scale * log_r_BT.abs())
        return loss_BT, {"mean_log_ratio": inputs.weighted(log_r_BT)}


class Gentle(AlgorithmType):
    """GRPO with groups of eight, mean-centered rewards, the loss above, and no reference model."""

    repeat_times = 8
    advantage_fn = "grpo"
    advantage_fn_args: ClassVar[dict[str, str]] = {"std": "none"}
    policy_loss_fn = "own_algorithm.SoftLoss"
    kl_loss_fn = "none"
