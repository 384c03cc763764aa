"""Inputs of losses, and the base class of policy losses. Shapes: B sequences of T scored positions.

Knows nothing of models, batches on storage or optimizers. Invariant: after `cleaned()` every trained position is
finite and every other position is 0 in all tensors, so losses need not handle padding.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rftdask.algorithm import aggregation
from rftdask.algorithm.checks import require
from rftdask.algorithm.kl import MAX_LOG_RATIO

_PER_TOKEN = (
    "policy_logprobs_BT",
    "rollout_logprobs_BT",
    "advantages_BT",
    "ref_logprobs_BT",
    "proximal_logprobs_BT",
    "entropy_BT",
    "divergence_BT",
)


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch: B sequences of T scored positions. Position (b, t) of every tensor refers to the same token;
    padding has loss_mask False.
    """

    policy_logprobs_BT: Tensor
    """[B, T] float, log p of the token under the current weights; requires grad. For a reward model: the score of the
    row, at all of its tokens."""
    rollout_logprobs_BT: Tensor
    """[B, T] float, recorded when the token was sampled. Unused by SFT and DPO: pass the detached policy logprobs."""
    loss_mask_BT: Tensor
    """[B, T] bool, True where the token is trained."""
    token_weights_BT: Tensor
    """[B, T] float32, part of this micro-batch in `Algorithm.token_weights` of the whole batch."""
    advantages_BT: Tensor | None = None
    """[B, T] float, or [B, 1] to broadcast. None: the loss uses no advantages."""
    ref_logprobs_BT: Tensor | None = None
    """[B, T] float, under the frozen reference. None: no reference."""
    entropy_BT: Tensor | None = None
    """[B, T] float, entropy of the policy's next-token distribution in nats; may require grad."""
    expert_mask_B: Tensor | None = None
    """[B] bool, True for a demonstration (MIX, CHORD). None: no demonstrations."""
    proximal_logprobs_BT: Tensor | None = None
    """[B, T] float, under the trainer's weights before the first update of this batch. None: not recomputed."""
    rewards_B: Tensor | None = None
    """[B] float, reward of each sequence. For KTO: 1 if the response is desirable, else 0."""
    kl_baseline: float | None = None
    """KTO's z0, in nats. None: not used by the loss."""
    divergence_BT: Tensor | None = None
    """[B, T] float, `PolicyLoss.divergence` from the teacher, in nats; requires grad. None: no teacher."""
    kl_coef: float | None = None
    """Current coefficient of the adaptive KL controller. None: the constant one."""
    uids: Sequence[str] | None = None
    """[B] names of the experiences, for error messages. None: row numbers."""

    @property
    def old_logprobs_BT(self) -> Tensor:
        """Denominator of the ratio: logprobs of the proximal policy if recomputed, else those recorded when
        sampling."""
        return self.rollout_logprobs_BT if self.proximal_logprobs_BT is None else self.proximal_logprobs_BT

    def advantages(self) -> Tensor:
        """[B, T] advantages. Raises: ValueError: the batch has none."""
        if self.advantages_BT is None:
            raise ValueError("this loss needs advantages_BT; run the algorithm's advantage_fn first")
        return self.advantages_BT

    def log_ratio(self) -> Tensor:
        """[B, T] log r = log p_policy - log p_old, clamped to +-20 so that its exp is finite; differentiable."""
        return (self.policy_logprobs_BT - self.old_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def sequence_sums(self, values_BT: Tensor) -> Tensor:
        """[B] sums over the trained tokens of each sequence."""
        return (values_BT * self.loss_mask_BT).sum(-1)

    def sequence_means(self, values_BT: Tensor) -> Tensor:
        """[B] means over the trained tokens of each sequence; 0 for a sequence without any."""
        # Not divided by the width T, which depends on the other rows of the micro-batch.
        lengths_B = self.sequence_sums(torch.ones_like(values_BT))
        return self.sequence_sums(values_BT) / lengths_B.clamp(min=1.0)

    def spread(self, values_B: Tensor) -> Tensor:
        """[B, T] view of a value per sequence."""
        return values_B[:, None].expand_as(self.loss_mask_BT)

    def weighted(self, values_BT: Tensor) -> Tensor:
        """Scalar sum(values * token_weights), detached: a metric that adds over micro-batches."""
        return (values_BT.detach() * self.token_weights_BT).sum()

    def cleaned(self) -> "LossInputs":
        """Copy with 0 at every position outside the loss mask, in every tensor.

        Raises: ValueError: mismatched shapes; nan or infinity at a trained position, with tensor and experience.
        """
        shape, mask_BT = self.policy_logprobs_BT.shape, self.loss_mask_BT
        require(mask_BT.dtype == torch.bool, f"loss_mask_BT must be bool, not {mask_BT.dtype}")
        require(mask_BT.shape == shape, f"loss_mask_BT is {tuple(mask_BT.shape)}, not {tuple(shape)}")
        tensors = {name: value for name in _PER_TOKEN if (value := getattr(self, name)) is not None}
        for name, value in {"token_weights_BT": self.token_weights_BT, **tensors}.items():
            fits = value.shape == shape or (name == "advantages_BT" and value.shape == (shape[0], 1))
            require(fits, f"{name} is {tuple(value.shape)}, policy_logprobs_BT {tuple(shape)}")
        # Advantages [B, 1] become [B, T], so that losses see one shape.
        tensors = {name: value.expand(shape) for name, value in tensors.items()}
        kept_BT = mask_BT.to(self.policy_logprobs_BT.dtype)
        clean: dict[str, Any] = {name: value * kept_BT for name, value in tensors.items()}
        # A sum with nan or infinity is not finite, so one number checks all tensors with one device sync. Usually all
        # are finite, also outside the mask, and a product takes a tenth of the time of a fill.
        if math.isfinite(float(sum(value.detach().sum() for value in clean.values()))):
            return dataclasses.replace(self, **clean)
        # nan * 0 is nan in value and gradient, so positions outside the mask are filled.
        clean = {name: value.masked_fill(~mask_BT, 0.0) for name, value in tensors.items()}
        for name, value in clean.items():
            bad = (~torch.isfinite(value)).nonzero()
            if len(bad):
                row, position = (int(index) for index in bad[0])
                uid = f" (experience {self.uids[row]})" if self.uids is not None else ""
                raise ValueError(
                    f"{name} is {float(value[row, position])} at row {row}, position {position}{uid}; {len(bad)} "
                    "trained positions of this micro-batch are not finite. Drop the experience or fix its source"
                )
        return dataclasses.replace(self, **clean)


class PolicyLoss(ABC):
    """Base of policy losses. The fields of the frozen dataclass are its arguments; a call returns the loss of every
    token.

    Usage: `loss_BT, metrics = Ppo()(inputs.cleaned())`, then `(loss_BT * inputs.token_weights_BT).sum()`. A custom loss
    is a subclass with `__call__`, in a separate file:

        @dataclass(frozen=True)
        class LinearLoss(PolicyLoss):
            scale: float = 1.0

            def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
                return -self.scale * inputs.advantages() * inputs.policy_logprobs_BT, {}
    """

    loss_name: ClassVar[str]
    """Name in a configuration. A loss without one is named by its class."""
    uses_advantages: ClassVar[bool] = True
    uses_reference: ClassVar[bool] = False
    """True if it reads `ref_logprobs_BT`, for which the frozen initial model is loaded."""
    scores_sequences: ClassVar[bool] = False
    """True if it trains a reward model, whose head returns one number instead of vocabulary logits."""
    uses_kl_baseline: ClassVar[bool] = False
    """True if it reads `kl_baseline`, for which each prompt is scored with the response to another prompt."""
    uses_teacher: ClassVar[bool] = False
    """True if it reads `divergence_BT`, for which a teacher is loaded. Requires `divergence`."""
    uses_proximal: ClassVar[bool] = False
    """True if it always reads `proximal_logprobs_BT`, so that they are computed for batches with several updates."""
    schema: ClassVar[str] = "experience"
    """Rows that it can read: "experience", "dpo" (pairs), "kto" (responses with a verdict) or "any"."""
    only_agg_mode: ClassVar[str | None] = None
    """The only aggregation for which the loss matches its paper. None: any."""
    ignored_args: ClassVar[tuple[str, ...]] = ()
    """Arguments of other systems without a meaning here, accepted with a warning."""

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of every token, before weights and sums.

        Args: inputs: cleaned. The result may hold any finite value outside the loss mask, where weights are 0.
        Returns: [B, T] float, differentiable in `policy_logprobs_BT`; and detached scalar metrics, sums weighted by
            `token_weights_BT` (see `LossInputs.weighted`) that add over micro-batches.
        Raises: ValueError: the batch lacks an input of the loss.
        """

    def divergence(self, policy_logits_QV: Tensor, teacher_logits_QV: Tensor) -> Tensor:
        """[Q] float32 divergence of the policy from its teacher at Q positions, from [Q, V] float32 logits.

        Differentiable in the policy logits. Called in chunks of positions, for losses with `uses_teacher`.
        """
        raise NotImplementedError(f"{type(self).__name__} sets uses_teacher but does not define divergence")

    def row_weights(
        self,
        counts_B: Tensor,
        mode: str,
        *,
        max_tokens: int | None = None,
        rollout_B: Tensor | None = None,
        expert_mask_B: Tensor | None = None,
        step: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """[B] weights of the trained tokens of each row of the whole batch; see `aggregation.row_weights`.

        expert_mask_B: [B] bool, True for demonstrations. step: training step. Both are used by mixtures.
        """
        del expert_mask_B, step
        return aggregation.row_weights(counts_B, mode, rollout_B=rollout_B, max_tokens=max_tokens, dtype=dtype)


@dataclass(frozen=True)
class ClipRange:
    """Fields of losses that clip r to [1 - low, 1 + high]."""

    clip_range: float = 0.2
    """Distance on both sides, unless overridden."""
    clip_range_low: float | None = None
    """Distance below 1; None: `clip_range`."""
    clip_range_high: float | None = None
    """Distance above 1. Larger than low: DAPO's clip-higher. None: `clip_range`."""

    def __post_init__(self) -> None:
        require(0.0 <= self.low <= 1.0, f"clip_range_low must be within [0, 1], got {self.low}")
        require(self.high >= 0.0, f"clip_range_high must be >= 0, got {self.high}")

    @property
    def low(self) -> float:
        """Distance of the lower bound from 1."""
        return self.clip_range if self.clip_range_low is None else self.clip_range_low

    @property
    def high(self) -> float:
        """Distance of the upper bound from 1."""
        return self.clip_range if self.clip_range_high is None else self.clip_range_high


def ratio_metrics(inputs: LossInputs, log_r_BT: Tensor, clipped_BT: Tensor) -> dict[str, Tensor]:
    """clip_frac: share of tokens without gradient; ppo_kl: mean of -log r, an estimate of KL(old, policy) in nats."""
    return {"clip_frac": inputs.weighted(clipped_BT), "ppo_kl": inputs.weighted(-log_r_BT)}
