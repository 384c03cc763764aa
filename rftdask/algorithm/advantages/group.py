"""Advantages that compare the rollouts of one task: one number per experience.

r is the reward; mu and sigma are mean and standard deviation over the valid rollouts of the task. Knows nothing of
tokens. Invariant: a task with one valid rollout has a finite advantage, which is 0 if the baseline is the task mean.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from rftdask.algorithm.advantages.base import (
    AdvantageFn,
    AdvantageInputs,
    AdvantageResult,
    base_drops,
    group_stats,
    group_sums,
    ranks_in_group,
    result,
)
from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import one_of, require
from rftdask.algorithm.drop_reasons import DropReason
from rftdask.data.seeds import derived_seed


@dataclass(frozen=True)
class Grpo(AdvantageFn):
    """(r - mu) / (sigma + epsilon). GRPO, arXiv:2402.03300, section 4.1. A lone rollout: 0, counted in
    singleton_groups.

    std "none": r - mu, Dr. GRPO, arXiv:2503.20783. std_cal_level "batch": mean of the task, sigma of all rewards of
    the batch, arXiv:2508.08221. rank_penalty: r (1 - p rank / n), with ranks by mean logprob within the task, the most
    likely last, arXiv:2506.02355.
    """

    epsilon: float = 1e-6
    std: str = "sample"
    """"sample" divides by n - 1, "population" by n, "none" does not divide by sigma."""
    std_threshold: float | None = None
    """Drop tasks with sigma at or below this, including single rollouts. None: drop none."""
    rank_penalty: float | None = None
    """p of the rank penalty; needs rollout_logprobs_Q and loss_mask_Q. None: no penalty."""
    std_cal_level: str = "group"
    """"group" or "batch"."""
    duplicate_experiences: bool = False
    """Not supported, since an experience is trained at most once."""

    advantage_name = "grpo"
    takes_parts = True
    deprecated_names: ClassVar[tuple[str, ...]] = ("grpo_verl",)

    def __post_init__(self) -> None:
        one_of("std", self.std, ("sample", "population", "none"))
        one_of("std_cal_level", self.std_cal_level, ("group", "batch"))
        require(self.epsilon >= 0.0, f"epsilon must be >= 0, got {self.epsilon}")
        require(
            not self.duplicate_experiences,
            "duplicate_experiences would train an experience twice; use dapo_dynamic_sampling instead",
        )

    @property
    def uses_tokens(self) -> bool:
        """True with a rank penalty, which uses logprobs."""
        return self.rank_penalty is not None

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        """Computed in float64, since small differences between rewards vanish in float32."""
        rewards_N = inputs.rewards_N.double()
        if self.rank_penalty is not None:
            rewards_N = rewards_N * (1.0 - self.rank_penalty * self._likelihood_rank(inputs))
        stats = group_stats(
            rewards_N, inputs.group_N, inputs.used_N, inputs.num_groups, sample=self.std != "population"
        )
        # mean_G[group_N]: [G] -> [N], the statistics of the task of each row.
        centered_N = rewards_N - stats.mean_G[inputs.group_N]
        advantages_N = centered_N
        if self.std != "none":
            divisor_N = stats.std_G[inputs.group_N]
            if self.std_cal_level == "batch":
                # The standard deviation of the batch is a more stable divisor than that of a few rewards.
                batch_N = torch.zeros_like(inputs.group_N)
                whole = group_stats(rewards_N, batch_N, inputs.used_N, 1, sample=self.std != "population")
                divisor_N = whole.std_G[batch_N]
            # Equal rewards have advantage 0, also if epsilon is 0.
            advantages_N = torch.where(divisor_N > 0.0, centered_N / (divisor_N + self.epsilon), 0.0)
        drops_N = base_drops(inputs)
        if self.std_threshold is not None:
            # The threshold applies to the task, also if the divisor is that of the batch.
            drops_N[inputs.used_N & (stats.std_G <= self.std_threshold)[inputs.group_N]] = DropReason.LOW_STD
        return result(inputs, advantages_N, stats.metrics(), drops_N)

    def without_filtering(self) -> AdvantageFn:
        """Copy without the threshold."""
        return replace(self, std_threshold=None)

    def _likelihood_rank(self, inputs: AdvantageInputs) -> Tensor:
        """[N] rank / n of the mean logprob within the task, in [0, 1), largest for the most likely rollout."""
        inputs.check(("rollout_logprobs_Q", "loss_mask_Q"))
        assert inputs.rollout_logprobs_Q is not None and inputs.loss_mask_Q is not None
        sums_N = inputs.row_sums(torch.where(inputs.loss_mask_Q, inputs.rollout_logprobs_Q, 0.0))
        # Unused rows rank last and do not affect the others.
        means_N = torch.where(inputs.used_N, sums_N / inputs.row_sums(inputs.loss_mask_Q).clamp(min=1), torch.inf)
        counts_G = group_sums(inputs.used_N, inputs.group_N, inputs.num_groups)
        return ranks_in_group(means_N, inputs.group_N) / counts_G[inputs.group_N].clamp(min=1.0)


@dataclass(frozen=True)
class Reinforce(AdvantageFn):
    """r without a baseline. REINFORCE, Williams 1992; used by TOPR, arXiv:2503.14286."""

    advantage_name = "reinforce"
    uses_groups = False

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        # The statistics are only for metrics.
        stats = group_stats(inputs.rewards_N, inputs.group_N, inputs.used_N, inputs.num_groups)
        return result(inputs, inputs.rewards_N, stats.metrics())


@dataclass(frozen=True)
class Rloo(AdvantageFn):
    """r minus the mean of the other rollouts of the task, n / (n - 1) (r - mu). RLOO, arXiv:2402.14740. A single
    rollout: 0."""

    advantage_name = "rloo"

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        """Advantages from the mean over all n rollouts, which determines the mean of the others."""
        stats = group_stats(inputs.rewards_N, inputs.group_N, inputs.used_N, inputs.num_groups)
        # count_N - 1 is 0 for a single rollout, whose centered reward is 0 as well.
        count_N = stats.count_G[inputs.group_N]
        centered_N = inputs.rewards_N - stats.mean_G[inputs.group_N]
        # Removing the rollout's reward from mu gives the factor n / (n - 1).
        return result(inputs, centered_N * count_N / (count_N - 1.0).clamp(min=1.0), stats.metrics())


class RlooAlgorithm(AlgorithmType):
    """PPO's loss with the leave-one-out baseline."""

    algorithm_type = "rloo"
    advantage_fn = "rloo"


