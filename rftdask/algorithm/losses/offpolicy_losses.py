"""Policy losses made for stale rollouts: they bound how far a token may be trusted, not only its ratio.

With r = p_policy / p_old, A the advantage. Knows nothing of aggregation, KL or entropy.
Invariant: where policy, proximal policy and sampler agree, the gradient of every loss is -A.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rftdask.algorithm.kl import MAX_LOG_RATIO
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss, above, number
from rftdask.algorithm.losses.ratio_losses import Ppo, choose, log_ratio, ratio_metrics
from rftdask.algorithm.names import one_of, require
from rftdask.algorithm.second_moment import over_budget, over_budget_packed


@dataclass(frozen=True)
class DecoupledPpo(Ppo):
    """sg(p_proximal / p_behavior) times PPO in r = p_policy / p_proximal. Hilton et al., arXiv:2110.00641; AReaL,
    arXiv:2505.24298.

    The proximal policy is the trainer's at the start of the batch (`proximal_logprobs`); without them it is the current
    one, which is the same thing before the batch's first update. Behavior is what sampled (`rollout_logprobs`).
    """

    behavior_weight_cap: float | None = 5.0
    """Tokens with p_proximal / p_behavior above it are dropped (AReaL's default); None: none."""

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        own_BT = inputs.policy_logprobs_BT
        proximal_BT = own_BT.detach() if inputs.proximal_logprobs_BT is None else inputs.proximal_logprobs_BT
        log_r_BT = (own_BT - proximal_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        loss_BT, metrics = self.clipped(inputs, log_r_BT, log_r_BT.exp(), inputs.advantages())
        behavior_BT = (proximal_BT - inputs.rollout_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        if self.behavior_weight_cap is not None:
            over_BT = above(behavior_BT, self.behavior_weight_cap)
            behavior_BT = behavior_BT * (1.0 - over_BT)
            metrics["behavior_cap_frac"] = inputs.weighted(over_BT)
        metrics["behavior_weight"] = inputs.weighted(behavior_BT)
        return behavior_BT * loss_BT, metrics


@dataclass(frozen=True)
class M2po(PolicyLoss):
    """-A r, without the tokens that push the second moment of log r over a threshold. M2PO, arXiv:2510.01161,
    algorithm 1.

    Of the tokens that PPO could clip (A > 0 and r > 1, or A < 0 and r < 1) those with the largest (log r)^2 are dropped
    until the mean of the rest is at most `m2_threshold`. Dropped tokens stay in the denominator, as in the paper.

    The paper takes the mean over the batch; that mask depends on who shares the micro-batch. scope "sequence" bounds
    each sequence instead: the batch's mean is then within the bound as well, and any cut of the batch gives the same
    loss.
    """

    m2_threshold: float = 0.04
    scope: str = "sequence"
    """"sequence", or "batch": the paper's, over what is in the call; give whole batches."""

    def __post_init__(self) -> None:
        require(self.m2_threshold >= 0.0, f"m2_threshold must be >= 0, got {self.m2_threshold}")
        one_of("scope", self.scope, ("sequence", "batch"))

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        advantages_BT = inputs.advantages()
        log_r_BT = log_ratio(inputs)
        dropped_BT = self.dropped(inputs, log_r_BT.detach(), advantages_BT)
        loss_BT = advantages_BT * log_r_BT.exp() * (dropped_BT - 1.0)
        return loss_BT, ratio_metrics(inputs, log_r_BT, dropped_BT)

    def dropped(self, inputs: LossInputs, log_r_BT: Tensor, advantages_BT: Tensor) -> Tensor:
        """[B, T] 1 for tokens over the second-moment budget of their sequence (or batch), else 0; float."""
        if log_r_BT.dtype in (torch.bfloat16, torch.float16):
            log_r_BT = log_r_BT.float()
        trusted_BT = above(advantages_BT * log_r_BT, 0.0) * number(inputs.loss_mask_BT)
        size_BT = log_r_BT.abs() * trusted_BT
        if self.scope == "batch":
            return over_budget(size_BT.view(1, -1), trusted_BT.view(1, -1), self.m2_threshold).view_as(size_BT)
        if inputs.sequence_BT is None:
            return over_budget(size_BT, trusted_BT, self.m2_threshold)
        flat = (size_BT.flatten(), trusted_BT.flatten(), inputs.sequence_BT.flatten())
        return over_budget_packed(*flat, self.m2_threshold).view_as(size_BT)


@dataclass(frozen=True)
class Dppo(PolicyLoss):
    """-keep adv_tau A r + kl_tau (log r)^2: drop by change of probability, not by ratio. DPPO, arXiv:2602.04879; the
    KL term Kimi k1.5,
    arXiv:2501.12599; the defaults prime-rl's.

    r is against what sampled (`rollout_logprobs`). keep is 0 where the token's probability already moved the wanted way
    by more than the bound: p - p_behavior > high where A > 0, < -low where A <= 0.
    """

    mask_low: float = 0.2
    mask_high: float = 0.2
    adv_tau: float = 1.0
    kl_tau: float = 0.001

    def __post_init__(self) -> None:
        require(min(self.mask_low, self.mask_high) >= 0.0, "mask_low and mask_high must be >= 0")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        advantages_BT = inputs.advantages()
        own_BT, behavior_BT = inputs.policy_logprobs_BT, inputs.rollout_logprobs_BT
        log_r_BT = (own_BT - behavior_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        moved_BT = own_BT.detach().exp() - behavior_BT.exp()
        wanted_BT = above(advantages_BT, 0.0)
        dropped_BT = wanted_BT * above(moved_BT, self.mask_high) + (1.0 - wanted_BT) * above(-moved_BT, self.mask_low)
        gain_BT = self.adv_tau * advantages_BT * log_r_BT.exp() * (1.0 - dropped_BT)
        return self.kl_tau * log_r_BT.square() - gain_BT, ratio_metrics(inputs, log_r_BT, dropped_BT)


@dataclass(frozen=True)
class Vespo(PolicyLoss):
    """-sg(phi(w)) A log p, phi(w) = exp(l) w^k exp(-l w), w the product of r over the sequence. VESPO,
    arXiv:2602.10693.

    phi is 1 at w = 1 and falls on both sides: no clip, no length normalization.
    """

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        values = (self.k_pos, self.lambda_pos, self.k_neg, self.lambda_neg)
        require(min(values) > 0.0, f"k and lambda must be > 0, got {values}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        advantages_BT = inputs.advantages()
        log_r_BT = log_ratio(inputs)
        log_w_BT = inputs.spread(inputs.sequence_sums(log_r_BT.detach())).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        phi_BT = self.phi(log_w_BT, advantages_BT)
        metrics = {"ppo_kl": inputs.weighted(-log_r_BT), "vespo_phi": inputs.weighted(phi_BT)}
        return -(phi_BT * advantages_BT) * inputs.policy_logprobs_BT, metrics

    def phi(self, log_w: Tensor, advantages: Tensor) -> Tensor:
        """phi(exp(log_w)) with the constants for the sign of the advantage; A = 0 counts as positive."""
        k = choose(advantages >= 0, self.k_pos, self.k_neg, log_w)
        rate = choose(advantages >= 0, self.lambda_pos, self.lambda_neg, log_w)
        return torch.exp(rate + k * log_w - rate * log_w.exp())
