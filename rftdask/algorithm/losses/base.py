"""The tensors that a loss takes, and the base class of the policy losses. Shapes: B sequences of T scored positions.

Knows nothing of models, batches on storage or optimizers. Invariant: after `cleaned()` every trained position is
finite and every other position is 0 in all tensors, so no loss needs to think of padding or garbage.
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
    """One micro-batch: B sequences of T scored positions. Position (b, t) of every tensor is about the same token;
    padding has loss_mask False.
    """

    policy_logprobs_BT: Tensor
    """[B, T] float, log p of the token under the current weights; of a reward model the score of the row, at all of
    its tokens; requires grad."""
    rollout_logprobs_BT: Tensor
    """[B, T] float, recorded when the token was sampled. SFT and DPO do not read it: give the policy's, detached."""
    loss_mask_BT: Tensor
    """[B, T] bool, True where the token is trained."""
    token_weights_BT: Tensor
    """[B, T] float32, this micro-batch's part of `Algorithm.token_weights` of the whole batch."""
    advantages_BT: Tensor | None = None
    """[B, T] float, or [B, 1] to broadcast; None for losses without advantages."""
    ref_logprobs_BT: Tensor | None = None
    """[B, T] float, under the frozen reference; None without a reference."""
    entropy_BT: Tensor | None = None
    """[B, T] float, entropy of the policy's next-token distribution in nats; may require grad."""
    expert_mask_B: Tensor | None = None
    """[B] bool, True for a demonstration (MIX, CHORD); None: no demonstrations."""
    proximal_logprobs_BT: Tensor | None = None
    """[B, T] float, under the trainer's weights before this batch's first update; None: not recomputed."""
    rewards_B: Tensor | None = None
    """[B] float, reward of each sequence; of a response with a verdict (KTO) 1 if it is desirable, else 0."""
    kl_baseline: float | None = None
    """KTO's z0, in nats; None: the loss does not ask for it."""
    divergence_BT: Tensor | None = None
    """[B, T] float, `PolicyLoss.divergence` of the policy and its teacher in nats; requires grad. None: no teacher."""
    kl_coef: float | None = None
    """Current coefficient of the adaptive KL controller; None: the KL part's own."""
    uids: Sequence[str] | None = None
    """[B] names of the experiences, for error messages; None: row numbers are used."""

    @property
    def old_logprobs_BT(self) -> Tensor:
        """Denominator of the ratio: the proximal policy if it was recomputed, else what was recorded when sampling."""
        return self.rollout_logprobs_BT if self.proximal_logprobs_BT is None else self.proximal_logprobs_BT

    def advantages(self) -> Tensor:
        """[B, T] advantages. Raises: ValueError: the batch has none."""
        if self.advantages_BT is None:
            raise ValueError("this loss needs advantages_BT; run the algorithm's advantage_fn first")
        return self.advantages_BT

    def log_ratio(self) -> Tensor:
        """[B, T] log r = log p_policy - log p_old, within +-20 so that its exp stays finite; differentiable."""
        return (self.policy_logprobs_BT - self.old_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def sequence_sums(self, values_BT: Tensor) -> Tensor:
        """[B] sums over the trained tokens of each sequence."""
        return (values_BT * self.loss_mask_BT).sum(-1)

    def sequence_means(self, values_BT: Tensor) -> Tensor:
        """[B] means over the trained tokens of each sequence; 0 for a sequence without any."""
        # Trained tokens alone: the width T depends on who shares the micro-batch.
        lengths_B = self.sequence_sums(torch.ones_like(values_BT))
        return self.sequence_sums(values_BT) / lengths_B.clamp(min=1.0)

    def spread(self, values_B: Tensor) -> Tensor:
        """[B, T] view of a value per sequence."""
        return values_B[:, None].expand_as(self.loss_mask_BT)

    def weighted(self, values_BT: Tensor) -> Tensor:
        """Scalar sum(values * token_weights), detached: a metric that adds over micro-batches to the batch's value."""
        return (values_BT.detach() * self.token_weights_BT).sum()

    def cleaned(self) -> "LossInputs":
        """The same batch with 0 at every position outside the loss mask, in every tensor.

        Raises: ValueError: shapes that do not fit; nan or infinity at a trained position, naming tensor and experience.
        """
        shape, mask_BT = self.policy_logprobs_BT.shape, self.loss_mask_BT
        require(mask_BT.dtype == torch.bool, f"loss_mask_BT must be bool, not {mask_BT.dtype}")
        require(mask_BT.shape == shape, f"loss_mask_BT is {tuple(mask_BT.shape)}, not {tuple(shape)}")
        given = {name: value for name in _PER_TOKEN if (value := getattr(self, name)) is not None}
        for name, value in {"token_weights_BT": self.token_weights_BT, **given}.items():
            fits = value.shape == shape or (name == "advantages_BT" and value.shape == (shape[0], 1))
            require(fits, f"{name} is {tuple(value.shape)}, policy_logprobs_BT {tuple(shape)}")
        # Advantages of [B, 1] become [B, T] here, so that losses know one shape.
        given = {name: value.expand(shape) for name, value in given.items()}
        kept_BT = mask_BT.to(self.policy_logprobs_BT.dtype)
        clean: dict[str, Any] = {name: value * kept_BT for name, value in given.items()}
        # One number shows whether all is finite (a sum with nan or infinity never is): one device sync, not one a
        # tensor. Usually all is, outside of the mask too, and a product takes a tenth of the time of a fill.
        if math.isfinite(float(sum(value.detach().sum() for value in clean.values()))):
            return dataclasses.replace(self, **clean)
        # nan * 0 is nan, in the value and in the gradient; a fill removes what is outside the mask.
        clean = {name: value.masked_fill(~mask_BT, 0.0) for name, value in given.items()}
        for name, value in clean.items():
            bad = (~torch.isfinite(value)).nonzero()
            if len(bad):
                row, position = (int(index) for index in bad[0])
                uid = f" (experience {self.uids[row]})" if self.uids is not None else ""
                raise ValueError(
                    f"{name} is {float(value[row, position])} at row {row}, position {position}{uid}; {len(bad)} such "
                    "trained positions in this micro-batch. Drop the experience or repair what produced it; it is not "
                    "trained"
                )
        return dataclasses.replace(self, **clean)


class PolicyLoss(ABC):
    """The base of the policy losses: the fields of a frozen dataclass are its arguments, a call is the loss of every
    token.

    Usage: `loss_BT, metrics = Ppo()(inputs.cleaned())`, then `(loss_BT * inputs.token_weights_BT).sum()`. A loss of
    your own is a subclass with `__call__`, in a file of its own:

        @dataclass(frozen=True)
        class LinearLoss(PolicyLoss):
            scale: float = 1.0

            def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
                return -self.scale * inputs.advantages() * inputs.policy_logprobs_BT, {}
    """

    loss_name: ClassVar[str]
    """The name by which a configuration chooses it; a loss without one is chosen by its class."""
    uses_advantages: ClassVar[bool] = True
    uses_reference: ClassVar[bool] = False
    """Whether it reads `ref_logprobs_BT`, so that the frozen initial model is loaded."""
    scores_sequences: ClassVar[bool] = False
    """Whether it trains a reward model: a head of one number in place of the vocabulary's."""
    uses_kl_baseline: ClassVar[bool] = False
    """Whether it reads `kl_baseline`, for which each prompt is scored with the response to another one."""
    uses_teacher: ClassVar[bool] = False
    """Whether it reads `divergence_BT`, so that a teacher is loaded; then it has a `divergence`."""
    uses_proximal: ClassVar[bool] = False
    """Whether it reads `proximal_logprobs_BT` whatever the ratios of the batch are taken to, so that they are computed
    where a batch makes several updates."""
    schema: ClassVar[str] = "experience"
    """The rows it can read: "experience", "dpo" (pairs), "kto" (responses with a verdict) or "any"."""
    only_agg_mode: ClassVar[str | None] = None
    """The one aggregation under which the loss is what its paper says; None: any."""
    ignored_args: ClassVar[tuple[str, ...]] = ()
    """Arguments of other systems that mean nothing here: each is accepted with a warning."""

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of every token, before weights and sums.

        Args: inputs: cleaned. Positions outside the loss mask may hold any finite value in the result: they weigh 0.
        Returns: [B, T] float, differentiable in `policy_logprobs_BT`; and detached scalar metrics, each a sum weighted
            by `token_weights_BT` (see `LossInputs.weighted`), so that it adds over micro-batches.
        Raises: ValueError: the batch lacks something the loss needs.
        """

    def divergence(self, policy_logits_QV: Tensor, teacher_logits_QV: Tensor) -> Tensor:
        """[Q] float32 divergence of the policy from its teacher at each of Q positions, from [Q, V] float32 logits over
        the vocabulary, of some positions at a time; differentiable in the policy's. Of losses that use a teacher."""
        raise NotImplementedError(f"{type(self).__name__} has uses_teacher and no divergence")

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
        """Weights in this loss of the trained tokens of each row of the whole batch, [B]; `aggregation.row_weights`.

        expert_mask_B: [B] bool, demonstrations. step: training step. Both are for the mixtures.
        """
        del expert_mask_B, step
        return aggregation.row_weights(counts_B, mode, rollout_B=rollout_B, max_tokens=max_tokens, dtype=dtype)


@dataclass(frozen=True)
class ClipRange:
    """Fields of the losses that clip r to [1 - low, 1 + high]."""

    clip_range: float = 0.2
    """Both sides, where the side's own value is None."""
    clip_range_low: float | None = None
    """Distance below 1; None: `clip_range`."""
    clip_range_high: float | None = None
    """Distance above 1; larger than low is DAPO's clip-higher. None: `clip_range`."""

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