@dataclass(frozen=True)
class OpmdAdvantage(AdvantageFn):
    """r - b, b = mu ("mean") or tau log mean exp(r / tau) ("logavgexp"). OPMD, arXiv:2505.17826; Kimi k1.5,
    arXiv:2501.12599."""

    opmd_baseline: str = "mean"
    tau: float = 1.0
    """Temperature of "logavgexp"."""

    advantage_name = "opmd"
    deprecated_names = ("opmd_verl",)

    def __post_init__(self) -> None:
        one_of("opmd_baseline", self.opmd_baseline, ("mean", "logavgexp"))
        require(self.tau > 0.0, f"tau must be > 0, got {self.tau}")

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        """ "logavgexp" goes to the mean for a large tau, and to the best reward of the task for a small one."""
        stats = group_stats(inputs.rewards_N, inputs.group_N, inputs.used_N, inputs.num_groups)
        baseline_G = stats.mean_G
        if self.opmd_baseline == "logavgexp":
            scaled_N = torch.where(inputs.used_N, inputs.rewards_N, -torch.inf).double() / self.tau
            # Minus the maximum of the task, so that no exp overflows; a task without rows has none.
            peak_G = torch.full_like(stats.count_G, -torch.inf).scatter_reduce(0, inputs.group_N, scaled_N, "amax")
            peak_G = peak_G.nan_to_num(neginf=0.0)
            sums_G = group_sums((scaled_N - peak_G[inputs.group_N]).exp(), inputs.group_N, inputs.num_groups)
            means_G = sums_G / stats.count_G.clamp(min=1.0)
            # tau log mean exp(r / tau), with the maximum added back.
            baseline_G = self.tau * (peak_G + means_G.clamp(min=1e-300).log())
        return result(inputs, inputs.rewards_N - baseline_G[inputs.group_N], stats.metrics())


