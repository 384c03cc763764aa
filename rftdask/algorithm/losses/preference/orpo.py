"""ORPO: SFT on the chosen response plus an odds ratio against the rejected one, without a reference."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rftdask.algorithm.checks import require
from rftdask.algorithm.losses.base import LossInputs
from rftdask.algorithm.losses.preference.dpo import DpoAlgorithm
from rftdask.algorithm.losses.preference.pairs import PairLoss

_CERTAIN = 1e-7
"""Minimum distance of a mean logprob from 0, since a response of probability 1 has infinite odds."""


@dataclass(frozen=True)
class Orpo(PairLoss):
    """-log P(y_w | x) - beta log sigmoid(log odds(y_w | x) - log odds(y_l | x)), odds = P / (1 - P). ORPO,
    arXiv:2403.07691, equations 4, 6 and 7.

    log P is the mean over the trained tokens of a response, as in equation 2 of the paper. The SFT term uses the same
    mean, without the prompt. beta is lambda in the paper.

    Metrics: reward_chosen, reward_rejected (log P of each side), reward_accuracy.
    """

    beta: float = 0.1

    loss_name = "orpo"

    def __post_init__(self) -> None:
        require(self.beta >= 0.0, f"beta must be >= 0, got {self.beta}")

    def rewards(self, inputs: LossInputs) -> Tensor:
        """Mean logprob log P."""
        return inputs.sequence_means(inputs.policy_logprobs_BT)

    def per_pair(self, rewards_P2: Tensor) -> Tensor:
        """SFT loss of the chosen side plus the log odds ratio."""
        # The clamp has no gradient beyond the bound, where only the SFT term moves the response.
        log_p_P2 = rewards_P2.clamp(max=-_CERTAIN)
        # log(1 - P) as log(-expm1(log P)), since 1 - P loses its digits where P is near 1.
        log_odds_P2 = log_p_P2 - torch.log(-torch.expm1(log_p_P2))
        return -rewards_P2[:, 0] - self.beta * functional.logsigmoid(log_odds_P2[:, 0] - log_odds_P2[:, 1])


class OrpoAlgorithm(DpoAlgorithm):
    """Pairs of responses without a reference model: SFT and preference in one loss."""

    algorithm_type = "orpo"
    policy_loss_fn = "orpo"
