"""Losses that imitate: SFT and its reweighted kin, and the mixtures of imitation and GRPO.

Knows nothing of where demonstrations come from. Invariant: a mixture is a matter of weights: its parts are
normalized each over its own tokens of the whole batch, so any cut of the batch gives the same loss.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from rftdask.algorithm import aggregation
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss
from rftdask.algorithm.losses.ratio_losses import Ppo
from rftdask.algorithm.names import one_of, require


@dataclass(frozen=True)
class Sft(PolicyLoss):
    """-log p: maximum likelihood. Metric sft_nll, nats per token."""

    uses_advantages: ClassVar[bool] = False
    schema: ClassVar[str] = "any"

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        loss_BT = -inputs.policy_logprobs_BT
        return loss_BT, {"sft_nll": inputs.weighted(loss_BT)}


@dataclass(frozen=True)
class SftIs(Sft):
    """-sg(p) log p: likely tokens weigh more. DFT, arXiv:2508.05629; CHORD, arXiv:2508.11408."""

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs_BT = inputs.policy_logprobs_BT
        loss_BT = -logprobs_BT.detach().exp() * logprobs_BT
        return loss_BT, {"sft_nll": inputs.weighted(-logprobs_BT)}


@dataclass(frozen=True)
class SftPhi(Sft):
    """-sg(p (1 - p)) log p: tokens that are neither sure nor hopeless weigh most. CHORD-phi, arXiv:2508.11408,
    equation 7."""

    cutoff_prob: float = 1.0
    """Tokens more probable than this give no gradient; 1: none are cut."""

    def __post_init__(self) -> None:
        require(0.0 < self.cutoff_prob <= 1.0, f"cutoff_prob must be within (0, 1], got {self.cutoff_prob}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs_BT = inputs.policy_logprobs_BT
        probs_BT = logprobs_BT.detach().exp()
        bounded_BT = logprobs_BT.clamp(max=math.log(self.cutoff_prob)) if self.cutoff_prob < 1.0 else logprobs_BT
        loss_BT = -(probs_BT * (1.0 - probs_BT)) * bounded_BT
        return loss_BT, {"sft_nll": inputs.weighted(-logprobs_BT)}


@dataclass(frozen=True)
class Mixture(Ppo):
    """Base of the mixtures: (1 - mu) * PPO over the policy's own sequences + mu * imitation over demonstrations.

    The factors live in `token_weights`: own tokens sum to 1 - mu, demonstrated ones to mu (for the mean
    aggregations), each part normalized by itself. A batch without demonstrations weighs 1 - mu, one without own
    sequences mu.
    """

    sft_loss_agg_mode: str | None = None
    """Aggregation of the demonstrations; None: the algorithm's."""

    ignored_args: ClassVar[tuple[str, ...]] = (
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
            one_of("sft_loss_agg_mode", self.sft_loss_agg_mode, aggregation.AGGREGATIONS)

    def mu_at(self, step: int) -> float:
        """Weight of the imitation in the batch of this step, within [0, 1]."""
        raise NotImplementedError

    def imitation(self) -> PolicyLoss:
        """The loss of the demonstrations."""
        raise NotImplementedError

    def token_weights(
        self,
        loss_mask_BT: Tensor,
        mode: str,
        *,
        max_tokens: int | None = None,
        expert_mask_B: Tensor | None = None,
        sequence_BT: Tensor | None = None,
        step: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        expert_BT = aggregation.spread(_experts(expert_mask_B), loss_mask_BT, sequence_BT)
        mu = self.mu_at(step)
        own_BT, shown_BT = (
            aggregation.token_weights(mask, how, max_tokens=max_tokens, sequence_BT=sequence_BT, dtype=dtype)
            for mask, how in (
                (loss_mask_BT & ~expert_BT, mode),
                (loss_mask_BT & expert_BT, self.sft_loss_agg_mode or mode),
            )
        )
        return (1.0 - mu) * own_BT + mu * shown_BT

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        expert_B = _experts(inputs.expert_mask_B).to(inputs.token_weights_BT.dtype)
        own_BT, shown_BT = inputs.spread(1 - expert_B), inputs.spread(expert_B)  # 0 or 1
        own = replace(inputs, token_weights_BT=inputs.token_weights_BT * own_BT)
        shown = replace(inputs, token_weights_BT=inputs.token_weights_BT * shown_BT)
        own_loss_BT, own_metrics = super().__call__(own)
        shown_loss_BT, shown_metrics = self.imitation()(shown)
        losses = {"usual_loss": own.weighted(own_loss_BT), "expert_loss": shown.weighted(shown_loss_BT)}
        return own_BT * own_loss_BT + shown_BT * shown_loss_BT, {**own_metrics, **shown_metrics, **losses}


@dataclass(frozen=True)
class Mix(Mixture):
    """A mixture with a fixed weight and plain SFT. Trinity-RFT's MIX; CHORD-mu, arXiv:2508.11408, equation 3."""

    mu: float = 0.1
    """Weight of the imitation, within [0, 1]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0.0 <= self.mu <= 1.0, f"mu must be within [0, 1], got {self.mu}")

    def mu_at(self, step: int) -> float:
        return self.mu

    def imitation(self) -> PolicyLoss:
        return Sft()


@dataclass(frozen=True)
class MixChord(Mixture):
    """A mixture whose weight warms up and decays, with CHORD's phi on the demonstrations. CHORD, arXiv:2508.11408.

    mu(step) = peak * step / warmup in the warm-up, then valley + (peak - valley) * (1 + cos(pi x)) / 2 with x from 0
    to 1 over the decay, then valley.
    """

    mu_warmup_steps: int = 0
    mu_decay_steps: int = 0
    mu_peak: float = 0.1
    mu_valley: float = 0.1
    enable_phi_function: bool = True
    """Weigh demonstrated tokens by p (1 - p)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = (self.mu_warmup_steps, self.mu_decay_steps)
        require(min(steps) >= 0, f"mu_warmup_steps and mu_decay_steps must be >= 0, got {steps}")
        ends = (self.mu_peak, self.mu_valley)
        require(all(0.0 <= mu <= 1.0 for mu in ends), f"mu_peak and mu_valley must be within [0, 1], got {ends}")

    def mu_at(self, step: int) -> float:
        if step < self.mu_warmup_steps:
            return step / self.mu_warmup_steps * self.mu_peak
        if step >= self.mu_warmup_steps + self.mu_decay_steps:
            return self.mu_valley
        share = (step - self.mu_warmup_steps) / self.mu_decay_steps
        return self.mu_valley + (self.mu_peak - self.mu_valley) * 0.5 * (1.0 + math.cos(math.pi * share))

    def imitation(self) -> PolicyLoss:
        return SftPhi() if self.enable_phi_function else Sft()


def _experts(expert_mask_B: Tensor | None) -> Tensor:
    if expert_mask_B is None:
        raise ValueError("a mixture needs expert_mask_B: which sequences are demonstrations (all False if none)")
    return expert_mask_B
