"""KTO: single responses with a verdict, weighted by a model of human utility."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import require
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss


@dataclass(frozen=True)
class Kto(PolicyLoss):
    """lambda_y - v(x, y), with v = lambda_D sigmoid(beta (r - z0)) for a desirable response and lambda_U sigmoid(beta
    (z0 - r)) for an undesirable one. KTO, arXiv:2402.01306, equations 7 and 8.

    r = sum over tokens of log p_policy - log p_ref. z0, without gradient, estimates KL(policy, reference): the mean of
    r, at least 0, over the prompts of the whole batch, each paired with the response of another prompt, as in the paper
    and TRL. desirable_weight and undesirable_weight are lambda_D and lambda_U; the paper recommends
    lambda_D n_D / (lambda_U n_U) between 1 and 3/2, where n is the number of rows.

    Metrics: kl_baseline, z0; reward_accuracy, the share of rows whose r is on the side of z0 that matches the verdict.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    loss_name = "kto"
    uses_advantages = False
    uses_reference = True
    uses_kl_baseline = True
    schema = "kto"
    only_agg_mode = "seq-mean-token-mean"

    def __post_init__(self) -> None:
        require(self.beta > 0.0, f"beta must be > 0, got {self.beta}")
        weights = (self.desirable_weight, self.undesirable_weight)
        require(min(weights) >= 0.0, f"desirable_weight and undesirable_weight must be >= 0, got {weights}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        if inputs.ref_logprobs_BT is None or inputs.rewards_B is None or inputs.kl_baseline is None:
            raise ValueError("kto needs ref_logprobs_BT, rewards_B (1 desirable, 0 undesirable) and kl_baseline")
        r_B, z0 = inputs.sequence_sums(inputs.policy_logprobs_BT - inputs.ref_logprobs_BT), inputs.kl_baseline
        desirable_B = (inputs.rewards_B > 0).to(r_B.dtype)
        lambda_B = self.desirable_weight * desirable_B + self.undesirable_weight * (1.0 - desirable_B)
        # 2 d - 1 is the sign of the verdict, for both cases of v.
        loss_B = lambda_B * (1.0 - torch.sigmoid(self.beta * (2.0 * desirable_B - 1.0) * (r_B - z0)))
        right_B = ((r_B > z0).to(r_B.dtype) == desirable_B).to(r_B.dtype)
        metrics = {
            "kl_baseline": inputs.weighted(inputs.spread(torch.full_like(r_B, z0))),
            "reward_accuracy": inputs.weighted(inputs.spread(right_B)),
        }
        # Every token carries the loss of its row; weights sum to 1 / B per row, which gives the mean over rows.
        return inputs.spread(loss_B), metrics


class KtoAlgorithm(AlgorithmType):
    """Responses with a verdict, without pairs."""

    algorithm_type = "kto"
    schema = "kto"
    repeat_times = 1
    advantage_fn = None
    policy_loss_fn = "kto"
    kl_loss_fn = "none"
    entropy_loss_fn = "none"
    loss_agg_mode = "seq-mean-token-mean"
