"""OPMD: no ratio, so rollouts may have any age and source."""

from dataclasses import dataclass

from torch import Tensor

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import require
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss


@dataclass(frozen=True)
class Opmd(PolicyLoss):
    """-A log p / (1 + tau), without a ratio. OPMD, arXiv:2505.17826, appendix A; AsymRE,
    arXiv:2506.20520."""

    tau: float = 1.0
    """Strength of the regularization toward the sampling policy, >= 0."""

    loss_name = "opmd"

    def __post_init__(self) -> None:
        require(self.tau >= 0.0, f"tau must be >= 0, got {self.tau}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        # 1 / (1 + tau) is the effect of the regularization on the step (appendix A).
        A_BT, log_pi_BT = inputs.advantages(), inputs.policy_logprobs_BT
        return -(A_BT / (1.0 + self.tau)) * log_pi_BT, {}


class OpmdAlgorithm(AlgorithmType):
    """Rewards minus the mean of the task (or its softened maximum), with KL to the reference."""

    algorithm_type = "opmd"
    deprecated_names = ("opmd_verl",)
    advantage_fn = "opmd"
    policy_loss_fn = "opmd"


class AsymreAlgorithm(AlgorithmType):
    """OPMD's loss with a baseline shifted below the mean, so that successes have more weight than failures.

    Source: AsymRE, arXiv:2506.20520.
    """

    algorithm_type = "asymre"
    deprecated_names = ("asymre_verl",)
    advantage_fn = "asymre"
    policy_loss_fn = "opmd"
    kl_loss_fn = "none"
    entropy_loss_fn = "none"
