"""Bradley-Terry: a reward model that scores the chosen response of a pair higher."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from rftdask.algorithm.losses.base import LossInputs
from rftdask.algorithm.losses.preference.dpo import DpoAlgorithm
from rftdask.algorithm.losses.preference.pairs import PairLoss


@dataclass(frozen=True)
class BradleyTerry(PairLoss):
    """-log sigmoid(s(x, y_w) - s(x, y_l)), s the score of the whole sequence. InstructGPT, arXiv:2203.02155, equation
    1; Bradley and Terry, 1952.

    The model has a head with one output instead of vocabulary logits, read at the last token. Starting from a language
    model the head is 0, and the loss log 2.

    Metrics: reward_chosen, reward_rejected (the scores), reward_accuracy.
    """

    loss_name = "bradley_terry"
    scores_sequences = True

    def rewards(self, inputs: LossInputs) -> Tensor:
        """Score of each row, which all its tokens carry."""
        # The mean of equal numbers reads the score from any row.
        return inputs.sequence_means(inputs.policy_logprobs_BT)

    def per_pair(self, rewards_P2: Tensor) -> Tensor:
        """Negative log-likelihood of the preference, with probability sigmoid(margin)."""
        return -functional.logsigmoid(rewards_P2[:, 0] - rewards_P2[:, 1])


class RewardModelAlgorithm(DpoAlgorithm):
    """A reward model from pairs of responses."""

    algorithm_type = "reward_model"
    policy_loss_fn = "bradley_terry"
