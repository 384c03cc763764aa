"""Distillation over the whole vocabulary: what the policy says next is drawn to what a teacher says next.

P is the teacher's distribution of the next token and Q the policy's, at one position and one temperature. The sign is
derived once, in `Jsd`. Knows nothing of who wrote the tokens: rollouts of the policy (on-policy), rows of a dataset
(supervised), or both.
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
    vocabulary. Generalized JSD, GKD, arXiv:2306.13649, equation 1; KL(Q || P) alone: MiniLLM, arXiv:2306.08543.

    With z the policy's logits at temperature 1, d/dz_v = (1 - beta) Q_v (log(Q_v / M_v) - KL(Q || M)): a step down
    raises the words of which M, and so P, has more than Q. It is a divergence, never negative and 0 where Q = P, so the
    loss is its plain value, without an advantage or a sign to choose.

    At 0 and 1 the formula is 0 whatever Q is; beta 0 and 1 are its limits after division by beta or 1 - beta. With
    beta -> 0, KL(Q || M) is of order beta^2, which leaves KL(P || Q), forward, which covers all that the teacher says.
    With beta -> 1, by the same in the other order, KL(Q || P), reverse, which leaves out what the policy cannot do. The
    gradient of the latter, in expectation over tokens that the policy samples, is that of `on_policy_distill`.

    Both are softmax(logits / temperature), whatever temperature the tokens were sampled at. Metric jsd, nats per token.
    """

    beta: float = 0.5
    """Share of the teacher in M, within [0, 1]; 0: forward KL, 1: reverse KL."""
    temperature: float = 1.0
    """Above 0; more makes both distributions flatter, and their small probabilities count more."""

    loss_name = "jsd"
    uses_advantages = False
    uses_teacher = True
    schema = "any"

    def __post_init__(self) -> None:
        require(0.0 <= self.beta <= 1.0, f"beta must be within [0, 1], got {self.beta}")
        require(self.temperature > 0.0, f"temperature must be > 0, got {self.temperature}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        if inputs.divergence_BT is None:
            raise ValueError("jsd needs divergence_BT, which is computed from the logits of policy and teacher")
        return inputs.divergence_BT, {"jsd": inputs.weighted(inputs.divergence_BT)}

    def divergence(self, policy_logits_QV: Tensor, teacher_logits_QV: Tensor) -> Tensor:
        """[Q] divergences."""
        log_q_QV = torch.log_softmax(policy_logits_QV / self.temperature, dim=-1)
        log_p_QV = torch.log_softmax(teacher_logits_QV / self.temperature, dim=-1)
        if self.beta == 0.0:
            return kl(log_p_QV, log_q_QV)
        if self.beta == 1.0:
            return kl(log_q_QV, log_p_QV)
        # M without leaving logs: either probability may underflow.
        log_m_QV = torch.logaddexp(log_p_QV + math.log(self.beta), log_q_QV + math.log1p(-self.beta))
        # The teacher's part has no gradient but through M, in which Q has its share.
        return self.beta * kl(log_p_QV, log_m_QV) + (1.0 - self.beta) * kl(log_q_QV, log_m_QV)


def kl(log_a_QV: Tensor, log_b_QV: Tensor) -> Tensor:
    """[Q] KL(a || b) = sum over the vocabulary of a (log a - log b), nats."""
    return (log_a_QV.exp() * (log_a_QV - log_b_QV)).sum(dim=-1)


class JsdAlgorithm(AlgorithmType):
    """GKD: the policy's own rollouts, with strategy mix a share of a dataset's rows beside them; each sequence weighs
    alike, as in the paper."""

    algorithm_type = "jsd"
    advantage_fn = None
    policy_loss_fn = "jsd"
    kl_loss_fn = "none"
    entropy_loss_fn = "none"
    loss_agg_mode = "seq-mean-token-mean"