@dataclass(frozen=True)
class Asymre(AdvantageFn):
    """r - (mu + shift); shift < 0 emphasizes successes. AsymRE, arXiv:2506.20520. A single rollout: -shift."""

    baseline_shift: float = -0.1

    advantage_name = "asymre"
    deprecated_names = ("asymre_verl",)

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        stats = group_stats(inputs.rewards_N, inputs.group_N, inputs.used_N, inputs.num_groups)
        baseline_N = stats.mean_G[inputs.group_N] + self.baseline_shift
        return result(inputs, inputs.rewards_N - baseline_N, stats.metrics())


@dataclass(frozen=True)
class Drpo(AdvantageFn):
    """r - mu, with correct rollouts weighted by their brevity. After DRPO, arXiv:2510.04474.

    The weight of a correct rollout (r above `threshold`) is exp(-length / (lambda * max length)) divided by its mean
    over the correct rollouts of the task; the weight of the others is 1. A long correct response is not penalized, only
    preferred less. The paper applies these weights to DisCO's discriminative objective; here they multiply the Dr. GRPO
    advantage.
    """

    length_lambda: float = 0.5
    """Temperature of the preference for short responses, relative to the longest correct one. Large: no preference."""
    threshold: float = 0.0
    """A rollout is correct if its reward is above this."""

    advantage_name = "drpo"
    needs = ("lengths_N",)

    def __post_init__(self) -> None:
        require(self.length_lambda > 0.0, f"length_lambda must be > 0, got {self.length_lambda}")

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        """Advantages from lengths in trained tokens [N]. A task without a correct rollout gets r - mu."""
        assert inputs.lengths_N is not None
        group_N, num_groups = inputs.group_N, inputs.num_groups
        stats = group_stats(inputs.rewards_N, group_N, inputs.used_N, num_groups)
        correct_N = inputs.used_N & (inputs.rewards_N > self.threshold)
        lengths_N = torch.where(correct_N, inputs.lengths_N, 0).double()
        # Lengths are relative to the longest correct one, independent of the scale of the task.
        longest_G = torch.zeros_like(stats.mean_G).scatter_reduce(0, group_N, lengths_N, "amax")
        brevity_N = torch.exp(-lengths_N / (self.length_lambda * longest_G[group_N].clamp(min=1.0)))
        # Dividing by the mean shifts reward between correct rollouts without adding any.
        mean_G = group_stats(brevity_N, group_N, correct_N, num_groups).mean_G
        weight_N = torch.where(correct_N, brevity_N / mean_G[group_N].clamp(min=1e-12), 1.0)
        return result(inputs, weight_N * (inputs.rewards_N - stats.mean_G[group_N]), stats.metrics())


class DrpoAlgorithm(AlgorithmType):
    """PPO's loss with a preference for short correct responses; no KL."""

    algorithm_type = "drpo"
    advantage_fn = "drpo"
    kl_loss_fn = "none"


