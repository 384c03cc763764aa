"""MIX: rollouts and demonstrations in one batch, each part with the loss that is its own.

Invariant: a mixture is a matter of weights: its parts are normalized each over
its own tokens of the whole batch, so any cut of the batch gives the same loss.
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
    """Base of the mixtures: (1 - mu) * PPO over the policy's own sequences + mu * imitation over demonstrations.

    The factors live in `row_weights`: own tokens sum to 1 - mu, demonstrated ones to mu (for the mean
    aggregations), each part normalized by itself. A batch without demonstrations weighs 1 - mu, one without own
    sequences mu.
    """

    sft_loss_agg_mode: str | None = None
    """Aggregation of the demonstrations; None: the algorithm's."""

    # Sizes and ranks that other systems divide by, by hand; here the weights are those of the whole batch.
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
        """Weight of the imitation in the batch of this step, within [0, 1]."""

    @abstractmethod
    def imitation(self) -> PolicyLoss:
        """The loss of the demonstrations."""

    def row_weights(
        self, counts_B: Tensor, mode: str, *, expert_mask_B: Tensor | None = None, step: int = 0, **more: Any
    ) -> Tensor:
        """expert_mask_B [B]: True for a demonstration. Raises: ValueError: the batch does not tell."""
        expert_B, mu = expert_mask(expert_mask_B), self.mu_at(step)
        # Each part is normalized over its own tokens; mu alone says how they compare, whatever their numbers.
        own_B = super().row_weights(counts_B * ~expert_B, mode, **more)
        shown_B = super().row_weights(counts_B * expert_B, self.sft_loss_agg_mode or mode, **more)
        return (1.0 - mu) * own_B + mu * shown_B

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        expert_B = expert_mask(inputs.expert_mask_B).to(inputs.token_weights_BT.dtype)
        own_BT, shown_BT = inputs.spread(1 - expert_B), inputs.spread(expert_B)  # 0 or 1
        own = replace(inputs, token_weights_BT=inputs.token_weights_BT * own_BT)
        shown = replace(inputs, token_weights_BT=inputs.token_weights_BT * shown_BT)
        # Both losses see all tokens; those of the other part weigh 0, in metrics too.
        own_loss_BT, own_metrics = super().__call__(own)
        shown_loss_BT, shown_metrics = self.imitation()(shown)
        losses = {"usual_loss": own.weighted(own_loss_BT), "expert_loss": shown.weighted(shown_loss_BT)}
        return own_BT * own_loss_BT + shown_BT * shown_loss_BT, {**own_metrics, **shown_metrics, **losses}


@dataclass(frozen=True)
class Mix(Mixture):
    """A mixture with a fixed weight and plain SFT. Trinity-RFT's MIX; CHORD-mu, arXiv:2508.11408."""

    mu: float = 0.1
    """Weight of the imitation, within [0, 1]."""

    loss_name = "mix"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0.0 <= self.mu <= 1.0, f"mu must be within [0, 1], got {self.mu}")

    def mu_at(self, step: int) -> float:
        """The same in every step."""
        return self.mu

    def imitation(self) -> PolicyLoss:
        """The mean of -log p."""
        return Sft()


def expert_mask(expert_mask_B: Tensor | None) -> Tensor:
    """[B] bool, True for a demonstration. Raises: ValueError: the batch does not tell."""
    if expert_mask_B is None:
        raise ValueError("a mixture needs expert_mask_B: which sequences are demonstrations (all False if none)")
    return expert_mask_B


class MixAlgorithm(AlgorithmType):
    """GRPO on the rollouts, SFT on the demonstrations; the entropy bonus leaves demonstrations out."""

    algorithm_type = "mix"
    policy_loss_fn = "mix"
    entropy_loss_fn = "mix"
    sample_strategy = "mix"
