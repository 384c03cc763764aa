"""Policy losses of the REINFORCE family: log p times a detached weight.

With r = p_policy / p_old and A the advantage; sg stops the gradient. Knows nothing of aggregation, KL or entropy.
Invariant: the weight never carries a gradient, so the gradient of each token's loss is -weight * A.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rftdask.algorithm.losses.base import LossInputs, PolicyLoss
from rftdask.algorithm.losses.ratio_losses import log_ratio, ratio_metrics
from rftdask.algorithm.names import one_of, require


@dataclass(frozen=True)
class Topr(PolicyLoss):
    """-sg(alpha) A log p, alpha = min(r, 1) where A <= threshold, else 1. TOPR, arXiv:2503.14286.

    Successes are imitated whoever produced them, failures only as far as the policy would still produce them.
    """

    advantage_threshold: float = 0.0

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        advantages_BT = inputs.advantages()
        ratio_BT = torch.exp(log_ratio(inputs).detach())
        alpha_BT = torch.where(advantages_BT <= self.advantage_threshold, ratio_BT.clamp(max=1.0), 1.0)
        loss_BT = -(alpha_BT * advantages_BT) * inputs.policy_logprobs_BT
        return loss_BT, {"topr_alpha": inputs.weighted(alpha_BT)}


@dataclass(frozen=True)
class Opmd(PolicyLoss):
    """-A log p / (1 + tau): no ratio, so rollouts of any age and source. OPMD, arXiv:2505.17826, appendix A; AsymRE,
    arXiv:2506.20520."""

    tau: float = 1.0
    """Strength of the pull to the sampling policy, >= 0."""

    def __post_init__(self) -> None:
        require(self.tau >= 0.0, f"tau must be >= 0, got {self.tau}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        scale_BT = inputs.advantages() / (1.0 + self.tau)
        return -scale_BT * inputs.policy_logprobs_BT, {}


@dataclass(frozen=True)
class Sppo(PolicyLoss):
    """-A log r where 1 / (1 + epsilon) <= r <= 1 + epsilon, else 0. sPPO, arXiv:2108.05828."""

    epsilon: float = 0.3

    def __post_init__(self) -> None:
        require(self.epsilon > 0.0, f"epsilon must be > 0, got {self.epsilon}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_r_BT = log_ratio(inputs)
        ratio_BT = log_r_BT.detach().exp()
        outside_BT = (ratio_BT < 1.0 / (1.0 + self.epsilon)) | (ratio_BT > 1.0 + self.epsilon)
        loss_BT = -inputs.advantages() * log_r_BT.masked_fill(outside_BT, 0.0)
        return loss_BT, ratio_metrics(inputs, log_r_BT, outside_BT)


@dataclass(frozen=True)
class Rec(PolicyLoss):
    """-A w log p where r is in range, plus a regularizer. REC, arXiv:2509.24203.

    In range: "two-side" 1 - low <= r <= 1 + high; "one-side" only the side that PPO would clip; "gspo-one-side" the
    same with the sequence's geometric-mean ratio; "ring" two-side, or A >= 0 and r <= 1 - low', or A <= 0 and r >= 1
    + high'; "none" always.
    w: "none" 1; "importance_sampling" r; "gspo_importance_sampling" the sequence's ratio; "advantage" exp(A / temp).
    Regularizer: "k2" + c (log r)^2 (the 1/2 is in c, as in Kimi); "forward-kl" - c log p.
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    epsilon_low_prime: float = 0.6
    epsilon_high_prime: float = 2.0
    clip_mode: str = "none"
    weight: str = "none"
    regularizer: str = "none"
    regularizer_coef: float = 0.0
    temp: float = 1.0

    def __post_init__(self) -> None:
        one_of("clip_mode", self.clip_mode, ("none", "one-side", "gspo-one-side", "two-side", "ring"))
        one_of("weight", self.weight, ("none", "importance_sampling", "gspo_importance_sampling", "advantage"))
        one_of("regularizer", self.regularizer, ("none", "k2", "forward-kl"))
        for name in ("epsilon_low", "epsilon_low_prime"):
            require(0.0 < getattr(self, name) <= 1.0, f"{name} must be within (0, 1], got {getattr(self, name)}")
        for name in ("epsilon_high", "epsilon_high_prime", "temp"):
            require(getattr(self, name) > 0.0, f"{name} must be > 0, got {getattr(self, name)}")
        require(self.regularizer_coef >= 0.0, f"regularizer_coef must be >= 0, got {self.regularizer_coef}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        advantages_BT = inputs.advantages()
        logprobs_BT = inputs.policy_logprobs_BT
        log_r_BT = log_ratio(inputs)
        ratio_BT = log_r_BT.detach().exp()
        in_range_BT = self._in_range(inputs, ratio_BT, advantages_BT)
        scale_BT = torch.where(in_range_BT, advantages_BT * self._weight(inputs, ratio_BT, advantages_BT), 0.0)
        loss_BT = -scale_BT * logprobs_BT
        if self.regularizer == "k2":
            loss_BT = loss_BT + self.regularizer_coef * log_r_BT.square()
        elif self.regularizer == "forward-kl":
            loss_BT = loss_BT - self.regularizer_coef * logprobs_BT
        return loss_BT, ratio_metrics(inputs, log_r_BT, ~in_range_BT)

    def _in_range(self, inputs: LossInputs, ratio_BT: Tensor, advantages_BT: Tensor) -> Tensor:
        if self.clip_mode == "none":
            return torch.ones_like(ratio_BT, dtype=torch.bool)
        if self.clip_mode == "gspo-one-side":
            ratio_BT = _sequence_ratio(inputs, ratio_BT)
        above_low_BT, below_high_BT = ratio_BT >= 1.0 - self.epsilon_low, ratio_BT <= 1.0 + self.epsilon_high
        wanted_BT, unwanted_BT = advantages_BT >= 0, advantages_BT <= 0
        if self.clip_mode in ("one-side", "gspo-one-side"):
            return (below_high_BT & wanted_BT) | (above_low_BT & unwanted_BT)
        both_BT = above_low_BT & below_high_BT
        if self.clip_mode == "two-side":
            return both_BT
        far_low_BT, far_high_BT = ratio_BT <= 1.0 - self.epsilon_low_prime, ratio_BT >= 1.0 + self.epsilon_high_prime
        return both_BT | (wanted_BT & far_low_BT) | (unwanted_BT & far_high_BT)

    def _weight(self, inputs: LossInputs, ratio_BT: Tensor, advantages_BT: Tensor) -> Tensor | float:
        if self.weight == "importance_sampling":
            return ratio_BT
        if self.weight == "gspo_importance_sampling":
            return _sequence_ratio(inputs, ratio_BT)
        if self.weight == "advantage":
            return torch.exp(advantages_BT / self.temp)
        return 1.0


def _sequence_ratio(inputs: LossInputs, ratio_BT: Tensor) -> Tensor:
    """[B, T] geometric mean of the ratio over the sequence, detached."""
    return inputs.spread(inputs.sequence_means(ratio_BT.log())).exp()
