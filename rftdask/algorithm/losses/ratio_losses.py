"""Policy losses of the PPO family: a ratio of probabilities, clipped or gated, times the advantage.

With r = p_policy / p_old on the sampled token, A its advantage. Knows nothing of aggregation, KL or entropy.
Invariant: where policy and old logprobs are equal, r is exactly 1 and the gradient of every loss is -A.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rftdask.algorithm.kl import MAX_LOG_RATIO
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss, above
from rftdask.algorithm.names import require


def log_ratio(inputs: LossInputs) -> Tensor:
    """[B, T] log r, held within +-20 so that exp stays finite."""
    return (inputs.policy_logprobs_BT - inputs.old_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_ratio(inputs: LossInputs, log_ratio_BT: Tensor) -> Tensor:
    """[B, T] geometric mean of r over the sequence; in its gradient each token answers for itself (GSPO-token).

    Value: exp(mean_t log r). Gradient: that value times the gradient of the token's own logprob. arXiv:2507.18071,
    section 4.3.
    """
    mean_BT = inputs.spread(inputs.sequence_means(log_ratio_BT.detach()))
    own = inputs.policy_logprobs_BT
    return torch.exp(mean_BT + (own - own.detach()))


def choose(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """`yes` where the condition holds, else `no`, in the dtype of `like` (torch.where of two numbers would round to
    float32)."""
    return torch.where(condition, like.new_tensor(yes), like.new_tensor(no))


def ratio_metrics(inputs: LossInputs, log_ratio_BT: Tensor, clipped_BT: Tensor) -> dict[str, Tensor]:
    """clip_frac: share of tokens without gradient; ppo_kl: mean of -log r, an estimate of KL(old, policy) in nats."""
    return {"clip_frac": inputs.weighted(clipped_BT), "ppo_kl": inputs.weighted(-log_ratio_BT)}


@dataclass(frozen=True)
class ClipRange:
    """Fields shared by the losses that clip r to [1 - low, 1 + high]."""

    clip_range: float = 0.2
    """Both sides, where the side's own value is None."""
    clip_range_low: float | None = None
    """Below 1; None: `clip_range`."""
    clip_range_high: float | None = None
    """Above 1; larger than low is DAPO's clip-higher. None: `clip_range`."""

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


@dataclass(frozen=True)
class Ppo(ClipRange, PolicyLoss):
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and at most c |A| where A < 0 (dual clip).

    Written as -A clamp(r, lower, upper): lower = 1 - low where A < 0, else 0; upper = c where A < 0, else 1 + high.
    Sources: PPO, arXiv:1707.06347, equation 7; dual clip, arXiv:1912.09729, equation 5; clip-higher, DAPO,
    arXiv:2503.14476; sequence masking, DeepSeek-V3.2, arXiv:2512.02556, section 3.1.
    """

    clip_ratio_c: float | None = 3.0
    """c of the dual clip, > 1; None: no dual clip."""
    enable_sequence_masking: bool = False
    """Drop tokens with A < 0 in sequences whose mean -log r exceeds `delta_sequence_masking`."""
    delta_sequence_masking: float = 0.1
    """Nats per token."""
    fallback_to_policy_gradient: bool = False
    """Take r = 1 in value and d log p in gradient: plain policy gradient, whatever was recorded when sampling."""

    def __post_init__(self) -> None:
        super().__post_init__()
        c = self.clip_ratio_c
        require(c is None or c > 1.0, f"clip_ratio_c must be > 1 or None, got {c}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        advantages_BT = inputs.advantages()
        own = inputs.policy_logprobs_BT
        log_r_BT = own - own.detach() if self.fallback_to_policy_gradient else log_ratio(inputs)
        loss_BT, metrics = self.clipped(inputs, log_r_BT, torch.exp(log_r_BT), advantages_BT)
        if self.enable_sequence_masking:
            far_BT = inputs.spread(inputs.sequence_means(-log_r_BT.detach()) > self.delta_sequence_masking)
            dropped_BT = far_BT & (advantages_BT < 0)
            loss_BT = loss_BT.masked_fill(dropped_BT, 0.0)
            metrics["sequence_mask_frac"] = inputs.weighted(dropped_BT)
        return loss_BT, metrics

    def clipped(
        self, inputs: LossInputs, log_r_BT: Tensor, ratio_BT: Tensor, advantages_BT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Clipped loss [B, T] for a given ratio, with its metrics."""
        value_BT = ratio_BT.detach()
        negative_BT = above(-advantages_BT, 0.0)
        unwanted_BT = negative_BT * value_BT.clamp(1.0 - self.low, self.clip_ratio_c)
        clamped_BT = unwanted_BT + (1.0 - negative_BT) * value_BT.clamp(max=1.0 + self.high)
        # The clamp's gradient spelled out: autograd would compare with the bounds a second time.
        free_BT = torch.eq(clamped_BT, value_BT, out=torch.empty_like(value_BT))
        loss_BT = -advantages_BT * (clamped_BT + free_BT * (ratio_BT - value_BT))
        dual_BT = negative_BT * above(value_BT, torch.inf if self.clip_ratio_c is None else self.clip_ratio_c)
        metrics = ratio_metrics(inputs, log_r_BT, 1.0 - free_BT - dual_BT)
        metrics["dual_clip_frac"] = inputs.weighted(dual_BT)
        return loss_BT, metrics


