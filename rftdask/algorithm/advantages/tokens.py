"""Advantages with one number per token: critics, rewards to go, distillation, and token filters.

Knows nothing of losses. Token values are concatenated row by row, Q numbers, which may cover only some rows of the
batch; M of them are trained. Invariant: tokens outside the loss mask (such as tool output) have no advantage and do not
affect other tokens: recursions skip them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rftdask.algorithm.advantages.base import AdvantageFn, AdvantageInputs, AdvantageResult, base_drops, group_stats
from rftdask.algorithm.advantages.group import Grpo
from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import require
from rftdask.algorithm.drop_reasons import count_drops


def whiten(inputs: AdvantageInputs, values_Q: Tensor) -> Tensor:
    """(x - mean) / sqrt(sample variance + 1e-8) over the trained tokens of the batch; 0 elsewhere, and everywhere
    if there are fewer than two."""
    centered_Q, squares, count = centered(inputs, values_Q)
    if count < 2:
        return torch.zeros_like(values_Q)
    # 1e-8 under the root avoids a division by 0 for equal values.
    return (centered_Q * torch.rsqrt(squares / (count - 1) + 1e-8)).to(values_Q.dtype)


def centered(inputs: AdvantageInputs, values_Q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(values minus their mean over the trained tokens of the batch, in float64 and 0 elsewhere; sum of their squares;
    number of trained tokens)."""
    mask_Q = inputs.used_mask_Q
    kept_Q = torch.where(mask_Q, values_Q, 0.0).double()
    total, count = inputs.total(torch.stack([kept_Q.sum(), mask_Q.sum().double()]))
    centered_Q = torch.where(mask_Q, kept_Q - total / count.clamp(min=1.0), 0.0)
    return centered_Q, inputs.total(centered_Q.square().sum()), count


def trained_mean(inputs: AdvantageInputs, values_Q: Tensor) -> float:
    """Mean over the trained tokens of the batch. values_Q must be 0 everywhere else."""
    total, count = inputs.total(torch.stack([values_Q.double().sum(), inputs.used_mask_Q.sum().double()]))
    return float(total / count.clamp(min=1.0))


def token_result(
    inputs: AdvantageInputs,
    advantages_Q: Tensor,
    metrics: dict[str, float] | None = None,
    returns_Q: Tensor | None = None,
    keep_Q: Tensor | None = None,
) -> AdvantageResult:
    """Result of a token-level function: 0 outside the used mask, row means, counters."""
    mask_Q = inputs.used_mask_Q
    advantages_Q = torch.where(mask_Q, advantages_Q, 0.0).to(torch.float32)
    # Row means are for metrics; the loss uses the token values.
    means_N = inputs.row_sums(advantages_Q) / inputs.row_sums(mask_Q).clamp(min=1)
    stats = group_stats(inputs.rewards_N, inputs.group_N, inputs.used_N, inputs.num_groups)
    drops_N = base_drops(inputs)
    return AdvantageResult(
        advantages_N=means_N.to(torch.float32),
        drops_N=drops_N,
        metrics={**stats.metrics(), **(metrics or {}), **count_drops(drops_N)},
        advantages_Q=advantages_Q,
        returns_Q=None if returns_Q is None else torch.where(mask_Q, returns_Q, 0.0).to(torch.float32),
        keep_Q=keep_Q,
    )


