"""The rules of how long rollouts are waited for: over-rollout and the time limit that follows the mean. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rftdask.config.schema.explorer import DynamicTimeoutConfig, OverRolloutConfig


def num_tasks_needed(over_rollout: OverRolloutConfig, num_tasks: int) -> int:
    """Tasks of a work unit that must be done before the time of the others begins to run.

    Meanings as in Trinity-RFT's `explorer.over_rollout`.
    """
    return math.ceil(num_tasks * (1 - over_rollout.ratio))


def attempt_timeout_s(
    dynamic: DynamicTimeoutConfig, max_timeout_s: float, times_s: Mapping[int, Sequence[float]], explore_step: int
) -> float:
    """Limit for an attempt of `explore_step`: `ratio` times the mean time of a task, once enough steps have one.

    Args: times_s: seconds of the tasks that ended well, by their explore step.
    """
    before = [times for step, times in times_s.items() if step < explore_step]
    times = [time_s for step_times in before for time_s in step_times]
    if not dynamic.enable or len(before) < dynamic.warmup_min_steps or not times:
        return max_timeout_s
    return min(max_timeout_s, dynamic.ratio * sum(times) / len(times))


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
