"""ORPO: SFT on the chosen response, and its odds against the rejected one's, without a reference."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rftdask.algorithm.checks import require
from rftdask.algorithm.losses.base import LossInputs
from rftdask.algorithm.losses.preference.dpo import DpoAlgorithm
from rftdask.algorithm.losses.preference.pairs import PairLoss

_CERTAIN = 1e-7
"""Least distance of a mean logprob from 0: a response of probability 1 would have infinite odds."""


@dataclass(frozen=True)
class Orpo(PairLoss):
    """-log P(y_w | x) - beta log sigmoid(log odds(y_w | x) - log odds(y_l | x)), odds = P / (1 - P). ORPO,
    arXiv:2403.07691, equations 4, 6 and 7.

    log P is the mean over a response's trained tokens, as in the paper's equation 2; so is SFT's part of the loss, of
    which the prompt is none. beta is the paper's lambda.

    Metrics: reward_chosen, reward_rejected (the side's log P), reward_accuracy.
    """

    beta: float = 0.1

    loss_name = "orpo"

    def __post_init__(self) -> None:
        require(self.beta >= 0.0, f"beta must be >= 0, got {self.beta}")

    def rewards(self, inputs: LossInputs) -> Tensor:
        """log P, the mean logprob."""
        return inputs.sequence_means(inputs.policy_logprobs_BT)

    def per_pair(self, rewards_P2: Tensor) -> Tensor:
        """SFT of the chosen side, and the ratio of the odds."""
        # Beyond it the clamp has no gradient: SFT's part alone moves a response that is already certain.
        log_p_P2 = rewards_P2.clamp(max=-_CERTAIN)
        # log(1 - P) as log(-expm1(log P)): 1 - P itself would be rounded away where P is near 1.
        log_odds_P2 = log_p_P2 - torch.log(-torch.expm1(log_p_P2))
        return -rewards_P2[:, 0] - self.beta * functional.logsigmoid(log_odds_P2[:, 0] - log_odds_P2[:, 1])


class OrpoAlgorithm(DpoAlgorithm):
    """Pairs of responses, and no reference model: SFT and preference in one."""

    algorithm_type = "orpo"
    policy_loss_fn = "orpo"
