"""Selectors that learn from the rewards which tasks to take next. Pure numbers; no taskset in here.

Invariant: the tasks of a step are a function of (arguments, state, step), and the state one of the rates observed, in
their order; so a resumed run, which observes them again in the log, selects what the uninterrupted one would have.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from rftdask.algorithm.checks import require
from rftdask.algorithm.selectors import Selector

State = TypeVar("State")


class LearningSelector(Selector, ABC, Generic[State]):
    """Base of selectors that choose the tasks of each step by the pass rates of earlier ones; for one taskset.

    Usage: `state = selector.initial(features)`; each step `selector.select(state, step, batch_size)`, and, when pass
    rates are known, `state = selector.updated(state, indices, rates)`. N tasks, F features, K observed tasks.
    """

    learns = True

    @abstractmethod
    def initial(self, features_NF: Tensor) -> State:
        """State before any reward."""

    @abstractmethod
    def select(self, state: State, step: int, batch_size: int) -> Tensor:
        """[batch_size] int64 rows of explore step `step`, without repetition: a function of the arguments alone."""

    @abstractmethod
    def updated(self, state: State, indices_K: Tensor, rates_K: Tensor) -> State:
        """State after observing the pass rates [K], in [0, 1], of tasks [K]."""


@dataclass(frozen=True)
class DifficultyBased(LearningSelector["DifficultyState"]):
    """Choose tasks whose predicted pass rate is near the target. Each task has a Beta posterior of its pass rate:
    observed rates count as m rollouts, and unobserved tasks move by what the observed ones say about the policy,
    interpolated between two features (the pass rates of a weak and of a strong model). Source: BOTS, arXiv:2510.26374.
    """

    target_reward: float = 1.0
    """Wanted pass rate."""
    tau: float = 1.0
    """Temperature of the draw over -|target - rate|; 0: the nearest, no draw."""
    do_sample: bool = False
    """Draw each rate from its posterior (Thompson) instead of taking the mean."""
    m: int = 16
    """Rollouts per task that an observed rate stands for."""
    lamb: float = 0.2
    """Share of the old counts forgotten at each update."""
    rho: float = 0.2
    """Weight of the interpolated rates against the observed ones."""
    adaptive_rho: bool = False
    """Halve rho whenever the interpolation was off by 0.25 or more on the observed tasks."""
    cap_discount: float = 0.9
    """How slowly the estimate of the policy's strength moves."""
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
        """features_NF is [N, 2]. Raises: ValueError: there are not two features."""
        fits = features_NF.dim() == 2 and features_NF.shape[1] == 2
        require(fits, "difficulty_based needs exactly two features per task")
        # A uniform posterior for every task.
        ones_N = torch.ones(len(features_NF), dtype=torch.float64)
        return DifficultyState(features_NF.double(), ones_N, ones_N, self.rho, None)

    def select(self, state: "DifficultyState", step: int, batch_size: int) -> Tensor:
        """Seeded by `seed` and the step. Raises: ValueError: fewer tasks than wanted."""
        require(batch_size <= len(state.alpha_N), f"{batch_size} tasks wanted, {len(state.alpha_N)} there")
        # Of its own: the global one would depend on what else has drawn from it.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        rates_N = state.rates_N
        if self.do_sample:
            # A Beta draw as a ratio of two Gammas: torch.distributions takes no generator.
            a_N, b_N = (torch._standard_gamma(x, generator=generator) for x in (state.alpha_N, state.beta_N))
            rates_N = a_N / (a_N + b_N).clamp(min=1e-300)
        scores_N = -(self.target_reward - rates_N).abs()
        if self.tau == 0.0:
            return torch.argsort(scores_N, descending=True, stable=True)[:batch_size]
        # Not below what torch counts as possible: a small tau leaves nothing for tasks far from the target.
        odds_N = torch.softmax(scores_N / self.tau, 0).clamp(min=1e-300)
        return torch.multinomial(odds_N, batch_size, generator=generator)

    def updated(self, state: "DifficultyState", indices_K: Tensor, rates_K: Tensor) -> "DifficultyState":
        """The state after a step; the one given is not changed. Raises: ValueError: rates outside [0, 1]."""
        require(len(indices_K) == len(rates_K), "indices and rates differ in length")
        if len(indices_K) == 0:
            return state
        require(bool(((rates_K >= 0) & (rates_K <= 1)).all()), "pass rates must be within [0, 1]")
        rates_K = rates_K.double()
        weak_N, strong_N = state.features_N2.unbind(1)
        weak, strong = weak_N[indices_K].mean(), strong_N[indices_K].mean()
        # Where the policy stands between the weak model (0) and the strong one (1), by the tasks just seen.
        seen = float((rates_K.mean() - weak) / (strong - weak + 1e-6))
        cap = seen if state.cap is None else self.cap_discount * state.cap + (1.0 - self.cap_discount) * seen
        guess_N = ((strong_N - weak_N) * cap + weak_N).clamp(0.0, 1.0)
        rho = state.rho
        if self.adaptive_rho and float((guess_N[indices_K] - rates_K).abs().mean()) >= 0.25:
            rho = rho * 0.5
        # For observed tasks the guess is what was observed, so both terms below say the same of them.
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
    """What `DifficultyBased` has learned."""

    features_N2: Tensor
    """[N, 2] float64, pass rates of a weak and a strong model."""
    alpha_N: Tensor
    """[N] float64, posterior passes + 1."""
    beta_N: Tensor
    """[N] float64, posterior failures + 1."""
    rho: float
    cap: float | None
    """Strength of the policy between the two models; None: nothing observed."""

    @property
    def rates_N(self) -> Tensor:
        """[N] posterior mean of the pass rates."""
        return self.alpha_N / (self.alpha_N + self.beta_N)
