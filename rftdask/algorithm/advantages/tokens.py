"""Advantages with one number per token: critics, rewards to go, distillation, and filters of tokens.

Knows nothing of losses. Invariant: positions outside the loss mask (prompts, tool output, padding) neither get an
advantage nor change that of another token: recursions step over them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rftdask.algorithm.advantages.base import AdvantageFn, AdvantageInputs, AdvantageResult, base_drops, group_stats
from rftdask.algorithm.advantages.group import Grpo
from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import require
from rftdask.algorithm.drops import count_drops


def whiten(values_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """(x - mean) / sqrt(sample variance + 1e-8) over the masked positions; 0 elsewhere, and everywhere if there are
    fewer than two."""
    count = mask_NT.sum()
    if count < 2:
        return torch.zeros_like(values_NT)
    kept_NT = torch.where(mask_NT, values_NT, 0.0).double()
    mean = kept_NT.sum() / count
    centered_NT = torch.where(mask_NT, kept_NT - mean, 0.0)
    variance = centered_NT.square().sum() / (count - 1)
    # 1e-8 under the root: equal values give 0, and no division by 0.
    return (centered_NT * torch.rsqrt(variance + 1e-8)).to(values_NT.dtype)


def used_mask(inputs: AdvantageInputs) -> Tensor:
    """[N, T] bool, trained tokens of used rows."""
    assert inputs.loss_mask_NT is not None
    return inputs.loss_mask_NT & inputs.used_N[:, None]


def token_result(
    inputs: AdvantageInputs,
    advantages_NT: Tensor,
    metrics: dict[str, float] | None = None,
    returns_NT: Tensor | None = None,
    keep_NT: Tensor | None = None,
) -> AdvantageResult:
    """Result of a token-level function: 0 outside the used mask, row means, counters."""
    mask_NT = used_mask(inputs)
    advantages_NT = torch.where(mask_NT, advantages_NT, 0.0).to(torch.float32)
    # For metrics and for who asks for one number a row; the loss takes the tokens' own.
    means_N = advantages_NT.sum(-1) / mask_NT.sum(-1).clamp(min=1)
    stats = group_stats(inputs.rewards_N, inputs.group_N, inputs.used_N, inputs.num_groups)
    drops_N = base_drops(inputs)
    return AdvantageResult(
        advantages_N=means_N,
        drops_N=drops_N,
        metrics={**stats.metrics(), **(metrics or {}), **count_drops(drops_N)},
        advantages_NT=advantages_NT,
        returns_NT=None if returns_NT is None else torch.where(mask_NT, returns_NT, 0.0).to(torch.float32),
        keep_NT=keep_NT,
    )


@dataclass(frozen=True)
class Gae(AdvantageFn):
    """Generalized advantage estimation, whitened over the batch's trained tokens. arXiv:1506.02438; PPO,
    arXiv:1707.06347.

    delta_t = r_t + gamma V' - V_t, A_t = delta_t + gamma lam A', with V' and A' of the next TRAINED token: tool
    output and other untrained positions are stepped over. returns = A + V, before whitening.
    """

    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True

    advantage_name = "ppo"
    needs = ("loss_mask_NT", "values_NT")
    uses_critic = True
    uses_groups = False
    token_level = True

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            require(0.0 <= getattr(self, name) <= 1.0, f"{name} must be within [0, 1], got {getattr(self, name)}")

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        """In float64, because the sums are as long as a rollout."""
        assert inputs.values_NT is not None
        mask_NT = used_mask(inputs)
        values_NT = torch.where(mask_NT, inputs.values_NT, 0.0).double()
        rewards_NT = torch.where(mask_NT, inputs.token_rewards(), 0.0).double()
        # Behind the last trained token there is nothing: V' and A' are 0, the rollout has ended there.
        column_T, num_columns = torch.arange(mask_NT.shape[1], device=mask_NT.device), mask_NT.shape[1]
        nearest_NT = torch.where(mask_NT, column_T, num_columns).flip(1).cummin(1).values.flip(1)
        pad = torch.nn.functional.pad
        next_value_NT = pad(values_NT, (0, 1)).gather(1, pad(nearest_NT[:, 1:], (0, 1), value=num_columns))
        delta_NT = rewards_NT + self.gamma * next_value_NT - values_NT
        advantages_NT = discounted_sums(delta_NT, mask_NT, self.gamma * self.lam)
        # What the critic is to learn, so it must not be whitened.
        returns_NT = advantages_NT + values_NT
        if self.whiten:
            advantages_NT = whiten(advantages_NT, mask_NT)
        mean_value = float(values_NT.sum() / mask_NT.sum().clamp(min=1))
        return token_result(inputs, advantages_NT, {"value_mean": mean_value}, returns_NT)


@dataclass(frozen=True)
class ReinforcePlusPlus(AdvantageFn):
    """Discounted reward to go, whitened over the batch's trained tokens. REINFORCE++, arXiv:2501.03262."""

    gamma: float = 1.0
    """Discount per trained token."""

    advantage_name = "reinforceplusplus"
    needs = ("loss_mask_NT",)
    uses_groups = False
    token_level = True

    def __post_init__(self) -> None:
        require(0.0 <= self.gamma <= 1.0, f"gamma must be within [0, 1], got {self.gamma}")

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        """Returns [N, T], before and after whitening, are 0 where no token is trained."""
        mask_NT = used_mask(inputs)
        returns_NT = discounted_sums(inputs.token_rewards(), mask_NT, self.gamma)
        # Normalized over the whole batch, which stands in place of a baseline by task.
        return token_result(inputs, whiten(returns_NT, mask_NT), returns_NT=returns_NT)


