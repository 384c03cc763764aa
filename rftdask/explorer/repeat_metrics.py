"""Repeats: what the rollouts of one task say together, averaged over the tasks of an evaluation. Pure.

Names and meanings as in Trinity-RFT: <metric>/mean@n and std@n of the n rollouts of a task, and best@k and worst@k of k
of them drawn with replacement, for k = 2, 4, 8, ... and n. It estimates the last two by 1,000 random draws; here they
are what those draws tend to, so that the same rollouts give the same number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence


def repeat_metrics(name: str, values_by_task: Sequence[Sequence[float]]) -> dict[str, float]:
    """Means over the tasks. Args: values_by_task: one value for each rollout of a task; as many for each task.

    Example: repeat_metrics("reward", [[0, 1], [1, 1]])  ->  reward/mean@2 0.75, reward/std@2 0.25, best@2 0.875, ...
    """
    num_rollouts = max(map(len, values_by_task), default=0)
    if not num_rollouts:
        return {}
    metrics = {
        f"{name}/mean@{num_rollouts}": _mean([_mean(values) for values in values_by_task]),
        f"{name}/std@{num_rollouts}": _mean([_std(values) for values in values_by_task]),
    }
    for k in _subset_sizes(num_rollouts):
        metrics[f"{name}/best@{k}"] = _mean([expected_best(values, k) for values in values_by_task])
        metrics[f"{name}/worst@{k}"] = -_mean(
            [expected_best([-value for value in values], k) for values in values_by_task]
        )
    return metrics


def expected_best(values: Sequence[float], k: int) -> float:
    """Expected largest of k values drawn with replacement: sum_i x_(i) * ((i / n)^k - ((i - 1) / n)^k), ascending."""
    count = len(values)
    shares = [(rank / count) ** k for rank in range(count + 1)]
    return sum(value * (shares[i + 1] - shares[i]) for i, value in enumerate(sorted(values)))


def _subset_sizes(num_rollouts: int) -> Iterator[int]:
    """2, 4, 8, ... below `num_rollouts`, and that."""
    k = 2
    while k < num_rollouts:
        yield k
        k *= 2
    if num_rollouts > 1:
        yield num_rollouts


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    """Of the values themselves, not of a population they would be drawn from."""
    mean = _mean(values)
    return math.sqrt(_mean([(value - mean) ** 2 for value in values]))
