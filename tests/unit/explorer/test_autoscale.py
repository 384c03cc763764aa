"""Promises of the rule for the number of explorer workers: it follows the work and stays within its limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftdask.explorer.autoscale import OPEN_REQUESTS, ScaleRule

LIMITS = st.tuples(st.integers(1, 40), st.integers(0, 40)).map(lambda pair: (pair[0], pair[0] + pair[1]))
STEPS = st.lists(st.tuples(st.floats(0.001, 50), st.integers(0, 60), st.integers(0, 100)), max_size=30)


def follow(rule: ScaleRule, steps: list[tuple[float, int, int]]) -> list[ScaleRule]:
    """Rules after each of (seconds passed, connected workers, backlog)."""
    rules, at_s = [], 0.0
    for passed_s, num_workers, backlog in steps:
        at_s += passed_s
        rule = rule.after(at_s, num_workers, backlog)
        rules.append(rule)
    return rules


@given(LIMITS, STEPS)
def test_the_target_is_always_between_the_limits(limits: tuple[int, int], steps: list[tuple[float, int, int]]) -> None:
    rule = ScaleRule(*limits)
    for later in (rule, *follow(rule, steps)):
        assert limits[0] <= later.target <= limits[1]


def test_a_run_begins_with_min_workers() -> None:
    assert ScaleRule(2, 9).target == 2


@given(LIMITS, STEPS)
def test_the_target_shrinks_only_after_idle_time(limits: tuple[int, int], steps: list[tuple[float, int, int]]) -> None:
    rule = ScaleRule(*limits, idle_s=60.0)
    now, history = 0.0, []
    for (passed_s, _, backlog), after in zip(steps, follow(rule, steps), strict=True):
        now += passed_s
        if after.target < rule.target:
            assert now - rule.since_s >= 60.0
            missed = [was for at_s, was in history if at_s > rule.since_s] + [backlog]
            assert after.target == max(limits[0], *missed)
        history.append((now, backlog))
        rule = after


@given(LIMITS, STEPS, st.integers(0, 100))
def test_the_target_converges(limits: tuple[int, int], steps: list[tuple[float, int, int]], backlog: int) -> None:
    rule = ([ScaleRule(*limits), *follow(ScaleRule(*limits), steps)])[-1]
    targets, at_s = [], rule.since_s + 10_000.0
    for _ in range(8):
        rule = rule.after(at_s, rule.target, backlog)  # all requested workers join
        targets.append(rule.target)
        at_s += rule.idle_s + 1
    assert set(targets[-2:]) == {max(limits[0], min(backlog, limits[1]))}


def test_lockstep_releases_no_worker() -> None:
    """The backlog is 0 while the trainer trains, then as large as the number of workers."""
    rules = follow(ScaleRule(1, 4, idle_s=60.0), [(20.0, 4, backlog) for backlog in (4, 0, 4, 0, 4, 0, 4, 0)])
    assert {rule.target for rule in rules} == {4}


@given(st.integers(0, 500), st.integers(1, 20))
def test_open_requests_are_bounded(num_workers: int, looks: int) -> None:
    rules = follow(ScaleRule(1, 1000), [(1.0, num_workers, 1000)] * looks)
    assert rules[-1].target == min(1000, max(1, num_workers + max(OPEN_REQUESTS, num_workers)))


@given(LIMITS, st.integers(0, 60), st.integers(0, 100), st.integers(0, 100))
def test_more_work_never_means_fewer_workers(limits: tuple[int, int], num_workers: int, one: int, more: int) -> None:
    rule = ScaleRule(*limits)
    few, many = (rule.after(1.0, num_workers, backlog) for backlog in sorted((one, one + more)))
    assert few.target <= many.target


def test_invalid_limits_are_refused() -> None:
    for limits in ((0, 3), (4, 3)):
        with pytest.raises(ValueError, match="0 < min <= max"):
            ScaleRule(*limits)