class ReinforcePlusPlusAlgorithm(AlgorithmType):
    """PPO's loss with rewards to go, normalized over the batch."""

    algorithm_type = "reinforceplusplus"
    advantage_fn = "reinforceplusplus"


@dataclass(frozen=True)
class Remax(AdvantageFn):
    """Reward to go minus the reward of the greedy rollout of the same task. ReMax, arXiv:2310.10505."""

    advantage_name = "remax"
    needs = ("loss_mask_NT", "baseline_rewards_N")
    uses_groups = False
    token_level = True

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        """The baseline [N] is the reward of a greedy rollout, which is itself not trained on."""
        assert inputs.baseline_rewards_N is not None
        mask_NT = used_mask(inputs)
        returns_NT = discounted_sums(inputs.token_rewards(), mask_NT, 1.0)
        # The baseline depends on the task alone, not on the sampled tokens, so the gradient stays unbiased.
        return token_result(inputs, returns_NT - inputs.baseline_rewards_N[:, None], returns_NT=returns_NT)


class RemaxAlgorithm(AlgorithmType):
    """PPO's loss; one rollout a task, and a greedy one that is its baseline."""

    algorithm_type = "remax"
    repeat_times = 1
    advantage_fn = "remax"


@dataclass(frozen=True)
class OnPolicyDistill(AdvantageFn):
    """c (log p_teacher - log p_sampler): reverse KL to a teacher, on the sampled tokens. Thinking Machines, "On-Policy
    Distillation", 2025.

    With Q the policy and P the teacher at one position, grad KL(Q || P) = sum_v grad Q_v (log Q_v - log P_v), because
    sum_v Q_v grad log Q_v = grad 1 = 0; that is E_{v ~ Q}[(log Q_v - log P_v) grad log Q_v]. A policy gradient goes up
    A grad log Q_v, so going down the KL takes A = log P_v - log Q_v: positive where the teacher says more. What later
    tokens owe to this one is left out. All of the vocabulary, exactly: `jsd` with beta 1.
    """

    kl_coef: float = 1.0

    advantage_name = "on_policy_distill"
    needs = ("loss_mask_NT", "rollout_logprobs_NT", "teacher_logprobs_NT")
    uses_groups = False
    token_level = True

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        """Rewards are not used; metric teacher_kl is the mean of log p_sampler - log p_teacher, nats per token."""
        student_NT, teacher_NT = student_and_teacher(inputs)
        gap_NT = teacher_NT - student_NT
        mean_kl = float(-gap_NT.sum() / used_mask(inputs).sum().clamp(min=1))
        return token_result(inputs, self.kl_coef * gap_NT, {"teacher_kl": mean_kl})


