"""REC: REINFORCE with optional clipping and reweighting of stale rollouts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import one_of, require
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss, ratio_metrics


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
