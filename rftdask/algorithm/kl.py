"""Estimators of the distance to the reference policy, per token, and the controller of their coefficient.

With d = log p_policy - log p_ref on the sampled token. Knows nothing of aggregation or of who computed the logprobs.
k1 is for rewards, the others are for a loss: each holds the policy at the reference in its own place alone.
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
    """Base of the KL parts. Usage: `k2.per_token(policy_logprobs, ref_logprobs)` is [B, T], zero or more where it is
    squared."""

    kl_coef: float = 0.001
    """Factor of the KL in the loss or in the reward, >= 0; the first coefficient if adaptive."""
    adaptive: bool = False
    """Move the coefficient so that the measured KL approaches `target_kl`."""
    target_kl: float | None = None
    """Aim of the adaptive controller, nats per token."""
    horizon: float | None = None
    """Experiences over which the adaptive controller reacts."""
    final_coef: float | None = None
    """Coefficient after `schedule_steps` steps of training, to which it goes from `kl_coef`; None: it stays."""
    schedule_steps: int | None = None
    """Steps that the way takes."""
    schedule: str = "linear"
    """Shape of the way: "linear" or "cosine"."""
    max_kl: float | None = None
    """Bound of the absolute value of a token's estimate; None: unbounded."""

    kl_name: ClassVar[str]
    """The name by which a configuration chooses it; one without is chosen by its class."""
    uses_reference: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self.kl_coef >= 0.0, f"kl_coef must be >= 0, got {self.kl_coef}")
        require(self.max_kl is None or self.max_kl > 0.0, f"max_kl must be > 0, got {self.max_kl}")
        one_of("schedule", self.schedule, ("linear", "cosine"))
        both = (self.final_coef is None) == (self.schedule_steps is None)
        require(both, "final_coef and schedule_steps go together")
        require(self.schedule_steps is None or self.schedule_steps > 0, "schedule_steps must be > 0")
        require(self.final_coef is None or self.final_coef >= 0.0, f"final_coef must be >= 0, got {self.final_coef}")
        if self.adaptive:
            require(self.final_coef is None, "an adaptive coefficient follows the measured KL: no final_coef beside it")
            given = self.target_kl is not None and self.horizon is not None
            require(given, "adaptive needs target_kl and horizon")
            require(bool(self.target_kl and self.target_kl > 0), f"target_kl must be > 0, got {self.target_kl}")
            require(bool(self.horizon and self.horizon > 0), f"horizon must be > 0, got {self.horizon}")

    @property
    def is_active(self) -> bool:
        """Whether this part contributes to the loss, and so needs the reference's logprobs."""
        return self.uses_reference and (self.kl_coef != 0.0 or self.adaptive or bool(self.final_coef))

    def per_token(self, policy_logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None = None) -> Tensor:
        """Estimate for each token, same shape; differentiable in `policy_logprobs`."""
        value = self.estimate(policy_logprobs - ref_logprobs, policy_logprobs, old_logprobs)
        return value if self.max_kl is None else value.clamp(-self.max_kl, self.max_kl)

    @abstractmethod
    def estimate(self, difference: Tensor, policy_logprobs: Tensor, old_logprobs: Tensor | None) -> Tensor:
        """Estimate for each token from d and what it is made of, unbounded; all of one shape."""

    def coef_at(self, step: int, coef: float) -> float:
        """Coefficient of a training step, counted from 1: by the schedule, from `kl_coef` at step 1 to `final_coef` at
        step `schedule_steps` + 1 and after it; without one `coef`, that of the controller."""
        if self.final_coef is None or self.schedule_steps is None:
            return coef
        # A function of the step: a resumed run needs no state for it.
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
        # Bounded, so that one odd batch moves the coefficient by a fifth of n / horizon at most.
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
    """d, for rewards: what a policy descends whose rewards pay for it is KL(policy, reference).

    Unbiased as a value, of any sign. In a loss its gradient, that of log p_policy, is 0 in the mean over what the
    policy says, and away from what was sampled by other weights: nothing holds the policy there.
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

    As a loss its gradient is that of KL(reference, policy). Paid for by rewards, KL(policy, reference) less that, which
    is 0 to second order near the reference and holds nothing.
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
    """r K3, r = p_policy / p_old: of tokens that the old policy sampled, an unbiased estimate of KL(policy, reference)
    and of its gradient.

    For any p_old: E_old[r K3] = sum over words of p (p_ref / p - 1 + d) = sum of p d, the KL, since p and p_ref sum to
    1; p_old is constant, so the gradient's mean is that of the KL, if r has its gradient, too. A bound of r would take
    this away. Source: DeepSeek-V3.2, arXiv:2512.02556, section 3.1. Without old logprobs it is K3.
    """

    kl_name = "corrected_k3"

    def estimate(self, difference: Tensor, policy_logprobs: Tensor, old_logprobs: Tensor | None) -> Tensor:
        """r K3, both with gradients; log r above 20 counts as 20."""
        if old_logprobs is None:
            return _k3(difference)
        return (policy_logprobs - old_logprobs).clamp(max=MAX_LOG_RATIO).exp() * _k3(difference)


def _k3(difference: Tensor) -> Tensor:
    # expm1 keeps the digits that exp(x) - 1 loses near 0, where most tokens are.
    bounded = difference.clamp(min=-MAX_LOG_RATIO)
    return torch.expm1(-bounded) + bounded