class OnPolicyDistillAlgorithm(AlgorithmType):
    """PPO's loss; the teacher's logprobs are the only reward."""

    algorithm_type = "on_policy_distill"
    advantage_fn = "on_policy_distill"
    kl_loss_fn = "none"
    entropy_loss_fn = "none"


@dataclass(frozen=True)
class ClipB(AdvantageFn):
    """GRPO without the negative tokens whose s = p (H + log p) is below mean - mu sigma of the batch. Clip_B as in
    Trinity-RFT.

    s estimates how training the token changes the entropy H; sigma is the population's over all trained tokens.
    """

    epsilon: float = 1e-6
    mu: float = 2.5

    advantage_name = "clipb"
    needs = ("loss_mask_NT", "rollout_logprobs_NT", "entropy_NT")
    token_level = True

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        """Metric token_filter_frac is the share of the trained tokens that were dropped."""
        grpo, mask_NT = Grpo(epsilon=self.epsilon)(inputs), used_mask(inputs)
        signal_NT = entropy_signal(inputs, inputs.rollout_logprobs_NT)
        centered_NT, sigma = centered_over(signal_NT, mask_NT)
        # With sigma 0 all tokens are equal, and none stands out.
        low_NT = (centered_NT < -self.mu * sigma) if sigma >= 1e-12 else torch.zeros_like(mask_NT)
        dropped_NT = mask_NT & low_NT & (grpo.advantages_N < 0)[:, None]
        return filtered(inputs, grpo, dropped_NT)


@dataclass(frozen=True)
class ClipV(AdvantageFn):
    """GRPO without the negative tokens whose d = E_v[p_v (H + log p_v)] - p (H + log p) is above mu sigma, at most
    max_frac of all tokens. Clip_V, arXiv:2602.03392; as in Trinity-RFT.

    p, H and the expectation over the vocabulary are those of the weights before the step. d estimates how much more
    the entropy would rise by this token than by one drawn in its place; sigma is the population's over all trained
    tokens.
    """

    epsilon: float = 1e-6
    mu: float = 8.5
    max_frac: float = 1e-4
    """At most this share of the trained tokens (but at least one) is dropped, the largest d first."""

    advantage_name = "clipv"
    needs = ("loss_mask_NT", "policy_logprobs_NT", "entropy_NT", "necs_NT")
    token_level = True

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        """As ClipB; necs_NT is the expectation over the vocabulary."""
        assert inputs.necs_NT is not None
        grpo, mask_NT = Grpo(epsilon=self.epsilon)(inputs), used_mask(inputs)
        signal_NT = entropy_signal(inputs, inputs.policy_logprobs_NT)
        excess_NT = torch.where(mask_NT, inputs.necs_NT - signal_NT, 0.0)
        _, sigma = centered_over(excess_NT, mask_NT)
        # Not centered: d is 0 for a token that is as its distribution.
        high_NT = (excess_NT > self.mu * sigma) if sigma >= 1e-12 else torch.zeros_like(mask_NT)
        dropped_NT = mask_NT & high_NT & (grpo.advantages_N < 0)[:, None]
        # At least one, or short batches would never filter.
        most = max(int(self.max_frac * int(mask_NT.sum())), 1)
        if int(dropped_NT.sum()) > most:
            # Flat, over the whole batch: the share is of all tokens, and not of each row's.
            ranked = excess_NT.masked_fill(~dropped_NT, -torch.inf).flatten()
            dropped_NT = torch.zeros_like(ranked, dtype=torch.bool).index_fill(0, ranked.topk(most).indices, True)
            dropped_NT = dropped_NT.view_as(mask_NT)
        return filtered(inputs, grpo, dropped_NT)