@dataclass(frozen=True)
class Gae(AdvantageFn):
    """Generalized advantage estimation, whitened over the batch's trained tokens. arXiv:1506.02438; PPO,
    arXiv:1707.06347.

    delta_t = r_t + gamma V' - V_t, A_t = delta_t + gamma lam A', with V' and A' of the next TRAINED token: tool
    output and other untrained positions are skipped. returns = A + V, before whitening.
    """

    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True

    advantage_name = "ppo"
    needs = ("loss_mask_Q", "values_Q")
    uses_critic = True
    uses_groups = False
    token_level = True
    takes_parts = True

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            require(0.0 <= getattr(self, name) <= 1.0, f"{name} must be within [0, 1], got {getattr(self, name)}")

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        """Computed in float64, since sums are as long as a rollout."""
        assert inputs.values_Q is not None
        mask_Q = inputs.used_mask_Q
        values_Q = torch.where(mask_Q, inputs.values_Q, 0.0).double()
        rewards_Q = torch.where(mask_Q, inputs.token_rewards(), 0.0).double()
        # After the last trained token the rollout has ended, so V' and A' are 0.
        places_M = mask_Q.nonzero().squeeze(-1)
        rows_M = inputs.row_Q[places_M]
        next_values_Q = torch.zeros_like(values_Q)
        next_values_Q[places_M[:-1]] = torch.where(rows_M[1:] == rows_M[:-1], values_Q[places_M[1:]], 0.0)
        delta_Q = rewards_Q + self.gamma * next_values_Q - values_Q
        advantages_Q = discounted_sums(inputs, delta_Q, self.gamma * self.lam)
        # Targets of the critic must not be whitened.
        returns_Q = advantages_Q + values_Q
        if self.whiten:
            advantages_Q = whiten(inputs, advantages_Q)
        return token_result(inputs, advantages_Q, {"value_mean": trained_mean(inputs, values_Q)}, returns_Q)


@dataclass(frozen=True)
class ReinforcePlusPlus(AdvantageFn):
    """Discounted reward to go, whitened over the batch's trained tokens. REINFORCE++, arXiv:2501.03262."""

    gamma: float = 1.0
    """Discount per trained token."""

    advantage_name = "reinforceplusplus"
    needs = ("loss_mask_Q",)
    uses_groups = False
    token_level = True
    takes_parts = True

    def __post_init__(self) -> None:
        require(0.0 <= self.gamma <= 1.0, f"gamma must be within [0, 1], got {self.gamma}")

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        """Returns [Q], before and after whitening, are 0 at untrained tokens."""
        returns_Q = discounted_sums(inputs, inputs.token_rewards(), self.gamma)
        # Normalization over the whole batch replaces a baseline per task.
        return token_result(inputs, whiten(inputs, returns_Q), returns_Q=returns_Q)


class ReinforcePlusPlusAlgorithm(AlgorithmType):
    """PPO's loss with rewards to go, normalized over the batch."""

    algorithm_type = "reinforceplusplus"
    advantage_fn = "reinforceplusplus"


@dataclass(frozen=True)
class Remax(AdvantageFn):
    """Reward to go minus the reward of the greedy rollout of the task. ReMax, arXiv:2310.10505."""

    advantage_name = "remax"
    needs = ("loss_mask_Q", "baseline_rewards_N")
    uses_groups = False
    token_level = True
    takes_parts = True

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        """Advantages; the greedy rollouts that give the baseline [N] are not trained."""
        assert inputs.baseline_rewards_N is not None
        returns_Q = discounted_sums(inputs, inputs.token_rewards(), 1.0)
        # The baseline does not depend on the sampled tokens, so the gradient is unbiased.
        return token_result(inputs, returns_Q - inputs.baseline_rewards_N[inputs.row_Q], returns_Q=returns_Q)


class RemaxAlgorithm(AlgorithmType):
    """PPO's loss with one rollout per task and a greedy rollout as its baseline."""

    algorithm_type = "remax"
    repeat_times = 1
    advantage_fn = "remax"


@dataclass(frozen=True)
class OnPolicyDistill(AdvantageFn):
    """c (log p_teacher - log p_sampler): reverse KL to a teacher, on the sampled tokens. Thinking Machines, "On-Policy
    Distillation", 2025.

    With Q the policy and P the teacher at one position, grad KL(Q || P) = sum_v grad Q_v (log Q_v - log P_v), because
    sum_v Q_v grad log Q_v = grad 1 = 0; that is E_{v ~ Q}[(log Q_v - log P_v) grad log Q_v]. A policy gradient ascends
    A grad log Q_v, so descending the KL requires A = log P_v - log Q_v, positive where the teacher gives more
    probability. Effects on later tokens are ignored. For the exact KL over the vocabulary use `jsd` with beta 1.
    """

    kl_coef: float = 1.0

    advantage_name = "on_policy_distill"
    needs = ("loss_mask_Q", "rollout_logprobs_Q", "teacher_logprobs_Q")
    uses_groups = False
    token_level = True
    takes_parts = True

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        """Advantages without rewards. Metric teacher_kl: mean of log p_sampler - log p_teacher, in nats per token."""
        student_Q, teacher_Q = student_and_teacher(inputs)
        gap_Q = teacher_Q - student_Q
        return token_result(inputs, self.kl_coef * gap_Q, {"teacher_kl": trained_mean(inputs, -gap_Q)})


