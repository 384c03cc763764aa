"""Bradley-Terry: a reward model, whose score of the chosen response of a pair is to be the higher one."""

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

    The model has a head of one number in place of the vocabulary's, read at the last token; a language model's begins
    at 0, where the loss is log 2.

    Metrics: reward_chosen, reward_rejected (the scores), reward_accuracy.
    """

    loss_name = "bradley_terry"
    scores_sequences = True

    def rewards(self, inputs: LossInputs) -> Tensor:
        """The score, which every token of a row carries."""
        # The mean of equal numbers: the way to read one from a tensor that has it at every token.
        return inputs.sequence_means(inputs.policy_logprobs_BT)

    def per_pair(self, rewards_P2: Tensor) -> Tensor:
        """How unlikely the preference is, if sigmoid of the margin is its probability."""
        return -functional.logsigmoid(rewards_P2[:, 0] - rewards_P2[:, 1])


class RewardModelAlgorithm(DpoAlgorithm):
    """A reward model from pairs of responses."""

    algorithm_type = "reward_model"
    policy_loss_fn = "bradley_terry"
