"""DPO and its kin: the chosen response of a pair is to be likelier than the rejected one, seen from the reference.

Shapes: [B, T] tokens of B sequences, [P] pairs. Sequences 2i and 2i + 1 are one pair, chosen first. Invariant: one
logit per pair, so the loss of a pair does not depend on the others; a pair with an empty side weighs 0 as a whole.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import one_of, require
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss


@dataclass(frozen=True)
class Dpo(PolicyLoss):
    """-(1 - s) log sigmoid(beta d) - s log sigmoid(-beta d), s the label smoothing. DPO, arXiv:2305.18290, equation 7.

    d = sum over tokens of log p_policy - log p_ref, of the chosen minus the same of the rejected. loss_type "hinge":
    max(0, 1 - beta d), SLiC, arXiv:2305.10425. "ipo": (d' - 1 / (2 beta))^2 with d' from the means over tokens, IPO,
    arXiv:2310.12036, normalized by length as in TRL. Label smoothing: cDPO, Mitchell 2023.

    Every token of both sides carries the loss of its pair; weights seq-mean-token-mean make the sum the mean over
    pairs. Metrics are means over pairs: reward_chosen, reward_rejected (beta times the side's log-ratio),
    reward_accuracy.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    loss_type: str = "sigmoid"

    loss_name = "dpo"
    uses_advantages = False
    uses_reference = True
    schema = "dpo"
    only_agg_mode = "seq-mean-token-mean"

    def __post_init__(self) -> None:
        require(self.beta > 0.0, f"beta must be > 0, got {self.beta}")
        require(
            0.0 <= self.label_smoothing < 0.5, f"label_smoothing must be within [0, 0.5), got {self.label_smoothing}"
        )
        one_of("loss_type", self.loss_type, ("sigmoid", "hinge", "ipo"))
        require(
            self.label_smoothing == 0.0 or self.loss_type == "sigmoid", "label_smoothing belongs to loss_type 'sigmoid'"
        )

    def token_weights(self, loss_mask_BT: Tensor, mode: str, **more: Any) -> Tensor:
        """Both sides of a pair that has an empty one weigh 0. Raises: ValueError: an odd number of rows."""
        num_rows = len(loss_mask_BT)
        require(num_rows % 2 == 0, f"pairs need an even number of sequences, got {num_rows}")
        whole_B = loss_mask_BT.any(-1).view(-1, 2).all(-1).repeat_interleave(2)
        return super().token_weights(loss_mask_BT & whole_B[:, None], mode, **more)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        if inputs.ref_logprobs_BT is None:
            raise ValueError("dpo needs ref_logprobs_BT, the logprobs of the frozen reference")
        num_rows = len(inputs.policy_logprobs_BT)
        require(num_rows % 2 == 0, f"pairs need an even number of sequences, got {num_rows}")
        difference_BT = inputs.policy_logprobs_BT - inputs.ref_logprobs_BT
        summed = inputs.sequence_means if self.loss_type == "ipo" else inputs.sequence_sums
        ratios_P2 = summed(difference_BT).view(-1, 2)
        # beta d is the margin of the implicit rewards, beta log(pi / pi_ref).
        delta_P = ratios_P2[:, 0] - ratios_P2[:, 1]
        values_P = {
            "reward_chosen": self.beta * ratios_P2[:, 0],
            "reward_rejected": self.beta * ratios_P2[:, 1],
            "reward_accuracy": (delta_P > 0).to(delta_P.dtype),
        }
        metrics = {name: inputs.weighted(self._to_tokens(inputs, value_P)) for name, value_P in values_P.items()}
        return self._to_tokens(inputs, self.per_pair(delta_P)), metrics

    def per_pair(self, delta_P: Tensor) -> Tensor:
        """[P] loss of each pair from the difference of its log-ratios, [P]."""
        if self.loss_type == "hinge":
            return torch.relu(1.0 - self.beta * delta_P)
        if self.loss_type == "ipo":
            return (delta_P - 1.0 / (2.0 * self.beta)).square()
        logits_P = self.beta * delta_P
        smoothing = self.label_smoothing
        return -(1.0 - smoothing) * functional.logsigmoid(logits_P) - smoothing * functional.logsigmoid(-logits_P)

    @staticmethod
    def _to_tokens(inputs: LossInputs, values_P: Tensor) -> Tensor:
        return inputs.spread(values_P.repeat_interleave(2))


class DpoAlgorithm(AlgorithmType):
    """Pairs of responses; the loss itself is anchored at the reference, so no KL term stands beside it."""

    algorithm_type = "dpo"
    schema = "dpo"
    repeat_times = 2
    advantage_fn = None
    policy_loss_fn = "dpo"
    kl_loss_fn = "none"
    entropy_loss_fn = "none"
    loss_agg_mode = "seq-mean-token-mean"
