"""Selectors that learn from rewards which tasks to select next. Pure functions of numbers.

Invariant: the tasks of a step are a function of (arguments, state, step), and the state is a function of the observed
pass rates in order. A resumed run reads them again from the log and selects the same tasks.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from rftdask.algorithm.checks import require
from rftdask.algorithm.selectors import Selector
from rftdask.data.seeds import derived_seed

State = TypeVar("State")


class LearningSelector(Selector, ABC, Generic[State]):
    """Base of selectors that choose tasks by the pass rates of earlier steps, for one taskset.

    Usage: `state = selector.initial(features)`; in each step `selector.select(state, step, batch_size)` and, once pass
    rates are known, `state = selector.updated(state, indices, rates)`. N tasks, F features, K observed tasks.
    """

    learns = True

    @abstractmethod
    def initial(self, features_NF: Tensor) -> State:
        """State before any reward."""

    @abstractmethod
    def select(self, state: State, step: int, batch_size: int) -> Tensor:
        """[batch_size] int64 rows of explore step `step`, without repetition. Depends only on the arguments."""

    @abstractmethod
    def updated(self, state: State, indices_K: Tensor, rates_K: Tensor) -> State:
        """State after observing the pass rates [K], in [0, 1], of tasks [K]."""


@dataclass(frozen=True)
class DifficultyBased(LearningSelector["DifficultyState"]):
    """Choose tasks whose predicted pass rate is near the target. Each task has a Beta posterior of its pass rate.
    An observed rate counts as m rollouts. Unobserved tasks follow the policy's strength, estimated from the observed
    tasks by interpolation between two features: pass rates of a weak and a strong model. Source: BOTS,
    arXiv:2510.26374.
    """

    target_reward: float = 1.0
    """Target pass rate."""
    tau: float = 1.0
    """Temperature of the draw over -|target - rate|. 0: take the nearest tasks without a draw."""
    do_sample: bool = False
    """Draw each rate from its posterior (Thompson) instead of taking the mean."""
    m: int = 16
    """Number of rollouts that an observed rate counts as."""
    lamb: float = 0.2
    """Share of the old counts to forget at each update."""
    rho: float = 0.2
    """Weight of the interpolated rates relative to the observed ones."""
    adaptive_rho: bool = False
    """Halve rho whenever the interpolation was off by 0.25 or more on the observed tasks."""
    cap_discount: float = 0.9
    """Decay of the running estimate of the policy's strength."""
    seed: int = 42

    selector_name = "difficulty_based"
    features = "weak and strong pass rates"
    num_features = 2

    def __post_init__(self) -> None:
        require(self.tau >= 0.0, f"tau must be >= 0, got {self.tau}")
        require(self.m > 0, f"m must be > 0, got {self.m}")
        for name in ("lamb", "rho", "cap_discount"):
            require(0.0 <= getattr(self, name) <= 1.0, f"{name} must be within [0, 1], got {getattr(self, name)}")

    def initial(self, features_NF: Tensor) -> "DifficultyState":
        """Uniform posteriors. features_NF: [N, 2]. Raises: ValueError: not exactly two features."""
        fits = features_NF.dim() == 2 and features_NF.shape[1] == 2
        require(fits, "difficulty_based needs exactly two features per task")
        ones_N = torch.ones(len(features_NF), dtype=torch.float64)
        return DifficultyState(features_NF.double(), ones_N, ones_N, self.rho, None)

    def select(self, state: "DifficultyState", step: int, batch_size: int) -> Tensor:
        """Draw with `seed` and the step. Raises: ValueError: batch_size exceeds the number of tasks."""
        num_tasks = len(state.alpha_N)
        require(batch_size <= num_tasks, f"batch_size {batch_size} exceeds the {num_tasks} tasks in the taskset")
        # Not the global generator, whose state depends on other draws.
        generator = torch.Generator().manual_seed(derived_seed(self.seed, "difficulty_based", step))
        rates_N = state.rates_N
        if self.do_sample:
            # A Beta draw as a ratio of two Gamma draws, since torch.distributions does not accept a generator.
            a_N, b_N = (torch._standard_gamma(x, generator=generator) for x in (state.alpha_N, state.beta_N))
            rates_N = a_N / (a_N + b_N).clamp(min=1e-300)
        scores_N = -(self.target_reward - rates_N).abs()
        if self.tau == 0.0:
            return torch.argsort(scores_N, descending=True, stable=True)[:batch_size]
        # A lower bound, since with a small tau the odds of distant tasks underflow.
        odds_N = torch.softmax(scores_N / self.tau, 0).clamp(min=1e-300)
        return torch.multinomial(odds_N, batch_size, generator=generator)

    def updated(self, state: "DifficultyState", indices_K: Tensor, rates_K: Tensor) -> "DifficultyState":
        """New state after a step. Raises: ValueError: rates outside [0, 1]."""
        require(len(indices_K) == len(rates_K), "indices and rates differ in length")
        if len(indices_K) == 0:
            return state
        require(bool(((rates_K >= 0) & (rates_K <= 1)).all()), "pass rates must be within [0, 1]")
        rates_K = rates_K.double()
        weak_N, strong_N = state.features_N2.unbind(1)
        weak, strong = weak_N[indices_K].mean(), strong_N[indices_K].mean()
        # Strength of the policy between the weak model (0) and the strong one (1), by the observed tasks.
        strength = float((rates_K.mean() - weak) / (strong - weak + 1e-6))
        cap = strength if state.cap is None else self.cap_discount * state.cap + (1.0 - self.cap_discount) * strength
        guess_N = ((strong_N - weak_N) * cap + weak_N).clamp(0.0, 1.0)
        rho = state.rho
        if self.adaptive_rho and float((guess_N[indices_K] - rates_K).abs().mean()) >= 0.25:
            rho = rho * 0.5
        # Observed tasks use the observed rate in both terms below.
        guess_N = guess_N.index_copy(0, indices_K, rates_K)
        passed_N, failed_N = torch.zeros_like(guess_N), torch.zeros_like(guess_N)
        passed_N[indices_K], failed_N[indices_K] = rates_K * self.m, (1.0 - rates_K) * self.m
        # Forgetting pulls both counts toward 1, the uniform prior, not toward 0.
        decayed = (1.0 - self.lamb, self.lamb)
        alpha_N = decayed[0] * state.alpha_N + decayed[1] + (1 - rho) * passed_N + rho * guess_N * self.m
        beta_N = decayed[0] * state.beta_N + decayed[1] + (1 - rho) * failed_N + rho * (1 - guess_N) * self.m
        return DifficultyState(state.features_N2, alpha_N, beta_N, rho, cap)


@dataclass(frozen=True)
class DifficultyState:
    """State of `DifficultyBased`."""

    features_N2: Tensor
    """[N, 2] float64, pass rates of a weak and a strong model."""
    alpha_N: Tensor
    """[N] float64, posterior passes + 1."""
    beta_N: Tensor
    """[N] float64, posterior failures + 1."""
    rho: float
    cap: float | None
    """Strength of the policy between the two models. None: no observation."""

    @property
    def rates_N(self) -> Tensor:
        """[N] posterior mean of the pass rates."""
        return self.alpha_N / (self.alpha_N + self.beta_N)