class OnPolicyDistillAlgorithm(AlgorithmType):
    """PPO's loss with teacher logprobs as the only reward."""

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
    needs = ("loss_mask_Q", "rollout_logprobs_Q", "entropy_Q")
    token_level = True
    takes_parts = True

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        """Advantages. Metric token_filter_frac: share of trained tokens that are dropped."""
        grpo, mask_Q = Grpo(epsilon=self.epsilon)(inputs), inputs.used_mask_Q
        centered_Q, sigma = centered_and_sigma(inputs, entropy_signal(inputs, inputs.rollout_logprobs_Q))
        # With sigma 0 all tokens are equal, so none is dropped.
        low_Q = (centered_Q < -self.mu * sigma) if sigma >= 1e-12 else torch.zeros_like(mask_Q)
        return filtered(inputs, grpo, mask_Q & low_Q & (grpo.advantages_N < 0)[inputs.row_Q])


@dataclass(frozen=True)
class ClipV(AdvantageFn):
    """GRPO without the negative tokens whose d = E_v[p_v (H + log p_v)] - p (H + log p) is above mu sigma, at most
    max_frac of all tokens. Clip_V, arXiv:2602.03392; as in Trinity-RFT.

    p, H and the expectation over the vocabulary are those of the weights before the step. d estimates how much more
    this token raises the entropy than a token drawn from the policy; sigma is the population's over all trained
    tokens.
    """

    epsilon: float = 1e-6
    mu: float = 8.5
    max_frac: float = 1e-4
    """Maximum share of trained tokens to drop (but at least one token), largest d first."""

    advantage_name = "clipv"
    needs = ("loss_mask_Q", "policy_logprobs_Q", "entropy_Q", "necs_Q")
    token_level = True
    takes_parts = True

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        """Like ClipB, with necs_Q as the expectation over the vocabulary."""
        assert inputs.necs_Q is not None
        grpo, mask_Q = Grpo(epsilon=self.epsilon)(inputs), inputs.used_mask_Q
        signal_Q = entropy_signal(inputs, inputs.policy_logprobs_Q)
        excess_Q = torch.where(mask_Q, inputs.necs_Q - signal_Q, 0.0)
        _, sigma = centered_and_sigma(inputs, excess_Q)
        # Not centered, since d is 0 for a token of average effect.
        high_Q = (excess_Q > self.mu * sigma) if sigma >= 1e-12 else torch.zeros_like(mask_Q)
        dropped_Q = mask_Q & high_Q & (grpo.advantages_N < 0)[inputs.row_Q]
        num_dropped, num_trained = inputs.total(torch.stack([dropped_Q.sum(), mask_Q.sum()])).tolist()
        # At least one, since small batches would never filter. The share is of all tokens of the batch, not per row.
        most = max(int(self.max_frac * num_trained), 1)
        if num_dropped > most:
            dropped_Q = largest(inputs, excess_Q.masked_fill(~dropped_Q, -torch.inf), most)
        return filtered(inputs, grpo, dropped_Q)


def largest(inputs: AdvantageInputs, values_Q: Tensor, most: int) -> Tensor:
    """[Q] bool, True for the `most` largest values of the batch; ties go to the first."""
    own_M = torch.argsort(values_Q, descending=True, stable=True)[:most]
    # Candidates of each process: values and rows, padded to the same number with values that are never selected.
    offer_2M = torch.stack([torch.full((most,), -torch.inf), torch.zeros(most)]).double()
    offer_2M[0, : len(own_M)], offer_2M[1, : len(own_M)] = values_Q[own_M].double(), inputs.row_Q[own_M].double()
    values_M, rows_M = torch.cat(list(inputs.gather(offer_2M)), 1)
    order_M = torch.argsort(rows_M, stable=True)
    taken_M = order_M[torch.argsort(values_M[order_M], descending=True, stable=True)][:most]
    # All tokens of a row are in one process and in order, so the first ones are selected.
    assert inputs.tokens_N is not None
    num_own = int((inputs.tokens_N[rows_M[taken_M].long()] > 0).sum())
    return torch.zeros_like(values_Q, dtype=torch.bool).index_fill(0, own_M[:num_own], True)


