"""Promises of what several rollouts of a task say together: best@k and worst@k are the means over all draws of k."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftdask.explorer.repeat_metrics import expected_best, repeat_metrics


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=5), st.integers(1, 4))
def test_the_best_of_k_is_the_mean_over_all_draws_with_replacement(values: list[float], k: int) -> None:
    draws = list(product(values, repeat=k))
    assert expected_best(values, k) == pytest.approx(sum(map(max, draws)) / len(draws), abs=1e-9)
    worst = repeat_metrics("r", [values])
    for size in (size for size in range(2, len(values) + 1) if f"r/worst@{size}" in worst):
        draws = list(product(values, repeat=size))
        assert worst[f"r/worst@{size}"] == pytest.approx(sum(map(min, draws)) / len(draws), abs=1e-9)


def test_they_are_means_over_tasks_for_powers_of_two_and_all() -> None:
    two = repeat_metrics("reward", [[0.0, 1.0], [1.0, 1.0]])
    assert two == {"reward/mean@2": 0.75, "reward/std@2": 0.25, "reward/best@2": 0.875, "reward/worst@2": 0.625}
    names = repeat_metrics("a", [[0.0] * 6])
    assert [name for name in names if "best" in name] == ["a/best@2", "a/best@4", "a/best@6"]
    assert repeat_metrics("a", [[0.5]]) == {"a/mean@1": 0.5, "a/std@1": 0.0} and repeat_metrics("a", []) == {}
