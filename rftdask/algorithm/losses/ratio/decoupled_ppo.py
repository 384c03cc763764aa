"""Decoupled PPO: clips around a recent policy, and corrects for the stale policy that sampled."""

import math
from dataclasses import dataclass

from torch import Tensor

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.kl import MAX_LOG_RATIO
from rftdask.algorithm.losses.base import LossInputs
from rftdask.algorithm.losses.ratio.ppo import Ppo


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