@dataclass(frozen=True)
class BestOfN(AdvantageFn):
    """1 for the best rollouts of each task with rewards not below a threshold; all others are dropped. RAFT,
    arXiv:2304.06767, section 3: the policy imitates the argmax of r over n samples of a prompt.

    Ties go to the earlier rollout, so that a task that is always solved has no more weight than one solved once.
    """

    best: int | None = 1
    """Number of rollouts per task to train. None: all at or above the threshold."""
    threshold: float | None = None
    """Drop rollouts with a reward below this, also the best one. None: drop none."""

    advantage_name = "best_of_n"
    only_selects = True

    def __post_init__(self) -> None:
        require(self.best is None or self.best > 0, f"best must be > 0 or None, got {self.best}")
        chosen = self.best is not None or self.threshold is not None
        require(chosen, "best and threshold are both None, so every rollout would be imitated; set one of them")

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        drops_N, rewards_N = base_drops(inputs), inputs.rewards_N.double()
        if self.threshold is not None:
            # Checked first, so that a best rollout below the threshold has this reason.
            drops_N[inputs.used_N & (rewards_N < self.threshold)] = DropReason.REWARD_RANGE
        if self.best is not None:
            # Rank 0 is the best; unused rows come last.
            keys_N = torch.where(inputs.used_N, -rewards_N, torch.inf)
            # Ties go by the position of the rollout, not of the row.
            order_N = torch.arange(len(keys_N)) if inputs.rollout_N is None else torch.argsort(inputs.rollout_N)
            ranks_N = torch.empty_like(order_N)
            ranks_N[order_N] = ranks_in_group(keys_N[order_N], inputs.group_N[order_N])
            worse_N = inputs.used_N & (ranks_N >= self.best) & (drops_N == DropReason.KEPT)
            drops_N[worse_N] = DropReason.NOT_BEST
        stats = group_stats(inputs.rewards_N, inputs.group_N, inputs.used_N, inputs.num_groups)
        return result(inputs, torch.ones_like(rewards_N), stats.metrics(), drops_N)

    def without_filtering(self) -> AdvantageFn:
        """Copy for selected rollouts."""
        # -inf drops nothing; None is rejected if `best` is None as well.
        return replace(self, best=None, threshold=-torch.inf)


@dataclass(frozen=True)
class RecAdvantage(AdvantageFn):
    """r - mu, or (r - mu) / (sigma_population + epsilon). REC, arXiv:2509.24203. A single rollout: 0.

    drop "balance": if more than half of the rollouts are below mu, drop the surplus at random (by seed and step); mu
    and sigma are those of the rest.
    """

    epsilon: float = 1e-6
    std_normalize: bool = False
    drop: str | None = None
    """"balance" or None."""
    seed: int = 0

    advantage_name = "rec"

    def __post_init__(self) -> None:
        if self.drop is not None:
            one_of("drop", self.drop, ("balance",))

    def compute(self, inputs: AdvantageInputs) -> AdvantageResult:
        drops_N = base_drops(inputs)
        used_N = inputs.used_N
        if self.drop == "balance":
            surplus_N = self._surplus_negatives(inputs)
            drops_N[surplus_N] = DropReason.SURPLUS_NEGATIVE
            used_N = used_N & ~surplus_N
        stats = group_stats(inputs.rewards_N, inputs.group_N, used_N, inputs.num_groups, sample=False)
        advantages_N = inputs.rewards_N - stats.mean_G[inputs.group_N]
        if self.std_normalize:
            advantages_N = advantages_N / (stats.std_G[inputs.group_N] + self.epsilon)
        return result(inputs, advantages_N, stats.metrics(), drops_N)

    def without_filtering(self) -> AdvantageFn:
        """Copy that keeps every rollout."""
        return replace(self, drop=None)

    def _surplus_negatives(self, inputs: AdvantageInputs) -> Tensor:
        """[N] bool, True for the randomly drawn surplus of rows below mu over the other rows of the task."""
        groups = (inputs.group_N, inputs.num_groups)
        stats = group_stats(inputs.rewards_N, inputs.group_N, inputs.used_N, inputs.num_groups)
        negative_N = inputs.used_N & (inputs.rewards_N < stats.mean_G[inputs.group_N])
        num_negative_G = group_sums(negative_N, *groups)
        surplus_G = 2.0 * num_negative_G - stats.count_G  # rows below mu minus the n - num_negative other rows
        # On the CPU in float64, so that every machine drops the same rows.
        generator = torch.Generator().manual_seed(derived_seed(self.seed, "rec", inputs.step))
        draw_N = torch.rand(len(negative_N), generator=generator, dtype=torch.float64).to(negative_N.device)
        # Draws are below 1, so other rows rank last and are never part of the surplus.
        ranks_N = ranks_in_group(torch.where(negative_N, draw_N, 2.0), inputs.group_N)
        return negative_N & (ranks_N < surplus_G[inputs.group_N])
