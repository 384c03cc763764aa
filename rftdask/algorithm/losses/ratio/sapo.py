"""SAPO: a smooth gate instead of the clip, steeper for tokens with negative advantage."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import require
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss


@dataclass(frozen=True)
class Sapo(PolicyLoss):
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A: a soft clip. SAPO, arXiv:2511.20347, equations 5 and 6.

    The gate is differentiated: the weight of the gradient is 4 s (1 - s) r, which is 1 at r = 1 and goes to 0 far from
    it. A detached gate times log p would grow with r and clip nothing.
    """

    tau_pos: float = 1.0
    """Temperature where A > 0."""
    tau_neg: float = 1.05
    """Temperature where A <= 0. Larger values decay faster."""

    loss_name = "sapo"

    def __post_init__(self) -> None:
        require(self.tau_pos > 0 and self.tau_neg > 0, f"tau must be > 0, got {self.tau_pos}, {self.tau_neg}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        A_BT, log_r_BT = inputs.advantages(), inputs.log_ratio()
        # Negative advantages raise all other tokens at once, which destabilizes training, so they use the larger tau.
        tau_BT = torch.where(A_BT > 0, torch.full_like(log_r_BT, self.tau_pos), self.tau_neg)
        # 4 / tau makes the slope 1 at r = 1, so that the on-policy gradient is that of REINFORCE.
        gate_BT = torch.sigmoid(tau_BT * (log_r_BT.exp() - 1.0)) * (4.0 / tau_BT)
        return -A_BT * gate_BT, {"ppo_kl": inputs.weighted(-log_r_BT), "soft_gate": inputs.weighted(gate_BT)}


class SapoAlgorithm(AlgorithmType):
    """GRPO advantages, a soft gate, equal sequence weights."""

    algorithm_type = "sapo"
    policy_loss_fn = "sapo"
    loss_agg_mode = "seq-mean-token-mean"
