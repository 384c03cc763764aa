"""Pairs: what all losses of a chosen and a rejected response share.

Shapes: [B, T] tokens of B sequences, [P] pairs. Sequences 2i and 2i + 1 are one pair, chosen first. Invariant: one
logit per pair, so the loss of a pair does not depend on the others; a pair with an empty side weighs 0 as a whole.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rftdask.algorithm.checks import require
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss


@dataclass(frozen=True)
class PairLoss(PolicyLoss):
    """Base of the losses of pairs: a reward for each response, and a loss for each pair of rewards.

    Every token of both sides carries the loss of its pair; weights seq-mean-token-mean make the sum the mean over
    pairs. Metrics are means over pairs: reward_chosen, reward_rejected, and reward_accuracy, the share of pairs whose
    chosen response has the higher reward.
    """

    uses_advantages = False
    schema = "dpo"
    only_agg_mode = "seq-mean-token-mean"

    @abstractmethod
    def rewards(self, inputs: LossInputs) -> Tensor:
        """[B] reward that the policy gives each response, differentiable in `policy_logprobs_BT`."""

    @abstractmethod
    def per_pair(self, rewards_P2: Tensor) -> Tensor:
        """[P] loss of each pair; [P, 2] rewards, the chosen response's first."""

    def row_weights(self, counts_B: Tensor, mode: str, **more: Any) -> Tensor:
        """Both sides of a pair that has an empty one weigh 0. Raises: ValueError: an odd number of rows."""
        num_rows = len(counts_B)
        require(num_rows % 2 == 0, f"pairs need an even number of sequences, got {num_rows}")
        # [B] -> [P, 2] -> [P] -> [B].
        whole_B = (counts_B > 0).view(-1, 2).all(-1).repeat_interleave(2)
        return super().row_weights(counts_B * whole_B, mode, **more)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        num_rows = len(inputs.policy_logprobs_BT)
        require(num_rows % 2 == 0, f"pairs need an even number of sequences, got {num_rows}")
        # Rows are dealt to ranks and passes in pairs, so both sides are here.
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