_CACHED = 2**17
"""Numbers of some rows that a core keeps near it, over all rounds of their sums."""


def discounted_sums(values_NT: Tensor, mask_NT: Tensor, gamma: float) -> Tensor:
    """[N, T] float64, v_t + gamma * (the same of the next trained token); an untrained token has that of the next.

    In log2(T) rounds over all columns, each of which joins runs of twice the length: column by column the sums of a
    response of 64 thousand tokens would take more than a second.
    """
    sums_NT = torch.where(mask_NT, values_NT, 0.0).double()
    # Untrained tokens neither add a value nor discount: gamma is per trained token.
    factors_NT = torch.ones_like(sums_NT).masked_fill(mask_NT, gamma)
    rows = max(1, _CACHED // max(1, sums_NT.shape[1]))
    for sums_BT, factors_BT in zip(sums_NT.split(rows), factors_NT.split(rows), strict=True):
        length = 1
        while length < sums_BT.shape[1]:
            # Of a run: its own sum, and by what it multiplies that of the run behind it.
            sums_BT[:, :-length] += factors_BT[:, :-length] * sums_BT[:, length:]
            factors_BT[:, :-length] = factors_BT[:, :-length] * factors_BT[:, length:]
            length *= 2
    return sums_NT


def student_and_teacher(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """[N, T] logprobs of sampler and teacher, 0 outside the used mask. Raises: ValueError: one is not finite within
    it."""
    mask_NT = used_mask(inputs)
    both = []
    for name in ("rollout_logprobs_NT", "teacher_logprobs_NT"):
        value_NT = torch.where(mask_NT, getattr(inputs, name), 0.0)
        bad_N = (~torch.isfinite(value_NT)).any(-1)
        require(not bool(bad_N.any()), f"{name} is not finite at row {int(bad_N.long().argmax())}")
        both.append(value_NT)
    return both[0], both[1]


def entropy_signal(inputs: AdvantageInputs, given_NT: Tensor | None) -> Tensor:
    """[N, T] p (H + log p) on the used mask, 0 elsewhere; given_NT: log p."""
    assert given_NT is not None and inputs.entropy_NT is not None
    mask_NT = used_mask(inputs)
    # Before the exp: padding may hold anything, and inf * 0 is nan.
    logprobs_NT = torch.where(mask_NT, given_NT, 0.0)
    return torch.where(mask_NT, logprobs_NT.exp() * (inputs.entropy_NT + logprobs_NT), 0.0)


def centered_over(values_NT: Tensor, mask_NT: Tensor) -> tuple[Tensor, float]:
    """Values minus their mean over the mask, and their population standard deviation over it."""
    count = mask_NT.sum().clamp(min=1)
    centered_NT = values_NT - torch.where(mask_NT, values_NT, 0.0).sum() / count
    sigma = (torch.where(mask_NT, centered_NT, 0.0).square().sum() / count).sqrt()
    return centered_NT, float(sigma)


def filtered(inputs: AdvantageInputs, grpo: AdvantageResult, dropped_NT: Tensor) -> AdvantageResult:
    """The advantages of `grpo` on every token but the dropped ones."""
    mask_NT = used_mask(inputs)
    share = float(dropped_NT.sum() / mask_NT.sum().clamp(min=1))
    advantages_NT = grpo.advantages_N[:, None].expand(mask_NT.shape)
    return token_result(inputs, advantages_NT, {"token_filter_frac": share}, keep_NT=~dropped_NT)
