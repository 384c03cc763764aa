"""Promises of the rules of waiting: over-rollout counts tasks; the dynamic timeout never exceeds the configured one."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftdask.config.schema.explorer import DynamicTimeoutConfig, OverRolloutConfig
from rftdask.rollouts.runner import num_tasks_needed
from rftdask.rollouts.work_units import pass_at_k, pass_rates
from rftdask.rollouts.worker_state import attempt_timeout_s


@pytest.mark.parametrize(("ratio", "needed"), [(0.0, 10), (0.05, 10), (0.1, 9), (0.25, 8), (0.99, 1)])
def test_over_rollout_needs_the_other_tasks_rounded_up(ratio: float, needed: int) -> None:
    assert num_tasks_needed(OverRolloutConfig(ratio=ratio), 10) == needed


def test_a_dynamic_timeout_follows_the_mean_after_its_warm_up() -> None:
    rule = DynamicTimeoutConfig(enable=True, warmup_min_steps=2, ratio=2.5)
    times = {1: [1.0], 2: [3.0]}
    assert attempt_timeout_s(rule, 100.0, {1: [1.0]}, explore_step=2) == 100.0
    assert attempt_timeout_s(rule, 100.0, times, explore_step=3) == 5.0
    assert attempt_timeout_s(rule, 4.0, times, explore_step=3) == 4.0
    assert attempt_timeout_s(rule, 100.0, {**times, 3: [90.0]}, explore_step=3) == 5.0, "its own step does not count"
    assert attempt_timeout_s(DynamicTimeoutConfig(), 100.0, times, explore_step=3) == 100.0


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_pass(passed: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(passed)))
    draws = list(combinations(passed, k))
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_rates_are_means_over_tasks_with_enough_rollouts() -> None:
    rates = pass_rates({"a": [1.0, 0.0, 0.0, 0.0], "b": [1.0, 1.0], "c": [0.5]})
    assert rates == {"pass@1": (0.25 + 1 + 0) / 3, "pass@2": (0.5 + 1) / 2, "pass@4": 1.0}
    assert pass_rates({}) == {}
    with pytest.raises(ValueError, match="pass@3 of 2"):
        pass_at_k(2, 1, 3)
