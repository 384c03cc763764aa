"""Decoupled PPO: the clip is around a recent policy, the correction is for the stale one that sampled."""

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

    The proximal policy is the trainer's at the start of the batch (`proximal_logprobs`); without them it is the current
    one, which is the same thing before the batch's first update. Behavior is what sampled (`rollout_logprobs`).
    """

    behavior_weight_cap: float | None = 5.0
    """Tokens with p_proximal / p_behavior above it are dropped (AReaL's default); None: none."""

    loss_name = "decoupled_ppo"
    uses_proximal = True

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_pi_BT, log_behavior_BT = inputs.policy_logprobs_BT, inputs.rollout_logprobs_BT
        given_BT = inputs.proximal_logprobs_BT
        # Detached: in the first update pi is its own proximal policy, r is 1 and only its gradient counts.
        log_proximal_BT = log_pi_BT.detach() if given_BT is None else given_BT
        # The clip is around the proximal policy: it bounds the step, however stale the behavior policy is.
        log_r_BT = (log_pi_BT - log_proximal_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        loss_BT, metrics = self.clipped(inputs, log_r_BT)
        w_BT = (log_proximal_BT - log_behavior_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        # AReaL drops such tokens, where truncated importance sampling would cap their weight.
        over_BT = w_BT > (math.inf if self.behavior_weight_cap is None else self.behavior_weight_cap)
        w_BT = w_BT * ~over_BT
        if self.behavior_weight_cap is not None:
            metrics["behavior_cap_frac"] = inputs.weighted(over_BT)
        metrics["behavior_weight"] = inputs.weighted(w_BT)
        # w has no gradient: it says how much a token of the sampler counts, not where to go.
        return w_BT * loss_BT, metrics


class DecoupledPpoAlgorithm(AlgorithmType):
    """GRPO's advantages with the decoupled loss; no KL."""

    algorithm_type = "decoupled_ppo"
    policy_loss_fn = "decoupled_ppo"
    kl_loss_fn = "none"
