"""Importance sampling: the plain ratio, without a clip."""

from dataclasses import dataclass

from torch import Tensor

from rftdask.algorithm.losses.base import LossInputs, PolicyLoss


@dataclass(frozen=True)
class ImportanceSampling(PolicyLoss):
    """-A r without a clip. Used by on-policy distillation (Thinking Machines, "On-Policy Distillation", 2025)."""

    loss_name = "importance_sampling"

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_r_BT = inputs.log_ratio()
        return -inputs.advantages() * log_r_BT.exp(), {"ppo_kl": inputs.weighted(-log_r_BT)}
