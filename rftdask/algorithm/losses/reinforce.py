"""Losses of the REINFORCE family: log pi times the advantage and a weight without gradient.

Invariant: the gradient of a token's loss with respect to log pi is -weight * A.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import one_of, require
from rftdask.algorithm.kl import MAX_LOG_RATIO
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss, ratio_metrics

# ---- OPMD: no ratio, so rollouts may have any age and source.


@dataclass(frozen=True)
class Opmd(PolicyLoss):
    """-A log p / (1 + tau), without a ratio. OPMD, arXiv:2505.17826, appendix A; AsymRE,
    arXiv:2506.20520."""

    tau: float = 1.0
    """Strength of the regularization toward the sampling policy, >= 0."""

    loss_name = "opmd"

    def __post_init__(self) -> None:
        require(self.tau >= 0.0, f"tau must be >= 0, got {self.tau}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        # 1 / (1 + tau) is the effect of the regularization on the step (appendix A).
        A_BT, log_pi_BT = inputs.advantages(), inputs.policy_logprobs_BT
        return -(A_BT / (1.0 + self.tau)) * log_pi_BT, {}


class OpmdAlgorithm(AlgorithmType):
    """Rewards minus the mean of the task (or its softened maximum), with KL to the reference."""

    algorithm_type = "opmd"
    deprecated_names = ("opmd_verl",)
    advantage_fn = "opmd"
    policy_loss_fn = "opmd"


class AsymreAlgorithm(AlgorithmType):
    """OPMD's loss with a baseline shifted below the mean, so that successes have more weight than failures.

    Source: AsymRE, arXiv:2506.20520.
    """

    algorithm_type = "asymre"
    deprecated_names = ("asymre_verl",)
    advantage_fn = "asymre"
    policy_loss_fn = "opmd"
    kl_loss_fn = "none"
    entropy_loss_fn = "none"


# ---- TOPR: imitates all successes, and avoids failures only while the policy would still produce them.


@dataclass(frozen=True)
class Topr(PolicyLoss):
    """-sg(alpha) A log p, alpha = min(r, 1) where A <= threshold, else 1. TOPR, arXiv:2503.14286.

    Successes have full weight; the weight of a failure decreases with its ratio.
    """

    advantage_threshold: float = 0.0

    loss_name = "topr"

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        A_BT, r_BT = inputs.advantages(), inputs.log_ratio().detach().exp()
        # A failure that has become unlikely gets no further push, so that its log pi does not diverge.
        alpha_BT = torch.where(self.advantage_threshold >= A_BT, r_BT.clamp(max=1.0), 1.0)
        return -(alpha_BT * A_BT) * inputs.policy_logprobs_BT, {"topr_alpha": inputs.weighted(alpha_BT)}


class ToprAlgorithm(AlgorithmType):
    """Plain rewards, without a baseline."""

    algorithm_type = "topr"
    advantage_fn = "reinforce"
    policy_loss_fn = "topr"


# ---- CISPO: clips the importance weight, so that no token loses its gradient.


@dataclass(frozen=True)
class Cispo(PolicyLoss):
    """-sg(clip(r, 1 - low, 1 + high)) A log p: the weight is clipped, no token loses its gradient. MiniMax-M1,
    arXiv:2506.13585.

    TRL bounds r only from above, and its epsilon_high is the bound itself: clip_range_low 1, clip_range_high
    epsilon_high - 1.
    """

    clip_range_low: float = 1.0
    """Lower bound of r is 1 - low. 1: no lower bound."""
    clip_range_high: float = 0.28
    enable_mask_clip: bool = False
    """Also drop tokens that PPO would clip with the two ranges below (the token mask of the paper)."""
    mask_clip_range_low: float = 1.0
    mask_clip_range_high: float = 0.28

    loss_name = "cispo"

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        A_BT, log_r_BT = inputs.advantages(), inputs.log_ratio().detach()
        r_BT = log_r_BT.exp()
        # The weight is detached, so that the gradient of log pi survives the clip.
        weight_BT = r_BT.clamp(1.0 - self.clip_range_low, 1.0 + self.clip_range_high)
        metrics = ratio_metrics(inputs, log_r_BT, weight_BT != r_BT)
        if self.enable_mask_clip:
            # As in PPO: only where the step would move r further out of the range.
            too_high_BT = (r_BT > 1.0 + self.mask_clip_range_high) & (A_BT > 0)
            too_low_BT = (r_BT < 1.0 - self.mask_clip_range_low) & (A_BT < 0)
            weight_BT = weight_BT.masked_fill(too_high_BT | too_low_BT, 0.0)
            metrics["mask_clip_frac"] = inputs.weighted(too_high_BT | too_low_BT)
        return -(weight_BT * A_BT) * inputs.policy_logprobs_BT, metrics


class CispoAlgorithm(AlgorithmType):
    """GRPO advantages with clipped weights."""

    algorithm_type = "cispo"
    policy_loss_fn = "cispo"


# ---- sPPO: the log-ratio replaces the ratio, within a band around 1.


@dataclass(frozen=True)
class Sppo(PolicyLoss):
    """-A log r where 1 / (1 + epsilon) <= r <= 1 + epsilon, else 0. sPPO, arXiv:2108.05828."""

    epsilon: float = 0.3

    loss_name = "sppo"

    def __post_init__(self) -> None:
        require(self.epsilon > 0.0, f"epsilon must be > 0, got {self.epsilon}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        A_BT, log_r_BT = inputs.advantages(), inputs.log_ratio()
        r_BT = log_r_BT.detach().exp()
        # The band is symmetric in log r, unlike PPO's.
        outside_BT = (r_BT < 1.0 / (1.0 + self.epsilon)) | (r_BT > 1.0 + self.epsilon)
        # The gradient of log r is that of log pi: REINFORCE within the band, 0 outside.
        return -A_BT * log_r_BT.masked_fill(outside_BT, 0.0), ratio_metrics(inputs, log_r_BT, outside_BT)


class SppoAlgorithm(AlgorithmType):
    """OPMD advantages with the log-ratio; no KL, no entropy bonus."""

    algorithm_type = "sppo"
    advantage_fn = "opmd"
    policy_loss_fn = "sppo"
    kl_loss_fn = "none"
    entropy_loss_fn = "none"


# ---- REC: REINFORCE with optional clipping and reweighting of stale rollouts.


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

    loss_name = "rec"

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
        A_BT, log_pi_BT, log_r_BT = inputs.advantages(), inputs.policy_logprobs_BT, inputs.log_ratio()
        # A detached weight; the regularizer k2 below uses log r with its gradient.
        r_BT = log_r_BT.detach().exp()
        # Geometric mean of r over the sequence, at each of its tokens.
        s_BT = inputs.spread(inputs.sequence_means(r_BT.log())).exp()
        in_range_BT = self._in_range(s_BT if self.clip_mode == "gspo-one-side" else r_BT, A_BT)
        w_BT: Tensor | float = 1.0
        if self.weight == "importance_sampling":
            w_BT = r_BT
        elif self.weight == "gspo_importance_sampling":
            w_BT = s_BT
        elif self.weight == "advantage":
            w_BT = torch.exp(A_BT / self.temp)
        loss_BT = -torch.where(in_range_BT, A_BT * w_BT, 0.0) * log_pi_BT
        if self.regularizer == "k2":
            loss_BT = loss_BT + self.regularizer_coef * log_r_BT.square()
        elif self.regularizer == "forward-kl":
            loss_BT = loss_BT - self.regularizer_coef * log_pi_BT
        return loss_BT, ratio_metrics(inputs, log_r_BT, ~in_range_BT)

    def _in_range(self, r_BT: Tensor, A_BT: Tensor) -> Tensor:
        """[B, T] bool, True where the token gives a gradient."""
        if self.clip_mode == "none":
            return torch.ones_like(r_BT, dtype=torch.bool)
        above_low_BT, below_high_BT = r_BT >= 1.0 - self.epsilon_low, r_BT <= 1.0 + self.epsilon_high
        if self.clip_mode in ("one-side", "gspo-one-side"):
            # Outside the range, only steps back toward it are allowed.
            return (below_high_BT & (A_BT >= 0)) | (above_low_BT & (A_BT <= 0))
        both_BT = above_low_BT & below_high_BT
        if self.clip_mode == "two-side":
            return both_BT
        # Ring: far outside the range, tokens count again if the step moves them back.
        far_low_BT, far_high_BT = r_BT <= 1.0 - self.epsilon_low_prime, r_BT >= 1.0 + self.epsilon_high_prime
        return both_BT | (far_low_BT & (A_BT >= 0)) | (far_high_BT & (A_BT <= 0))


class RecAlgorithm(AlgorithmType):
    """Rewards minus the mean of the task, with KL to the reference."""

    algorithm_type = "rec"
    advantage_fn = "rec"
    policy_loss_fn = "rec"


# ---- VESPO: a smooth weight per sequence, without a clip or length normalization.


@dataclass(frozen=True)
class Vespo(PolicyLoss):
    """-sg(phi(w)) A log p, phi(w) = exp(l) w^k exp(-l w), w the product of r over the sequence. VESPO,
    arXiv:2602.10693.

    phi is 1 at w = 1 and decreases on both sides.
    """

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0

    loss_name = "vespo"

    def __post_init__(self) -> None:
        values = (self.k_pos, self.lambda_pos, self.k_neg, self.lambda_neg)
        require(min(values) > 0.0, f"k and lambda must be > 0, got {values}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        A_BT, log_r_BT = inputs.advantages(), inputs.log_ratio()
        # w is a product of many ratios, so it is computed in logs and bounded before the exp in phi.
        log_w_BT = inputs.spread(inputs.sequence_sums(log_r_BT.detach())).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        phi_BT = self.phi(log_w_BT, A_BT)
        metrics = {"ppo_kl": inputs.weighted(-log_r_BT), "vespo_phi": inputs.weighted(phi_BT)}
        return -(phi_BT * A_BT) * inputs.policy_logprobs_BT, metrics

    def phi(self, log_w: Tensor, advantages: Tensor) -> Tensor:
        """phi(exp(log_w)) with the constants for the sign of the advantage. A = 0 counts as positive."""
        k = torch.where(advantages >= 0, torch.full_like(log_w, self.k_pos), self.k_neg)
        rate = torch.where(advantages >= 0, torch.full_like(log_w, self.lambda_pos), self.lambda_neg)
        # The maximum over w is at k / lambda, below 1 for A >= 0 and above 1 for A < 0. A single exponent, since
        # separate factors would overflow.
        return torch.exp(rate + k * log_w - rate * log_w.exp())


class VespoAlgorithm(AlgorithmType):
    """GRPO advantages; without KL, since the weight keeps the policy close to the sampling policy."""

    algorithm_type = "vespo"
    policy_loss_fn = "vespo"
    kl_loss_fn = "none"
