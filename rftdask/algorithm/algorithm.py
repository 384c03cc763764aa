"""Algorithm: composition of parts, and the only place where their terms are added.

loss = sum over tokens of weight * (correction * policy loss + kl_coef * KL - entropy_coef * entropy). It does
not know where batches come from. Invariant: with weights computed once for the whole batch, losses, gradients and
metrics of micro-batches add up to those of the batch.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rftdask.algorithm.advantages.base import AdvantageFn, AdvantageInputs, AdvantageResult, group_sums
from rftdask.algorithm.checks import require
from rftdask.algorithm.correction import Correction
from rftdask.algorithm.entropy import EntropyBonus
from rftdask.algorithm.kl import KlFn
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss


@dataclass(frozen=True)
class Algorithm:
    """Result of `make_algorithm`. Usage, for one batch:

    advantages = algorithm.compute_advantages(AdvantageInputs(...))
    weights_NT = algorithm.token_weights(loss_mask_NT, max_tokens=...)        # once, over the whole batch
    for rows in micro_batches:
        loss, metrics = algorithm.compute_loss(LossInputs(..., token_weights_BT=weights_NT[rows]))
        loss.backward()                                                       # gradients and metrics add up
    """

    name: str
    schema: str
    """Rows to train on: "experience", "sft", "cpt", "dpo" or "kto"."""
    repeat_times: int
    """Default number of rollouts per task."""
    loss_agg_mode: str
    sample_strategy: str
    """Default rule that forms batches."""
    advantage_fn: AdvantageFn | None
    """None: the loss takes no advantages."""
    policy_loss_fn: PolicyLoss
    kl_loss_fn: KlFn
    kl_penalty_fn: KlFn
    """KL penalty subtracted from the rewards before the advantages."""
    entropy_loss_fn: EntropyBonus
    correction: Correction

    @property
    def use_critic(self) -> bool:
        """True if values are needed."""
        return self.advantage_fn is not None and self.advantage_fn.uses_critic

    @property
    def use_reference(self) -> bool:
        """True if the KL loss, the KL penalty or the policy loss needs ref_logprobs."""
        return self.kl_loss_fn.is_active or self.kl_penalty_fn.is_active or self.policy_loss_fn.uses_reference

    @property
    def use_teacher(self) -> bool:
        """True if the advantages need teacher logprobs, or the policy loss needs teacher logits."""
        needs = () if self.advantage_fn is None else self.advantage_fn.needs
        return "teacher_logprobs_Q" in needs or self.policy_loss_fn.uses_teacher

    @property
    def use_entropy(self) -> bool:
        """True if the loss needs entropy_BT."""
        return self.entropy_loss_fn.is_active

    def without_filtering(self) -> "Algorithm":
        """Algorithm for rows that are already filtered; see `AdvantageFn.without_filtering`."""
        return self if self.advantage_fn is None else replace(self, advantage_fn=self.advantage_fn.without_filtering())

    def row_weights(self, counts_B: Tensor, **arguments: Any) -> Tensor:
        """[B] weights of the trained tokens of each row of the WHOLE batch. Split them together with the batch.

        Args:
            counts_B: [B] int64, trained tokens of all rows of all ranks and micro-batches.
            arguments: of `PolicyLoss.row_weights`: max_tokens, rollout_B, expert_mask_B, step, dtype.
        Raises: ValueError: an argument that the mode or the loss needs is missing.
        """
        loss = self.policy_loss_fn
        require(
            not hasattr(loss, "token_weights"),
            f"{type(loss).__name__} defines token_weights; define row_weights, which returns [B], instead",
        )
        return loss.row_weights(counts_B, self.loss_agg_mode, **arguments)

    def token_weights(self, loss_mask_BT: Tensor, *, dtype: torch.dtype = torch.float32, **arguments: Any) -> Tensor:
        """[B, T] `row_weights`, 0 outside the mask of the whole batch."""
        weights_B = self.row_weights(loss_mask_BT.sum(-1), dtype=dtype, **arguments)
        return loss_mask_BT.to(dtype) * weights_B[:, None]

    def compute_advantages(self, inputs: AdvantageInputs, *, kl_coef: float | None = None) -> AdvantageResult:
        """Advantages of a whole batch, after subtracting the KL penalty from the rewards.

        kl_coef: adaptive coefficient of the penalty. None: the constant one.
        Raises: ValueError: the algorithm has no advantages, or an input is missing or not finite.
        """
        if self.advantage_fn is None:
            raise ValueError(f"algorithm {self.name!r} has no advantage function")
        if not self.kl_penalty_fn.is_active:
            return self.advantage_fn(inputs)
        inputs.check(("loss_mask_Q", "rollout_logprobs_Q", "ref_logprobs_Q"))
        assert inputs.rollout_logprobs_Q is not None and inputs.ref_logprobs_Q is not None
        mask_Q = inputs.used_mask_Q
        # KL of the sampling policy, not of the current weights: the penalty is part of the reward, without gradient.
        kl_Q = self.kl_penalty_fn.per_token(
            inputs.rollout_logprobs_Q.masked_fill(~mask_Q, 0.0), inputs.ref_logprobs_Q.masked_fill(~mask_Q, 0.0)
        )
        coef = self.kl_penalty_fn.kl_coef if kl_coef is None else kl_coef
        # Subtracted per rollout (sum over its tokens), or per token if the advantage is per token.
        kl_N, num_trained = inputs.row_sums(kl_Q), inputs.row_sums(mask_Q).sum()
        mean_kl = float(kl_N.sum() / num_trained.clamp(min=1))
        if inputs.rollout_N is not None and len(kl_N):
            kl_N = group_sums(kl_N, inputs.rollout_N, int(inputs.rollout_N.max()) + 1)[inputs.rollout_N]
        changes: dict[str, Any] = {"rewards_N": inputs.rewards_N - coef * kl_N.to(inputs.rewards_N.dtype)}
        if self.advantage_fn.token_level:
            changes = {"token_rewards_Q": inputs.token_rewards() - coef * kl_Q}
        # Before the baseline, so that the rewards of all siblings include the penalty.
        result = self.advantage_fn(replace(inputs, **changes))
        return replace(result, metrics={**result.metrics, "kl_penalty": mean_kl, "kl_penalty_coef": coef})

    def compute_loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalar loss of a micro-batch for backward(), and detached scalar metrics that add over micro-batches.

        Metrics are token-weighted sums: loss, policy_loss, kl and entropy (if active), those of the policy loss, and
        weight_sum, the divisor that turns a sum into a mean (1 for the mean aggregations). Positions outside the loss
        mask contribute exactly 0 to value and gradient, whatever they hold.

        Raises: ValueError: nan or infinity at a trained position, or an input that a part needs is missing.
        """
        # Only here: parts may assume that every position is finite.
        inputs = inputs.cleaned()
        loss_BT, metrics = self.policy_loss_fn(inputs)
        if self.correction.is_active:
            factors_BT, correction_metrics = self.correction.factors(inputs)
            # Only for the policy loss: KL and entropy are computed from the current weights.
            loss_BT = loss_BT * factors_BT
            metrics |= correction_metrics
        metrics["policy_loss"] = inputs.weighted(loss_BT)
        if self.kl_loss_fn.is_active:
            if inputs.ref_logprobs_BT is None:
                raise ValueError(
                    f"algorithm {self.name!r} has a KL loss, which needs ref_logprobs_BT; pass them or "
                    "set kl_loss_fn: none"
                )
            kl_BT = self.kl_loss_fn.per_token(inputs.policy_logprobs_BT, inputs.ref_logprobs_BT, inputs.old_logprobs_BT)
            metrics["kl"] = inputs.weighted(kl_BT)
            loss_BT = loss_BT + (self.kl_loss_fn.kl_coef if inputs.kl_coef is None else inputs.kl_coef) * kl_BT
        if self.entropy_loss_fn.is_active:
            entropy_BT = self.entropy_loss_fn.per_token(inputs)
            metrics["entropy"] = inputs.weighted(entropy_BT)
            loss_BT = loss_BT - self.entropy_loss_fn.entropy_coef * entropy_BT
        # The weights hold the denominator of the whole batch, so losses of micro-batches add up.
        loss = (loss_BT * inputs.token_weights_BT).sum()
        metrics["loss"] = loss.detach()
        metrics["weight_sum"] = inputs.token_weights_BT.sum()
        return loss, metrics
