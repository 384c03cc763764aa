"""MIX: rollouts and demonstrations in one batch, each part with its own loss.

Invariant: each part is normalized over its own tokens of the whole batch, so any split of the batch gives the same
loss.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rftdask.algorithm.aggregation import AGGREGATIONS
from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import one_of, require
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss
from rftdask.algorithm.losses.imitation.sft import Sft
from rftdask.algorithm.losses.ratio.ppo import Ppo


@dataclass(frozen=True)
class Mixture(Ppo, ABC):
    """Base of mixtures: (1 - mu) * PPO over rollouts + mu * imitation over demonstrations.

    The factors are part of `row_weights`: for mean aggregations, rollout tokens sum to 1 - mu and demonstrated tokens
    to mu, each part normalized separately. A batch without demonstrations has total weight 1 - mu, one without rollouts
    mu.
    """

    sft_loss_agg_mode: str | None = None
    """Aggregation of the demonstrations. None: that of the algorithm."""

    # Divisors of other systems; here the weights are computed over the whole batch.
    ignored_args = (
        "use_dynamic_bsz",
        "ppo_mini_batch_size",
        "ppo_micro_batch_size_per_gpu",
        "ngpus_trainer",
        "train_batch_size_usual",
        "train_batch_size_expert",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sft_loss_agg_mode is not None:
            one_of("sft_loss_agg_mode", self.sft_loss_agg_mode, AGGREGATIONS)

    @abstractmethod
    def mu_at(self, step: int) -> float:
        """Weight of the imitation loss at this step, within [0, 1]."""

    @abstractmethod
    def imitation(self) -> PolicyLoss:
        """Loss of the demonstrations."""

    def row_weights(
        self, counts_B: Tensor, mode: str, *, expert_mask_B: Tensor | None = None, step: int = 0, **arguments: Any
    ) -> Tensor:
        """[B] weights. expert_mask_B: [B] bool, True for a demonstration. Raises: ValueError: it is missing."""
        expert_B, mu = expert_mask(expert_mask_B), self.mu_at(step)
        # Each part is normalized over its own tokens, so only mu determines their ratio.
        usual_B = super().row_weights(counts_B * ~expert_B, mode, **arguments)
        expert_weights_B = super().row_weights(counts_B * expert_B, self.sft_loss_agg_mode or mode, **arguments)
        return (1.0 - mu) * usual_B + mu * expert_weights_B

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        expert_B = expert_mask(inputs.expert_mask_B).to(inputs.token_weights_BT.dtype)
        usual_BT, expert_BT = inputs.spread(1 - expert_B), inputs.spread(expert_B)  # 0 or 1
        usual = replace(inputs, token_weights_BT=inputs.token_weights_BT * usual_BT)
        expert = replace(inputs, token_weights_BT=inputs.token_weights_BT * expert_BT)
        # Both losses see all tokens; those of the other part have weight 0, also in metrics.
        usual_loss_BT, usual_metrics = super().__call__(usual)
        expert_loss_BT, expert_metrics = self.imitation()(expert)
        losses = {"usual_loss": usual.weighted(usual_loss_BT), "expert_loss": expert.weighted(expert_loss_BT)}
        return usual_BT * usual_loss_BT + expert_BT * expert_loss_BT, {**usual_metrics, **expert_metrics, **losses}


@dataclass(frozen=True)
class Mix(Mixture):
    """Mixture with a fixed weight and plain SFT. Trinity-RFT's MIX; CHORD-mu, arXiv:2508.11408."""

    mu: float = 0.1
    """Weight of the imitation loss, within [0, 1]."""

    loss_name = "mix"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0.0 <= self.mu <= 1.0, f"mu must be within [0, 1], got {self.mu}")

    def mu_at(self, step: int) -> float:
        """Constant weight."""
        return self.mu

    def imitation(self) -> PolicyLoss:
        """Plain SFT."""
        return Sft()


def expert_mask(expert_mask_B: Tensor | None) -> Tensor:
    """[B] bool, True for a demonstration. Raises: ValueError: it is missing."""
    if expert_mask_B is None:
        raise ValueError("a mixture needs expert_mask_B, True for demonstrations; pass all False if there are none")
    return expert_mask_B


class MixAlgorithm(AlgorithmType):
    """GRPO on rollouts, SFT on demonstrations; the entropy bonus excludes demonstrations."""

    algorithm_type = "mix"
    policy_loss_fn = "mix"
    entropy_loss_fn = "mix"
    sample_strategy = "mix"