@dataclass(frozen=True)
class Gspo(ClipRange, PolicyLoss):
    """PPO's clip with the sequence's geometric-mean ratio at every token, no dual clip. GSPO, arXiv:2507.18071.

    The paper aggregates as seq-mean-token-mean, the default of the algorithm type "gspo".
    """

    clip_range_low: float | None = 0.0003
    clip_range_high: float | None = 0.0004

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_r_BT = log_ratio(inputs)
        clip = Ppo(clip_range_low=self.low, clip_range_high=self.high, clip_ratio_c=None)
        loss_BT, metrics = clip.clipped(inputs, log_r_BT, sequence_ratio(inputs, log_r_BT), inputs.advantages())
        del metrics["dual_clip_frac"]
        return loss_BT, metrics


@dataclass(frozen=True)
class Cispo(PolicyLoss):
    """-sg(clip(r, 1 - low, 1 + high)) A log p: the weight is clipped, no token loses its gradient. MiniMax-M1,
    arXiv:2506.13585.

    TRL bounds r from above only and takes the bound itself as epsilon_high; that is clip_range_low 1,
    clip_range_high epsilon_high - 1.
    """

    clip_range_low: float = 1.0
    """Lower bound of r is 1 - low; 1: none."""
    clip_range_high: float = 0.28
    enable_mask_clip: bool = False
    """Also drop tokens that PPO would clip, with the two ranges below (the paper's equation 7)."""
    mask_clip_range_low: float = 1.0
    mask_clip_range_high: float = 0.28

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        advantages_BT = inputs.advantages()
        log_r_BT = log_ratio(inputs).detach()
        ratio_BT = torch.exp(log_r_BT)
        weight_BT = ratio_BT.clamp(1.0 - self.clip_range_low, 1.0 + self.clip_range_high)
        metrics = ratio_metrics(inputs, log_r_BT, weight_BT != ratio_BT)
        if self.enable_mask_clip:
            dropped_BT = ((ratio_BT > 1.0 + self.mask_clip_range_high) & (advantages_BT > 0)) | (
                (ratio_BT < 1.0 - self.mask_clip_range_low) & (advantages_BT < 0)
            )
            weight_BT = weight_BT.masked_fill(dropped_BT, 0.0)
            metrics["mask_clip_frac"] = inputs.weighted(dropped_BT)
        return -(weight_BT * advantages_BT) * inputs.policy_logprobs_BT, metrics


@dataclass(frozen=True)
class Sapo(PolicyLoss):
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A: a soft clip. SAPO, arXiv:2511.20347, equations 5 and 6.

    The gate is differentiated: the gradient's weight is 4 s (1 - s) r, 1 at r = 1 and towards 0 far from it. A gate
    that is detached and multiplied with log p instead grows with r and clips nothing.
    """

    tau_pos: float = 1.0
    """Temperature where A > 0."""
    tau_neg: float = 1.05
    """Temperature where A <= 0; larger decays faster."""

    def __post_init__(self) -> None:
        require(self.tau_pos > 0 and self.tau_neg > 0, f"tau must be > 0, got {self.tau_pos}, {self.tau_neg}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        advantages_BT = inputs.advantages()
        log_r_BT = log_ratio(inputs)
        tau_BT = choose(advantages_BT > 0, self.tau_pos, self.tau_neg, log_r_BT)
        gate_BT = torch.sigmoid(tau_BT * (torch.exp(log_r_BT) - 1.0)) * (4.0 / tau_BT)
        metrics = {"ppo_kl": inputs.weighted(-log_r_BT), "soft_gate": inputs.weighted(gate_BT)}
        return -advantages_BT * gate_BT, metrics


@dataclass(frozen=True)
class ImportanceSampling(PolicyLoss):
    """-A r without a clip. Used by on-policy distillation (Thinking Machines, "On-Policy Distillation", 2025)."""

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_r_BT = log_ratio(inputs)
        return -inputs.advantages() * torch.exp(log_r_BT), {"ppo_kl": inputs.weighted(-log_r_BT)}
