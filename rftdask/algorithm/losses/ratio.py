"""Losses in the ratio r = pi / pi_old of the sampled token, clipped, gated or filtered, times the advantage.

Invariant: where pi equals pi_old, r is exactly 1 and the gradient of every loss with respect to log pi is -A.
Letters: [B, T] tokens of sequences; [N] tokens in any order; [K] counted tokens; [S] sequences.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import one_of, require
from rftdask.algorithm.kl import MAX_LOG_RATIO
from rftdask.algorithm.losses.base import ClipRange, LossInputs, PolicyLoss, ratio_metrics

# ---- PPO: a token whose probability has moved far enough has no gradient.


@dataclass(frozen=True)
class Ppo(ClipRange, PolicyLoss):
    """max(-A r, -A clip(r, 1 - low, 1 + high)), bounded by c |A| where A < 0 (dual clip).

    Sources: PPO, arXiv:1707.06347, equation 7; dual clip, arXiv:1912.09729, equation 5; clip-higher, DAPO,
    arXiv:2503.14476; sequence masking, DeepSeek-V3.2, arXiv:2512.02556, section 3.1.
    """

    clip_ratio_c: float | None = 3.0
    """c of the dual clip, > 1. None: no dual clip."""
    enable_sequence_masking: bool = False
    """Drop tokens with A < 0 in sequences whose mean -log r exceeds `delta_sequence_masking`."""
    delta_sequence_masking: float = 0.1
    """Threshold in nats per token."""
    fallback_to_policy_gradient: bool = False
    """Use r = 1 with the gradient of log p: plain policy gradient, without recorded logprobs."""

    loss_name = "ppo"

    def __post_init__(self) -> None:
        super().__post_init__()
        c = self.clip_ratio_c
        require(c is None or c > 1.0, f"clip_ratio_c must be > 1 or None, got {c}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_pi_BT = inputs.policy_logprobs_BT
        # log r = 0 with the gradient of log pi, so the clip is never active.
        log_r_BT = log_pi_BT - log_pi_BT.detach() if self.fallback_to_policy_gradient else inputs.log_ratio()
        loss_BT, metrics = self.clipped(inputs, log_r_BT)
        if self.enable_sequence_masking:
            # M of DeepSeek-V3.2: failures that the policy has moved far away from are not reliable.
            far_BT = inputs.spread(inputs.sequence_means(-log_r_BT.detach()) > self.delta_sequence_masking)
            dropped_BT = far_BT & (inputs.advantages() < 0)
            loss_BT = loss_BT.masked_fill(dropped_BT, 0.0)
            metrics["sequence_mask_frac"] = inputs.weighted(dropped_BT)
        return loss_BT, metrics

    def clipped(self, inputs: LossInputs, log_r_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """[B, T] clipped loss for log r, with metrics clip_frac, ppo_kl and dual_clip_frac."""
        A_BT, r_BT = inputs.advantages(), log_r_BT.exp()
        c = math.inf if self.clip_ratio_c is None else self.clip_ratio_c
        # L^CLIP, equation 7 of PPO: the pessimistic objective, with the sign of a loss.
        loss_BT = torch.maximum(-A_BT * r_BT, -A_BT * r_BT.clamp(1.0 - self.low, 1.0 + self.high))
        # Dual clip, equation 5. Where A < 0 the maximum is unbounded, so one extreme token would dominate the batch.
        # Elsewhere it is at most 0, so the bound has no effect.
        if self.clip_ratio_c is not None:
            loss_BT = torch.minimum(loss_BT, c * A_BT.abs())
        # A token has no gradient where the clipped term, which is constant, is the larger one.
        up_BT, down_BT = A_BT >= 0, A_BT < 0
        clipped_BT = (up_BT & (r_BT > 1.0 + self.high)) | (down_BT & (r_BT < 1.0 - self.low))
        return loss_BT, {
            **ratio_metrics(inputs, log_r_BT, clipped_BT),
            "dual_clip_frac": inputs.weighted(down_BT & (r_BT > c)),
        }


class PpoAlgorithm(AlgorithmType):
    """PPO with a critic: generalized advantage estimation, one rollout per task."""

    algorithm_type = "ppo"
    repeat_times = 1
    advantage_fn = "ppo"
    has_critic = True


# ---- GRPO, its variants and DAPO: PPO's loss with the other rollouts of a task as the baseline
# (`advantages.group.Grpo`) instead of a critic.


class GrpoAlgorithm(AlgorithmType):
    """A = (reward - mean of the task) / std of the task, PPO's clip, KL to the reference in the loss.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.
    """

    algorithm_type = "grpo"
    deprecated_names = ("grpo_verl",)


class DrGrpoAlgorithm(AlgorithmType):
    """No division by the std or the response length, which both favor some responses over others.

    Source: Dr. GRPO, arXiv:2503.20783.
    """

    algorithm_type = "dr_grpo"
    advantage_fn_args: ClassVar = {"std": "none"}
    kl_loss_fn = "none"
    loss_agg_mode = "seq-mean-token-sum-norm"


class BnpoAlgorithm(AlgorithmType):
    """GRPO with equal token weights over the whole batch. Source: loss type "bnpo" of TRL."""

    algorithm_type = "bnpo"
    kl_loss_fn = "none"


class DapoAlgorithm(AlgorithmType):
    """Clip-higher 0.2 and 0.28, tasks without spread dropped, token-mean, no KL. Source: DAPO, arXiv:2503.14476."""

    algorithm_type = "dapo"
    repeat_times = 16
    # Drops tasks whose rewards have standard deviation 0: dynamic sampling.
    advantage_fn_args: ClassVar = {"std_threshold": 0.0}
    policy_loss_fn_args: ClassVar = {"clip_range_low": 0.2, "clip_range_high": 0.28}
    kl_loss_fn = "none"


# ---- Decoupled PPO: clips around a recent policy, and corrects for the stale policy that sampled.


@dataclass(frozen=True)
class DecoupledPpo(Ppo):
    """sg(p_proximal / p_behavior) times PPO in r = p_policy / p_proximal. Hilton et al., arXiv:2110.00641; AReaL,
    arXiv:2505.24298.

    The proximal policy is the trainer's at the start of the batch (`proximal_logprobs`) or, if not recomputed, the
    current one, which is the same before the first update. The behavior policy sampled (`rollout_logprobs`).
    """

    behavior_weight_cap: float | None = 5.0
    """Drop tokens whose p_proximal / p_behavior exceeds this (AReaL's default). None: drop none."""

    loss_name = "decoupled_ppo"
    uses_proximal = True

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_pi_BT, log_behavior_BT = inputs.policy_logprobs_BT, inputs.rollout_logprobs_BT
        recomputed_BT = inputs.proximal_logprobs_BT
        # Detached: in the first update pi is the proximal policy, so r is 1 and only its gradient counts.
        log_proximal_BT = log_pi_BT.detach() if recomputed_BT is None else recomputed_BT
        # The clip around the proximal policy bounds the step, however stale the behavior policy is.
        log_r_BT = (log_pi_BT - log_proximal_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        loss_BT, metrics = self.clipped(inputs, log_r_BT)
        w_BT = (log_proximal_BT - log_behavior_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        # AReaL drops these tokens; truncated importance sampling would cap their weight.
        over_BT = w_BT > (math.inf if self.behavior_weight_cap is None else self.behavior_weight_cap)
        w_BT = w_BT * ~over_BT
        if self.behavior_weight_cap is not None:
            metrics["behavior_cap_frac"] = inputs.weighted(over_BT)
        metrics["behavior_weight"] = inputs.weighted(w_BT)
        # w has no gradient; it only weights the token.
        return w_BT * loss_BT, metrics


class DecoupledPpoAlgorithm(AlgorithmType):
    """GRPO's advantages with the decoupled loss; no KL."""

    algorithm_type = "decoupled_ppo"
    policy_loss_fn = "decoupled_ppo"
    kl_loss_fn = "none"


# ---- Importance sampling: the plain ratio, without a clip.


@dataclass(frozen=True)
class ImportanceSampling(PolicyLoss):
    """-A r without a clip. Used by on-policy distillation (Thinking Machines, "On-Policy Distillation", 2025)."""

    loss_name = "importance_sampling"

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_r_BT = inputs.log_ratio()
        return -inputs.advantages() * log_r_BT.exp(), {"ppo_kl": inputs.weighted(-log_r_BT)}


# ---- GSPO: one ratio per sequence, since the reward is per sequence.


@dataclass(frozen=True)
class Gspo(ClipRange, PolicyLoss):
    """PPO's clip with the sequence's geometric-mean ratio at every token, no dual clip. GSPO, arXiv:2507.18071.

    The paper aggregates as seq-mean-token-mean, the default of the algorithm type "gspo".
    """

    clip_range_low: float | None = 0.0003
    clip_range_high: float | None = 0.0004

    loss_name = "gspo"

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        A_BT, log_pi_BT, log_r_BT = inputs.advantages(), inputs.policy_logprobs_BT, inputs.log_ratio()
        # GSPO-token: s = sg(mean ratio) * pi / sg(pi), with a gradient per token.
        mean_BT = inputs.spread(inputs.sequence_means(log_r_BT.detach()))
        # The value of s is the ratio of the sequence; its gradient is s times that of the token's log pi.
        s_BT = torch.exp(mean_BT + (log_pi_BT - log_pi_BT.detach()))
        # PPO's clip on s, with a narrow range, since a mean over many tokens moves little.
        loss_BT = torch.maximum(-A_BT * s_BT, -A_BT * s_BT.clamp(1.0 - self.low, 1.0 + self.high))
        clipped_BT = ((A_BT >= 0) & (s_BT > 1.0 + self.high)) | ((A_BT < 0) & (s_BT < 1.0 - self.low))
        return loss_BT, ratio_metrics(inputs, log_r_BT, clipped_BT)


class GspoAlgorithm(AlgorithmType):
    """GRPO advantages, one ratio per sequence, equal sequence weights."""

    algorithm_type = "gspo"
    policy_loss_fn = "gspo"
    loss_agg_mode = "seq-mean-token-mean"


# ---- SAPO: a smooth gate instead of the clip, steeper for tokens with negative advantage.


@dataclass(frozen=True)
class Sapo(PolicyLoss):
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A: a soft clip. SAPO, arXiv:2511.20347, equations 5 and 6.

    The gate is differentiated: the weight of the gradient is 4 s (1 - s) r, which is 1 at r = 1 and goes to 0 far from
    it. A detached gate times log p would grow with r and clip nothing.
    """

    tau_pos: float = 1.0
    """Temperature where A > 0."""
    tau_neg: float = 1.05
    """Temperature where A <= 0. Larger values decay faster."""

    loss_name = "sapo"

    def __post_init__(self) -> None:
        require(self.tau_pos > 0 and self.tau_neg > 0, f"tau must be > 0, got {self.tau_pos}, {self.tau_neg}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        A_BT, log_r_BT = inputs.advantages(), inputs.log_ratio()
        # Negative advantages raise all other tokens at once, which destabilizes training, so they use the larger tau.
        tau_BT = torch.where(A_BT > 0, torch.full_like(log_r_BT, self.tau_pos), self.tau_neg)
        # 4 / tau makes the slope 1 at r = 1, so that the on-policy gradient is that of REINFORCE.
        gate_BT = torch.sigmoid(tau_BT * (log_r_BT.exp() - 1.0)) * (4.0 / tau_BT)
        return -A_BT * gate_BT, {"ppo_kl": inputs.weighted(-log_r_BT), "soft_gate": inputs.weighted(gate_BT)}


class SapoAlgorithm(AlgorithmType):
    """GRPO advantages, a soft gate, equal sequence weights."""

    algorithm_type = "sapo"
    policy_loss_fn = "sapo"
    loss_agg_mode = "seq-mean-token-mean"


# ---- DPPO: drops tokens by the change of their probability, not by the ratio, which is unstable for rare tokens.


@dataclass(frozen=True)
class Dppo(PolicyLoss):
    """-keep adv_tau A r + kl_tau (log r)^2: DPPO, arXiv:2602.04879; KL term: Kimi k1.5,
    arXiv:2501.12599; defaults: prime-rl.

    r is relative to the sampling policy (`rollout_logprobs`). keep is 0 if the probability has already moved in the
    intended direction by more than the bound: p - p_behavior > high where A > 0, < -low where A <= 0.
    """

    mask_low: float = 0.2
    mask_high: float = 0.2
    adv_tau: float = 1.0
    kl_tau: float = 0.001

    loss_name = "dppo"

    def __post_init__(self) -> None:
        require(min(self.mask_low, self.mask_high) >= 0.0, "mask_low and mask_high must be >= 0")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        A_BT, log_pi_BT, log_behavior_BT = inputs.advantages(), inputs.policy_logprobs_BT, inputs.rollout_logprobs_BT
        log_r_BT = (log_pi_BT - log_behavior_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # Contribution of the sampled token to the total variation between pi and the sampling policy.
        moved_BT = log_pi_BT.detach().exp() - log_behavior_BT.exp()
        dropped_BT = ((A_BT > 0) & (moved_BT > self.mask_high)) | ((A_BT <= 0) & (moved_BT < -self.mask_low))
        # Only the gain is dropped; the term (log r)^2 acts on every token.
        gain_BT = self.adv_tau * A_BT * log_r_BT.exp() * ~dropped_BT
        return self.kl_tau * log_r_BT.square() - gain_BT, ratio_metrics(inputs, log_r_BT, dropped_BT)


class DppoAlgorithm(AlgorithmType):
    """GRPO advantages with the probability mask; the KL term is part of the loss."""

    algorithm_type = "dppo"
    policy_loss_fn = "dppo"
    kl_loss_fn = "none"


# ---- M2PO: drops only the few tokens of a stale batch with the most extreme ratios.


@dataclass(frozen=True)
class M2po(PolicyLoss):
    """-A r, without the tokens that push the second moment of log r over a threshold. M2PO, arXiv:2510.01161,
    algorithm 1.

    Of the tokens that PPO could clip (A > 0 and r > 1, or A < 0 and r < 1) those with the largest (log r)^2 are dropped
    until the mean of the rest is at most `m2_threshold`. Dropped tokens stay in the denominator, as in the paper.

    The paper takes the mean over the batch, so the mask would depend on the split into micro-batches. scope "sequence"
    bounds each sequence instead: then the mean of the batch is within the bound as well, and any split of the batch
    gives the same loss.
    """

    m2_threshold: float = 0.04
    scope: str = "sequence"
    """Scope of the mean: "sequence", or "batch" as in the paper, over the inputs of one call; pass whole batches."""
    log_ratio_clip: float = 20.0
    """Bound of |log r|, applied first."""

    loss_name = "m2po"

    def __post_init__(self) -> None:
        require(self.m2_threshold >= 0.0, f"m2_threshold must be >= 0, got {self.m2_threshold}")
        one_of("scope", self.scope, ("sequence", "batch"))
        within = 0.0 < self.log_ratio_clip <= MAX_LOG_RATIO
        require(within, f"log_ratio_clip must be in (0, {MAX_LOG_RATIO}], got {self.log_ratio_clip}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        A_BT = inputs.advantages()
        log_r_BT = inputs.log_ratio().clamp(-self.log_ratio_clip, self.log_ratio_clip)
        dropped_BT = self.dropped(inputs, log_r_BT.detach(), A_BT)
        # No clip, since the remaining tokens have a bounded second moment.
        loss_BT = -A_BT * log_r_BT.exp() * ~dropped_BT
        return loss_BT, ratio_metrics(inputs, log_r_BT, dropped_BT)

    def dropped(self, inputs: LossInputs, log_r_BT: Tensor, A_BT: Tensor) -> Tensor:
        """[B, T] bool, True for tokens over the second-moment budget of their sequence (or batch)."""
        # Only these tokens can be clipped: the step would move them further from the sampling policy.
        clippable_BT = (A_BT * log_r_BT > 0) & inputs.loss_mask_BT
        # With scope "batch" all sequences get number 0 and are bounded together.
        sequence_B = torch.arange(len(A_BT), device=A_BT.device) * (self.scope == "sequence")
        flat = log_r_BT.flatten(), clippable_BT.flatten(), inputs.spread(sequence_B).flatten()
        return over_budget(*flat, self.m2_threshold).view_as(A_BT)


_UNIT = 2.0**-30
"""Unit of squares. With |log r| <= 20 the sum of 2^24 squares is below 2^63."""


def over_budget(values_N: Tensor, counted_N: Tensor, sequence_N: Tensor, bound: float) -> Tensor:
    """Mark the largest values of each sequence so that the mean square of the others is at most `bound`.

    Equivalent to sorting the counted values of a sequence by size (stable) and keeping the longest prefix whose mean
    square is at most the bound.

    Args: values_N: [N] float, any sign. counted_N: [N] bool. sequence_N: [N] int64, the sequence of each value.
    Returns: [N] bool, True for values beyond the prefix; False if not counted.
    """
    over_N = torch.zeros_like(counted_N)
    # Integer units, so that the sums and differences below are exact in any order.
    index_K = counted_N.nonzero().squeeze(-1)
    squares_K, sequence_K = (values_N[index_K].double().square() / _UNIT).round().long(), sequence_N[index_K]
    most = round(min(bound, 1e6) / _UNIT)
    sizes_S = torch.bincount(sequence_K)
    sums_S = torch.zeros_like(sizes_S).index_add_(0, sequence_K, squares_K)
    if bool((sums_S <= most * sizes_S).all()):  # the usual case; a sort takes longer than all other operations
        return over_N
    # Sorted by size, then stably by sequence, as in `ranks_in_group`.
    order_K = torch.argsort(squares_K, stable=True)
    order_K = order_K[torch.argsort(sequence_K[order_K], stable=True)]
    squares_K, sequence_K = squares_K[order_K], sequence_K[order_K]
    starts_S = sizes_S.cumsum(0) - sizes_S
    rank_K = torch.arange(1, len(order_K) + 1, device=order_K.device) - starts_S[sequence_K]
    # Running sums within each sequence: the total running sum minus its value before the sequence.
    totals_K = squares_K.cumsum(0)
    first_K = starts_S[sequence_K]
    totals_K = totals_K - (totals_K - squares_K)[first_K]
    # Compares the running mean with the bound. Squares ascend, so it is crossed once.
    over_N[index_K[order_K]] = totals_K > most * rank_K
    return over_N


class M2poAlgorithm(AlgorithmType):
    """GRPO advantages; only the second moment is bounded, without KL."""

    algorithm_type = "m2po"
    policy_loss_fn = "m2po"
    kl_loss_fn = "none"
