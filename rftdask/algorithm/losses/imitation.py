"""Losses that imitate: likelihood of demonstrations, mixtures with rollouts, and the distribution of a teacher.

Knows nothing of the source of demonstrations.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rftdask.algorithm.aggregation import AGGREGATIONS
from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import one_of, require
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss
from rftdask.algorithm.losses.ratio import Ppo

# ---- SFT: maximum likelihood of given responses. CPT and RAFT use the same loss on other rows.


@dataclass(frozen=True)
class Sft(PolicyLoss):
    """-log p: maximum likelihood. Metric sft_nll, nats per token."""

    loss_name = "sft"
    uses_advantages = False
    schema = "any"

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        loss_BT = -inputs.policy_logprobs_BT
        return loss_BT, {"sft_nll": inputs.weighted(loss_BT)}


class SftAlgorithm(AlgorithmType):
    """Prompts with one response each."""

    algorithm_type = "sft"
    schema = "sft"
    repeat_times = 1
    advantage_fn: ClassVar[str | None] = None
    policy_loss_fn = "sft"
    kl_loss_fn = "none"
    entropy_loss_fn = "none"


class CptAlgorithm(SftAlgorithm):
    """Continued pretraining: plain text, every token is trained."""

    algorithm_type = "cpt"
    schema = "cpt"


class RaftAlgorithm(SftAlgorithm):
    """Imitation of the best rollout of each task. Source: RAFT, arXiv:2304.06767."""

    algorithm_type = "raft"
    schema = "experience"
    repeat_times = 8
    advantage_fn = "best_of_n"


# ---- Weighted SFT: DFT (by token probability) and CHORD-phi (by the policy's uncertainty).


@dataclass(frozen=True)
class SftIs(Sft):
    """-sg(p) log p: likely tokens have more weight. DFT, arXiv:2508.05629; CHORD, arXiv:2508.11408."""

    loss_name = "sft_is"

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        # The gradient of SFT is that of a reward of 1 / p; the factor sg(p) removes the 1 / p.
        log_pi_BT = inputs.policy_logprobs_BT
        return -log_pi_BT.detach().exp() * log_pi_BT, {"sft_nll": inputs.weighted(-log_pi_BT)}


@dataclass(frozen=True)
class SftPhi(Sft):
    """-sg(p (1 - p)) log p: uncertain tokens have the largest weight. CHORD-phi, arXiv:2508.11408."""

    cutoff_prob: float = 1.0
    """Tokens more probable than this have no gradient. 1: all tokens have one."""

    loss_name = "sft_phi"

    def __post_init__(self) -> None:
        require(0.0 < self.cutoff_prob <= 1.0, f"cutoff_prob must be within (0, 1], got {self.cutoff_prob}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_pi_BT = inputs.policy_logprobs_BT
        # phi = p (1 - p), largest at p = 1/2, measures the uncertainty about the token.
        p_BT = log_pi_BT.detach().exp()
        # Above the cutoff log p is constant and has no gradient.
        bounded_BT = log_pi_BT.clamp(max=math.log(self.cutoff_prob)) if self.cutoff_prob < 1.0 else log_pi_BT
        return -(p_BT * (1.0 - p_BT)) * bounded_BT, {"sft_nll": inputs.weighted(-log_pi_BT)}


# ---- MIX: rollouts and demonstrations in one batch, each part with its own loss. Each part is normalized over its own
# tokens of the whole batch, so any split of the batch gives the same loss.


@dataclass(frozen=True)
class Mixture(Ppo, ABC):
    """Base of mixtures: (1 - mu) * PPO over rollouts + mu * imitation over demonstrations.

    The factors are part of `row_weights`: for mean aggregations, rollout tokens sum to 1 - mu and demonstrated tokens
    to mu, each part normalized separately. A batch without demonstrations has total weight 1 - mu, one without rollouts
    mu.
    """

    sft_loss_agg_mode: str | None = None
    """Aggregation of the demonstrations. None: that of the algorithm."""

    # Divisors of other systems; here the weights are computed over the whole batch.
    ignored_args = (
        "use_dynamic_bsz",
        "ppo_mini_batch_size",
        "ppo_micro_batch_size_per_gpu",
        "ngpus_trainer",
        "train_batch_size_usual",
        "train_batch_size_expert",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sft_loss_agg_mode is not None:
            one_of("sft_loss_agg_mode", self.sft_loss_agg_mode, AGGREGATIONS)

    @abstractmethod
    def mu_at(self, step: int) -> float:
        """Weight of the imitation loss at this step, within [0, 1]."""

    @abstractmethod
    def imitation(self) -> PolicyLoss:
        """Loss of the demonstrations."""

    def row_weights(
        self, counts_B: Tensor, mode: str, *, expert_mask_B: Tensor | None = None, step: int = 0, **arguments: Any
    ) -> Tensor:
        """[B] weights. expert_mask_B: [B] bool, True for a demonstration. Raises: ValueError: it is missing."""
        expert_B, mu = expert_mask(expert_mask_B), self.mu_at(step)
        # Each part is normalized over its own tokens, so only mu determines their ratio.
        usual_B = super().row_weights(counts_B * ~expert_B, mode, **arguments)
        expert_weights_B = super().row_weights(counts_B * expert_B, self.sft_loss_agg_mode or mode, **arguments)
        return (1.0 - mu) * usual_B + mu * expert_weights_B

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        expert_B = expert_mask(inputs.expert_mask_B).to(inputs.token_weights_BT.dtype)
        usual_BT, expert_BT = inputs.spread(1 - expert_B), inputs.spread(expert_B)  # 0 or 1
        usual = replace(inputs, token_weights_BT=inputs.token_weights_BT * usual_BT)
        expert = replace(inputs, token_weights_BT=inputs.token_weights_BT * expert_BT)
        # Both losses see all tokens; those of the other part have weight 0, also in metrics.
        usual_loss_BT, usual_metrics = super().__call__(usual)
        expert_loss_BT, expert_metrics = self.imitation()(expert)
        losses = {"usual_loss": usual.weighted(usual_loss_BT), "expert_loss": expert.weighted(expert_loss_BT)}
        return usual_BT * usual_loss_BT + expert_BT * expert_loss_BT, {**usual_metrics, **expert_metrics, **losses}


@dataclass(frozen=True)
class Mix(Mixture):
    """Mixture with a fixed weight and plain SFT. Trinity-RFT's MIX; CHORD-mu, arXiv:2508.11408."""

    mu: float = 0.1
    """Weight of the imitation loss, within [0, 1]."""

    loss_name = "mix"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0.0 <= self.mu <= 1.0, f"mu must be within [0, 1], got {self.mu}")

    def mu_at(self, step: int) -> float:
        return self.mu

    def imitation(self) -> PolicyLoss:
        return Sft()


