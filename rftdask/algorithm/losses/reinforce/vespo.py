"""VESPO: a smooth weight per sequence, without a clip or length normalization."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import require
from rftdask.algorithm.kl import MAX_LOG_RATIO
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss


@dataclass(frozen=True)
class Vespo(PolicyLoss):
    """-sg(phi(w)) A log p, phi(w) = exp(l) w^k exp(-l w), w the product of r over the sequence. VESPO,
    arXiv:2602.10693.

    phi is 1 at w = 1 and decreases on both sides.
    """

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0

    loss_name = "vespo"

    def __post_init__(self) -> None:
        values = (self.k_pos, self.lambda_pos, self.k_neg, self.lambda_neg)
        require(min(values) > 0.0, f"k and lambda must be > 0, got {values}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        A_BT, log_r_BT = inputs.advantages(), inputs.log_ratio()
        # w is a product of many ratios, so it is computed in logs and bounded before the exp in phi.
        log_w_BT = inputs.spread(inputs.sequence_sums(log_r_BT.detach())).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        phi_BT = self.phi(log_w_BT, A_BT)
        metrics = {"ppo_kl": inputs.weighted(-log_r_BT), "vespo_phi": inputs.weighted(phi_BT)}
        return -(phi_BT * A_BT) * inputs.policy_logprobs_BT, metrics

    def phi(self, log_w: Tensor, advantages: Tensor) -> Tensor:
        """phi(exp(log_w)) with the constants for the sign of the advantage. A = 0 counts as positive."""
        k = torch.where(advantages >= 0, torch.full_like(log_w, self.k_pos), self.k_neg)
        rate = torch.where(advantages >= 0, torch.full_like(log_w, self.lambda_pos), self.lambda_neg)
        # The maximum over w is at k / lambda, below 1 for A >= 0 and above 1 for A < 0. A single exponent, since
        # separate factors would overflow.
        return torch.exp(rate + k * log_w - rate * log_w.exp())


class VespoAlgorithm(AlgorithmType):
    """GRPO advantages; without KL, since the weight keeps the policy close to the sampling policy."""

    algorithm_type = "vespo"
    policy_loss_fn = "vespo"
    kl_loss_fn = "none"
