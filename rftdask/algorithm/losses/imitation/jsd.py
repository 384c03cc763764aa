"""Distillation over the whole vocabulary: the policy's next-token distribution moves toward that of a teacher.

P is the teacher's distribution of the next token and Q the policy's, at one position and one temperature. The sign is
derived once, in `Jsd`. The tokens may come from rollouts (on-policy), a dataset (supervised), or both.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import require
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss


@dataclass(frozen=True)
class Jsd(PolicyLoss):
    """beta KL(P || M) + (1 - beta) KL(Q || M), M = beta P + (1 - beta) Q; P the teacher, Q the policy, over the whole
    vocabulary. Generalized JSD, GKD, arXiv:2306.13649, equation 1. KL(Q || P): MiniLLM, arXiv:2306.08543.

    With z the policy's logits at temperature 1, d/dz_v = (1 - beta) Q_v (log(Q_v / M_v) - KL(Q || M)): a descent
    step raises the tokens to which M, and so P, gives more probability than Q. The divergence is never negative and 0
    if Q = P, so the loss is its plain value, without an advantage or sign.

    At beta 0 and 1 the formula is 0 for any Q, so these values stand for its limits after division by beta or 1 - beta.
    With beta -> 0, KL(Q || M) is of order beta^2, which leaves the forward KL(P || Q), which covers all modes of the
    teacher. With beta -> 1 it is the reverse KL(Q || P), which ignores modes that the policy cannot represent. The
    expected gradient of the latter over tokens sampled by the policy is that of `on_policy_distill`.

    P and Q are softmax(logits / temperature), independent of the sampling temperature. Metric jsd, in nats per token.
    """

    beta: float = 0.5
    """Share of the teacher in M, within [0, 1]. 0: forward KL, 1: reverse KL."""
    temperature: float = 1.0
    """Softmax temperature, > 0. Higher values flatten both distributions, so that small probabilities count more."""

    loss_name = "jsd"
    uses_advantages = False
    uses_teacher = True
    schema = "any"

    def __post_init__(self) -> None:
        require(0.0 <= self.beta <= 1.0, f"beta must be within [0, 1], got {self.beta}")
        require(self.temperature > 0.0, f"temperature must be > 0, got {self.temperature}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        if inputs.divergence_BT is None:
            raise ValueError("jsd needs divergence_BT, computed from the logits of policy and teacher")
        return inputs.divergence_BT, {"jsd": inputs.weighted(inputs.divergence_BT)}

    def divergence(self, policy_logits_QV: Tensor, teacher_logits_QV: Tensor) -> Tensor:
        """[Q] divergence at each position."""
        log_q_QV = torch.log_softmax(policy_logits_QV / self.temperature, dim=-1)
        log_p_QV = torch.log_softmax(teacher_logits_QV / self.temperature, dim=-1)
        if self.beta == 0.0:
            return kl(log_p_QV, log_q_QV)
        if self.beta == 1.0:
            return kl(log_q_QV, log_p_QV)
        # M is computed in logs, since either probability may underflow.
        log_m_QV = torch.logaddexp(log_p_QV + math.log(self.beta), log_q_QV + math.log1p(-self.beta))
        # The first term has a gradient only through M.
        return self.beta * kl(log_p_QV, log_m_QV) + (1.0 - self.beta) * kl(log_q_QV, log_m_QV)


def kl(log_a_QV: Tensor, log_b_QV: Tensor) -> Tensor:
    """[Q] KL(a || b) = sum over the vocabulary of a (log a - log b), nats."""
    return (log_a_QV.exp() * (log_a_QV - log_b_QV)).sum(dim=-1)


class JsdAlgorithm(AlgorithmType):
    """GKD: rollouts of the policy and, with sample strategy mix, a share of dataset rows. All sequences have the same
    weight, as in the paper."""

    algorithm_type = "jsd"
    advantage_fn = None
    policy_loss_fn = "jsd"
    kl_loss_fn = "none"
    entropy_loss_fn = "none"
    loss_agg_mode = "seq-mean-token-mean"
