"""SimPO: makes the chosen response more likely by a margin per token, without a reference."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from rftdask.algorithm.checks import require
from rftdask.algorithm.losses.base import LossInputs
from rftdask.algorithm.losses.preference.dpo import DpoAlgorithm
from rftdask.algorithm.losses.preference.pairs import PairLoss


@dataclass(frozen=True)
class SimPo(PairLoss):
    """-log sigmoid(beta / |y_w| log pi(y_w | x) - beta / |y_l| log pi(y_l | x) - gamma). SimPO, arXiv:2405.14734,
    equation 6.

    |y| is the number of trained tokens. gamma is the margin; the tables of the paper often list gamma / beta.

    Metrics: reward_chosen, reward_rejected (beta times the mean logprob of each side), reward_accuracy.
    """

    beta: float = 2.0
    gamma: float = 1.0

    loss_name = "simpo"

    def __post_init__(self) -> None:
        require(self.beta > 0.0, f"beta must be > 0, got {self.beta}")
        require(self.gamma >= 0.0, f"gamma must be >= 0, got {self.gamma}")

    def rewards(self, inputs: LossInputs) -> Tensor:
        """beta times the mean logprob, which does not depend on the length."""
        return self.beta * inputs.sequence_means(inputs.policy_logprobs_BT)

    def per_pair(self, rewards_P2: Tensor) -> Tensor:
        """Bradley-Terry loss with margin gamma."""
        return -functional.logsigmoid(rewards_P2[:, 0] - rewards_P2[:, 1] - self.gamma)


class SimPoAlgorithm(DpoAlgorithm):
    """Pairs of responses without a reference model."""

    algorithm_type = "simpo"
    policy_loss_fn = "simpo"