_CACHED = 2**17
"""Tokens per chunk, so that a chunk stays in the cache of a core."""


def discounted_sums(inputs: AdvantageInputs, values_Q: Tensor, gamma: float) -> Tensor:
    """[Q] float64 sums s_t = v_t + gamma * s of the next trained token of the row; 0 at untrained tokens.

    Computed in log2(longest row) vectorized rounds that double the length of partial sums; token by token, a response
    of 64,000 tokens would take more than a second.
    """
    # Only trained tokens, so that each is followed by the next trained token or one of another row.
    places_M = inputs.used_mask_Q.nonzero().squeeze(-1)
    lengths_N = torch.bincount(inputs.row_Q[places_M], minlength=len(inputs.rewards_N))
    # Number of later trained tokens in the row.
    behind_M = lengths_N.cumsum(0).repeat_interleave(lengths_N) - torch.arange(1, len(places_M) + 1)
    sums_M = values_Q[places_M].double()
    # Processed in chunks of about _CACHED tokens that end with a row.
    ends_N = lengths_N.cumsum(0)
    last_N = torch.ones_like(ends_N, dtype=torch.bool)
    last_N[:-1] = ends_N[1:] // _CACHED > ends_N[:-1] // _CACHED
    sizes = ends_N[last_N].diff(prepend=ends_N.new_zeros(1)).tolist()
    for sums_B, behind_B in zip(sums_M.split(sizes), behind_M.split(sizes), strict=True):
        length, factor, longest = 1, gamma, int(behind_B.max()) if len(behind_B) else 0
        while length <= longest:
            # Partial sum plus that of the following tokens of the same row.
            sums_B[:-length] += torch.where(behind_B[:-length] >= length, factor * sums_B[length:], 0.0)
            length, factor = 2 * length, factor * factor
    return torch.zeros_like(values_Q, dtype=torch.float64).index_copy_(0, places_M, sums_M)


def student_and_teacher(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """[Q] logprobs of sampler and teacher, 0 outside the used mask. Raises: ValueError: a used value is not finite."""
    both = []
    for name in ("rollout_logprobs_Q", "teacher_logprobs_Q"):
        value_Q = torch.where(inputs.used_mask_Q, getattr(inputs, name), 0.0)
        bad_M = (~torch.isfinite(value_Q)).nonzero()
        require(not len(bad_M), f"{name} is not finite at row {int(inputs.row_Q[bad_M[0]]) if len(bad_M) else 0}")
        both.append(value_Q)
    return both[0], both[1]


def entropy_signal(inputs: AdvantageInputs, given_Q: Tensor | None) -> Tensor:
    """[Q] p (H + log p) on the used mask, 0 elsewhere. given_Q: log p."""
    assert given_Q is not None and inputs.entropy_Q is not None
    mask_Q = inputs.used_mask_Q
    # Masked before the exp, since untrained tokens may hold anything and inf * 0 is nan.
    logprobs_Q = torch.where(mask_Q, given_Q, 0.0)
    return torch.where(mask_Q, logprobs_Q.exp() * (inputs.entropy_Q + logprobs_Q), 0.0)


def centered_and_sigma(inputs: AdvantageInputs, values_Q: Tensor) -> tuple[Tensor, float]:
    """Values minus their mean over the trained tokens, and their population standard deviation."""
    centered_Q, squares, count = centered(inputs, values_Q)
    return centered_Q, float((squares / count.clamp(min=1.0)).sqrt())


def filtered(inputs: AdvantageInputs, grpo: AdvantageResult, dropped_Q: Tensor) -> AdvantageResult:
    """Advantages of `grpo` for all tokens except the dropped ones."""
    share = trained_mean(inputs, dropped_Q)
    return token_result(inputs, grpo.advantages_N[inputs.row_Q], {"token_filter_frac": share}, keep_Q=~dropped_Q)
