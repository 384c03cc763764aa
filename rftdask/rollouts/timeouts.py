"""The rules of how long rollouts are waited for: over-rollout and the time limit that follows the mean. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OverRollout:
    """Do not wait for the slowest tasks of a work unit. Meanings as in Trinity-RFT's `explorer.over_rollout`."""

    ratio: float = 0.0
    """Share of the tasks that may be missing; 0 waits for all."""
    wait_after_min: float = 30.0
    """Seconds that the others have once enough tasks are done."""
    return_partial_tasks: bool = False
    """Keep the finished rollouts of a task whose others were called off."""

    def num_needed(self, num_tasks: int) -> int:
        """Tasks that must be done before the others' time begins to run."""
        return math.ceil(num_tasks * (1 - self.ratio))


@dataclass(frozen=True)
class DynamicTimeout:
    """A limit for an attempt of `ratio` times the mean time of a task, after `warmup_min_steps` explore steps."""

    enable: bool = False
    warmup_min_steps: int = 1
    ratio: float = 3.0

    def timeout_s(self, max_timeout_s: float, times_s: Mapping[int, Sequence[float]], explore_step: int) -> float:
        """The limit for an attempt of `explore_step`.

        Args: times_s: times of the tasks that ended well, by their explore step.
        """
        before = [times for step, times in times_s.items() if step < explore_step]
        times = [time_s for step_times in before for time_s in step_times]
        if not self.enable or len(before) < self.warmup_min_steps or not times:
            return max_timeout_s
        return min(max_timeout_s, self.ratio * sum(times) / len(times))


def pass_at_k(num_rollouts: int, num_passed: int, k: int) -> float:
    """Probability that at least one of k rollouts, drawn without replacement, passed: 1 - C(n - c, k) / C(n, k).

    Raises: ValueError: k > num_rollouts. Source: Chen et al. 2021, arXiv:2107.03374, equation 1.
    """
    if not 0 < k <= num_rollouts:
        raise ValueError(f"pass@{k} of {num_rollouts} rollouts: 0 < k <= rollouts must hold")
    return 1.0 - math.comb(num_rollouts - num_passed, k) / math.comb(num_rollouts, k)


def pass_rates(rewards_by_group: Mapping[str, Sequence[float]], threshold: float = 1.0) -> dict[str, float]:
    """Mean pass@k over the groups with at least k rollouts, for k = 1, 2, 4, ...; passed: a reward >= threshold."""
    largest = max((len(rewards) for rewards in rewards_by_group.values()), default=0)
    rates = {}
    k = 1
    while k <= largest:
        values = [
            pass_at_k(len(rewards), sum(reward >= threshold for reward in rewards), k)
            for rewards in rewards_by_group.values()
            if len(rewards) >= k
        ]
        rates[f"pass@{k}"] = sum(values) / len(values)
        k *= 2
    return rates
