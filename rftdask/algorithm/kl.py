"""Estimators of the distance to the reference policy, per token, and the controller of their coefficient.

d = log p_policy - log p_ref of the sampled token. Knows nothing of aggregation or of the source of the logprobs. k1 is
for rewards, the others are for a loss; in the other place an estimator does not hold the policy at the reference.
Invariant: equal logprobs give exactly 0.
Source: J. Schulman, "Approximating KL divergence", 2020 (http://joschu.net/blog/kl-approx.html).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rftdask.algorithm.checks import one_of, require

MAX_LOG_RATIO = 20.0
"""Bound of a log-ratio before exp: e^20 = 4.9e8 is finite in float32 with room for products."""


@dataclass(frozen=True)
class KlFn(ABC):
    """Base of KL estimators. Usage: `k2.per_token(policy_logprobs, ref_logprobs)` returns [B, T]."""

    kl_coef: float = 0.001
    """Coefficient of the KL in the loss or reward, >= 0; the initial one if adaptive."""
    adaptive: bool = False
    """Adapt the coefficient so that the measured KL approaches `target_kl`."""
    target_kl: float | None = None
    """Target of the adaptive controller, in nats per token."""
    horizon: float | None = None
    """Experiences over which the adaptive controller reacts."""
    final_coef: float | None = None
    """Coefficient after `schedule_steps` training steps, reached from `kl_coef`. None: constant."""
    schedule_steps: int | None = None
    """Length of the schedule in training steps."""
    schedule: str = "linear"
    """Shape of the schedule: "linear" or "cosine"."""
    max_kl: float | None = None
    """Bound of the absolute estimate of a token. None: unbounded."""

    kl_name: ClassVar[str]
    """Name in a configuration. A part without one is named by its class."""
    uses_reference: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self.kl_coef >= 0.0, f"kl_coef must be >= 0, got {self.kl_coef}")
        require(self.max_kl is None or self.max_kl > 0.0, f"max_kl must be > 0, got {self.max_kl}")
        one_of("schedule", self.schedule, ("linear", "cosine"))
        both = (self.final_coef is None) == (self.schedule_steps is None)
        require(both, "final_coef and schedule_steps must be set together")
        require(self.schedule_steps is None or self.schedule_steps > 0, "schedule_steps must be > 0")
        require(self.final_coef is None or self.final_coef >= 0.0, f"final_coef must be >= 0, got {self.final_coef}")
        if self.adaptive:
            require(self.final_coef is None, "adaptive and final_coef exclude each other; remove one")
            is_complete = self.target_kl is not None and self.horizon is not None
            require(is_complete, "adaptive needs target_kl and horizon")
            require(bool(self.target_kl and self.target_kl > 0), f"target_kl must be > 0, got {self.target_kl}")
            require(bool(self.horizon and self.horizon > 0), f"horizon must be > 0, got {self.horizon}")

    @property
    def is_active(self) -> bool:
        """True if this part contributes, so that logprobs of the reference are needed."""
        return self.uses_reference and (self.kl_coef != 0.0 or self.adaptive or bool(self.final_coef))

    def per_token(self, policy_logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None = None) -> Tensor:
        """Estimate per token, same shape, differentiable in `policy_logprobs`."""
        value = self.estimate(policy_logprobs - ref_logprobs, policy_logprobs, old_logprobs)
        return value if self.max_kl is None else value.clamp(-self.max_kl, self.max_kl)

    @abstractmethod
    def estimate(self, difference: Tensor, policy_logprobs: Tensor, old_logprobs: Tensor | None) -> Tensor:
        """Unbounded estimate per token. difference: d. All tensors have one shape."""

    def coef_at(self, step: int, coef: float) -> float:
        """Coefficient of a training step, counted from 1.

        With a schedule it goes from `kl_coef` at step 1 to `final_coef` at step `schedule_steps` + 1 and later. Without
        one it is `coef`, the coefficient of the controller.
        """
        if self.final_coef is None or self.schedule_steps is None:
            return coef
        # A function of the step, so that a resumed run needs no state.
        share = min(1.0, (step - 1) / self.schedule_steps)
        if self.schedule == "cosine":
            share = (1.0 - math.cos(math.pi * share)) / 2.0
        return self.kl_coef + (self.final_coef - self.kl_coef) * share

    def next_coef(self, coef: float, measured_kl: float, num_experiences: int) -> float:
        """Coefficient of the next step: coef * (1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon); fixed: `coef`.

        Source: Ziegler et al., "Fine-Tuning Language Models from Human Preferences", arXiv:1909.08593, section 2.2.
        """
        if not self.adaptive or self.target_kl is None or self.horizon is None:
            return coef
        # Bounded, so that one outlier batch moves the coefficient by at most a fifth of n / horizon.
        error = min(max(measured_kl / self.target_kl - 1.0, -0.2), 0.2)
        return coef * (1.0 + error * num_experiences / self.horizon)


@dataclass(frozen=True)
class NoKl(KlFn):
    """No KL term, no reference policy."""

    kl_name = "none"
    uses_reference = False

    def estimate(self, difference: Tensor, policy_logprobs: Tensor, old_logprobs: Tensor | None) -> Tensor:
        return torch.zeros_like(difference)


@dataclass(frozen=True)
class K1(KlFn):
    """d, for rewards: a policy whose rewards are reduced by d descends KL(policy, reference).

    Unbiased as a value, of any sign. In a loss its gradient is that of log p_policy: 0 on average over the policy's own
    samples, and otherwise away from the samples. So it does not hold the policy at the reference.
    """

    kl_name = "k1"

    def estimate(self, difference: Tensor, policy_logprobs: Tensor, old_logprobs: Tensor | None) -> Tensor:
        return difference


@dataclass(frozen=True)
class K2(KlFn):
    """d^2 / 2. As a loss its gradient is that of the reverse KL, KL(policy, reference)."""

    kl_name = "k2"

    def estimate(self, difference: Tensor, policy_logprobs: Tensor, old_logprobs: Tensor | None) -> Tensor:
        return 0.5 * difference.square()


@dataclass(frozen=True)
class K3(KlFn):
    """exp(-d) - 1 + d, never negative; d below -20 counts as -20, without gradient. GRPO, arXiv:2402.03300, equation 4.

    As a loss its gradient is that of KL(reference, policy). As a reward penalty it descends KL(policy, reference) minus
    that, which is 0 to second order near the reference and does not hold the policy there.
    """

    kl_name = "k3"

    def estimate(self, difference: Tensor, policy_logprobs: Tensor, old_logprobs: Tensor | None) -> Tensor:
        return _k3(difference)


@dataclass(frozen=True)
class LowVarKl(KlFn):
    """K3 bounded to +-10."""

    kl_name = "low_var_kl"

    def estimate(self, difference: Tensor, policy_logprobs: Tensor, old_logprobs: Tensor | None) -> Tensor:
        """K3 within [-10, 10]; no gradient beyond."""
        return _k3(difference).clamp(-10.0, 10.0)


@dataclass(frozen=True)
class AbsKl(KlFn):
    """|d|, the absolute log-ratio. As a loss its gradient is that of the sum over words of |p_policy - p_ref|."""

    kl_name = "abs"

    def estimate(self, difference: Tensor, policy_logprobs: Tensor, old_logprobs: Tensor | None) -> Tensor:
        """|d|; the gradient is 0 where d is."""
        return difference.abs()


@dataclass(frozen=True)
class CorrectedK3(KlFn):
    """r K3 with r = p_policy / p_old: an unbiased estimate of KL(policy, reference) and its gradient from tokens that
    the old policy sampled.

    For any p_old: E_old[r K3] = sum over words of p (p_ref / p - 1 + d) = sum of p d, the KL, since p and p_ref sum to
    1. p_old is constant, so the mean gradient is that of the KL, provided that r keeps its gradient. Bounding r would
    break this. Source: DeepSeek-V3.2, arXiv:2512.02556, section 3.1. Without old logprobs it is K3.
    """

    kl_name = "corrected_k3"

    def estimate(self, difference: Tensor, policy_logprobs: Tensor, old_logprobs: Tensor | None) -> Tensor:
        """r K3, both with gradients; log r above 20 counts as 20."""
        if old_logprobs is None:
            return _k3(difference)
        return (policy_logprobs - old_logprobs).clamp(max=MAX_LOG_RATIO).exp() * _k3(difference)


def _k3(difference: Tensor) -> Tensor:
    # expm1 keeps the digits that exp(x) - 1 loses near 0, where most values lie.
    bounded = difference.clamp(min=-MAX_LOG_RATIO)
    return torch.expm1(-bounded) + bounded
