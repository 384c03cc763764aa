"""Pairs: base of the losses for a chosen and a rejected response.

Shapes: [B, T] tokens of B sequences, [P] pairs. Sequences 2i and 2i + 1 are one pair, chosen first. Invariant: one
logit per pair, so the loss of a pair does not depend on the others; a pair with an empty side has weight 0.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rftdask.algorithm.checks import require
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss


@dataclass(frozen=True)
class PairLoss(PolicyLoss):
    """Base of pair losses: a reward for each response, and a loss for each pair of rewards.

    Every token of both sides carries the loss of its pair; with seq-mean-token-mean the sum is the mean over pairs.
    Metrics are means over pairs: reward_chosen, reward_rejected, and reward_accuracy, the share of pairs whose chosen
    response has the higher reward.
    """

    uses_advantages = False
    schema = "dpo"
    only_agg_mode = "seq-mean-token-mean"

    @abstractmethod
    def rewards(self, inputs: LossInputs) -> Tensor:
        """[B] reward of each response, differentiable in `policy_logprobs_BT`."""

    @abstractmethod
    def per_pair(self, rewards_P2: Tensor) -> Tensor:
        """[P] loss of each pair. rewards_P2: [P, 2], the chosen response first."""

    def row_weights(self, counts_B: Tensor, mode: str, **arguments: Any) -> Tensor:
        """[B] weights, 0 for both sides of a pair with an empty side. Raises: ValueError: an odd number of rows."""
        num_rows = len(counts_B)
        require(num_rows % 2 == 0, f"pairs need an even number of sequences, got {num_rows}")
        # [B] -> [P, 2] -> [P] -> [B].
        whole_B = (counts_B > 0).view(-1, 2).all(-1).repeat_interleave(2)
        return super().row_weights(counts_B * whole_B, mode, **arguments)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        num_rows = len(inputs.policy_logprobs_BT)
        require(num_rows % 2 == 0, f"pairs need an even number of sequences, got {num_rows}")
        # Rows are split into ranks and micro-batches in pairs, so both sides are present.
        rewards_P2 = self.rewards(inputs).view(-1, 2)
        chosen_P, rejected_P = rewards_P2.unbind(-1)

        def spread(values_P: Tensor) -> Tensor:
            return inputs.spread(values_P.repeat_interleave(2))

        values_P = {
            "reward_chosen": chosen_P,
            "reward_rejected": rejected_P,
            "reward_accuracy": (chosen_P > rejected_P).to(chosen_P.dtype),
        }
        metrics = {name: inputs.weighted(spread(value_P)) for name, value_P in values_P.items()}
        return spread(self.per_pair(rewards_P2)), metrics
