"""DPPO: drops tokens by the change of their probability, not by the ratio, which is unstable for rare tokens."""

from dataclasses import dataclass

from torch import Tensor

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import require
from rftdask.algorithm.kl import MAX_LOG_RATIO
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss, ratio_metrics


@dataclass(frozen=True)
class Dppo(PolicyLoss):
    """-keep adv_tau A r + kl_tau (log r)^2: DPPO, arXiv:2602.04879; KL term: Kimi k1.5,
    arXiv:2501.12599; defaults: prime-rl.

    r is relative to the sampling policy (`rollout_logprobs`). keep is 0 if the probability has already moved in the
    intended direction by more than the bound: p - p_behavior > high where A > 0, < -low where A <= 0.
    """

    mask_low: float = 0.2
    mask_high: float = 0.2
    adv_tau: float = 1.0
    kl_tau: float = 0.001

    loss_name = "dppo"

    def __post_init__(self) -> None:
        require(min(self.mask_low, self.mask_high) >= 0.0, "mask_low and mask_high must be >= 0")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        A_BT, log_pi_BT, log_behavior_BT = inputs.advantages(), inputs.policy_logprobs_BT, inputs.rollout_logprobs_BT
        log_r_BT = (log_pi_BT - log_behavior_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # Contribution of the sampled token to the total variation between pi and the sampling policy.
        moved_BT = log_pi_BT.detach().exp() - log_behavior_BT.exp()
        dropped_BT = ((A_BT > 0) & (moved_BT > self.mask_high)) | ((A_BT <= 0) & (moved_BT < -self.mask_low))
        # Only the gain is dropped; the term (log r)^2 acts on every token.
        gain_BT = self.adv_tau * A_BT * log_r_BT.exp() * ~dropped_BT
        return self.kl_tau * log_r_BT.square() - gain_BT, ratio_metrics(inputs, log_r_BT, dropped_BT)


class DppoAlgorithm(AlgorithmType):
    """GRPO advantages with the probability mask; the KL term is part of the loss."""

    algorithm_type = "dppo"
    policy_loss_fn = "dppo"
    kl_loss_fn = "none"
