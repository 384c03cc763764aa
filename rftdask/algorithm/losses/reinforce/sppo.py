"""sPPO: the log-ratio replaces the ratio, within a band around 1."""

from dataclasses import dataclass

from torch import Tensor

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import require
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss, ratio_metrics


@dataclass(frozen=True)
class Sppo(PolicyLoss):
    """-A log r where 1 / (1 + epsilon) <= r <= 1 + epsilon, else 0. sPPO, arXiv:2108.05828."""

    epsilon: float = 0.3

    loss_name = "sppo"

    def __post_init__(self) -> None:
        require(self.epsilon > 0.0, f"epsilon must be > 0, got {self.epsilon}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        A_BT, log_r_BT = inputs.advantages(), inputs.log_ratio()
        r_BT = log_r_BT.detach().exp()
        # The band is symmetric in log r, unlike PPO's.
        outside_BT = (r_BT < 1.0 / (1.0 + self.epsilon)) | (r_BT > 1.0 + self.epsilon)
        # The gradient of log r is that of log pi: REINFORCE within the band, 0 outside.
        return -A_BT * log_r_BT.masked_fill(outside_BT, 0.0), ratio_metrics(inputs, log_r_BT, outside_BT)


class SppoAlgorithm(AlgorithmType):
    """OPMD advantages with the log-ratio; no KL, no entropy bonus."""

    algorithm_type = "sppo"
    advantage_fn = "opmd"
    policy_loss_fn = "sppo"
    kl_loss_fn = "none"
    entropy_loss_fn = "none"
