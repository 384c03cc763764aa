"""GSPO: one ratio per sequence, since the reward is per sequence."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.losses.base import ClipRange, LossInputs, PolicyLoss, ratio_metrics


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
