"""DPO and variants: makes the chosen response of a pair more likely than the rejected one, relative to the
reference."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import one_of, require
from rftdask.algorithm.losses.base import LossInputs
from rftdask.algorithm.losses.preference.pairs import PairLoss


@dataclass(frozen=True)
class Dpo(PairLoss):
    """-(1 - s) log sigmoid(beta d) - s log sigmoid(-beta d), s the label smoothing. DPO, arXiv:2305.18290, equation 7.

    d = sum over tokens of log p_policy - log p_ref of the chosen response, minus that of the rejected one. loss_type
    "hinge": max(0, 1 - beta d), SLiC, arXiv:2305.10425. "ipo_sum": (d - 1 / (2 beta))^2, IPO, arXiv:2310.12036,
    equation 17, whose h is d, as in OpenRLHF. "ipo": the same with means over tokens instead of sums, as in TRL: the
    margin applies per token, whatever the length. Label smoothing: cDPO, Mitchell 2023.

    Metrics: reward_chosen, reward_rejected (beta times the log-ratio), reward_accuracy.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    loss_type: str = "sigmoid"

    loss_name = "dpo"
    uses_reference = True

    def __post_init__(self) -> None:
        require(self.beta > 0.0, f"beta must be > 0, got {self.beta}")
        require(
            0.0 <= self.label_smoothing < 0.5, f"label_smoothing must be within [0, 0.5), got {self.label_smoothing}"
        )
        one_of("loss_type", self.loss_type, ("sigmoid", "hinge", "ipo", "ipo_sum"))
        require(
            self.label_smoothing == 0.0 or self.loss_type == "sigmoid", "label_smoothing requires loss_type 'sigmoid'"
        )

    def rewards(self, inputs: LossInputs) -> Tensor:
        """Implicit reward beta log(pi / pi_ref)."""
        if inputs.ref_logprobs_BT is None:
            raise ValueError("dpo needs ref_logprobs_BT, the logprobs of the frozen reference")
        # Sums over whole responses; "ipo" uses means, so that the margin applies per token.
        summed = inputs.sequence_means if self.loss_type == "ipo" else inputs.sequence_sums
        return self.beta * summed(inputs.policy_logprobs_BT - inputs.ref_logprobs_BT)

    def per_pair(self, rewards_P2: Tensor) -> Tensor:
        """Loss of the margin beta d."""
        margin_P = rewards_P2[:, 0] - rewards_P2[:, 1]
        if self.loss_type == "hinge":
            return torch.relu(1.0 - margin_P)
        if self.loss_type in ("ipo", "ipo_sum"):
            # margin = beta d, so this is (d - 1 / (2 beta))^2.
            return ((margin_P - 0.5) / self.beta).square()
        smoothing = self.label_smoothing
        return -(1.0 - smoothing) * functional.logsigmoid(margin_P) - smoothing * functional.logsigmoid(-margin_P)


class DpoAlgorithm(AlgorithmType):
    """Pairs of responses. No KL term, since the loss is already relative to the reference."""

    algorithm_type = "dpo"
    schema = "dpo"
    repeat_times = 2
    advantage_fn = None
    policy_loss_fn = "dpo"
    kl_loss_fn = "none"
    entropy_loss_fn = "none"
    loss_agg_mode = "seq-mean-token-mean"