def expert_mask(expert_mask_B: Tensor | None) -> Tensor:
    """[B] bool, True for a demonstration. Raises: ValueError: it is missing."""
    if expert_mask_B is None:
        raise ValueError("a mixture needs expert_mask_B, True for demonstrations; pass all False if there are none")
    return expert_mask_B


class MixAlgorithm(AlgorithmType):
    """GRPO on rollouts, SFT on demonstrations; the entropy bonus excludes demonstrations."""

    algorithm_type = "mix"
    policy_loss_fn = "mix"
    entropy_loss_fn = "mix"
    sample_strategy = "mix"


# ---- CHORD: a mixture that starts with much imitation and ends with little, on tokens that can still be learned.


@dataclass(frozen=True)
class MixChord(Mixture):
    """Mixture whose weight warms up and decays, with CHORD's phi on the demonstrations. CHORD, arXiv:2508.11408.

    mu(step) = peak * step / warmup during the warm-up, then valley + (peak - valley) * (1 + cos(pi x)) / 2 with x from
    0 to 1 during the decay, then valley.
    """

    mu_warmup_steps: int = 0
    mu_decay_steps: int = 0
    mu_peak: float = 0.1
    mu_valley: float = 0.1
    enable_phi_function: bool = True
    """Weight demonstrated tokens by p (1 - p)."""

    loss_name = "mix_chord"

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = (self.mu_warmup_steps, self.mu_decay_steps)
        require(min(steps) >= 0, f"mu_warmup_steps and mu_decay_steps must be >= 0, got {steps}")
        ends = (self.mu_peak, self.mu_valley)
        require(all(0.0 <= mu <= 1.0 for mu in ends), f"mu_peak and mu_valley must be within [0, 1], got {ends}")

    def mu_at(self, step: int) -> float:
        """Weight at an optimizer step: warm-up, decay, then the valley."""
        if step < self.mu_warmup_steps:
            return step / self.mu_warmup_steps * self.mu_peak
        if step >= self.mu_warmup_steps + self.mu_decay_steps:
            # Checked before the division, for a decay of 0 steps.
            return self.mu_valley
        # Half a cosine from peak to valley, as in learning rate schedules.
        share = (step - self.mu_warmup_steps) / self.mu_decay_steps
        return self.mu_valley + (self.mu_peak - self.mu_valley) * 0.5 * (1.0 + math.cos(math.pi * share))

    def imitation(self) -> PolicyLoss:
        """SFT, with phi weighted so that learned and unreachable tokens count little."""
        return SftPhi() if self.enable_phi_function else Sft()


class MixChordAlgorithm(AlgorithmType):
    """GRPO on rollouts, CHORD's phi on demonstrations, with a schedule for mu."""

    algorithm_type = "mix_chord"
    policy_loss_fn = "mix_chord"
    entropy_loss_fn = "mix"
    sample_strategy = "mix"


# ---- Distillation over the whole vocabulary: the policy's next-token distribution moves toward that of a teacher. The
# tokens may come from rollouts (on-policy), a dataset (supervised), or both.


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
