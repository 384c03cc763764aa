"""Promises of the operators: a dropped row has a reason and a counter."""

import math
from functools import partial
from typing import Any

import pytest
import torch

from rftdask.algorithm.compose import make_part
from rftdask.algorithm.drop_reasons import DropReason
from rftdask.algorithm.operators import ExperienceTable, pass_rates
from rftdask.errors import UserError
from tests.unit.algorithm.algorithm_cases import OPERATORS

make_operator = partial(make_part, "operator")


def table(rewards: list[float], groups: list[int] | None = None, **more: Any) -> ExperienceTable:
    return ExperienceTable(torch.tensor(rewards), torch.tensor(groups or [0] * len(rewards)), **more)


def kept(result: tuple[ExperienceTable, dict[str, float]]) -> list[bool]:
    return result[0].keep_N.tolist()


@pytest.mark.parametrize(
    ("name", "args", "rewards", "groups", "expected", "dropped"),
    [
        ("reward_filter", {"threshold": 0.5}, [0.4, 0.5, 1.0], None, [0, 1, 1], {"dropped/reward_range": 1.0}),
        ("invalid_reward_filter", {}, [math.nan, math.inf, 0.0], None, [0, 0, 1], {"dropped/invalid_rollout": 2.0}),
        # Groups with equal rewards and single rollouts.
        ("reward_std_filter", {}, [1, 1, 0, 1, 7], [0, 0, 1, 1, 2], [0, 0, 1, 1, 0], {"dropped/low_std": 3.0}),
    ],
)
def test_filters_drop_rows(
    name: str, args: Any, rewards: list[float], groups: list[int] | None, expected: list[int], dropped: dict[str, float]
) -> None:
    result = make_operator(name, args)(table(rewards, groups))
    assert kept(result) == [bool(number) for number in expected]
    assert {key: value for key, value in result[1].items() if key in dropped} == dropped


def test_dynamic_sampling_keeps_partly_solved_tasks() -> None:
    accuracy = torch.tensor([1.0, 1.0, 0.0, 0.0, math.nan, 0.0])
    rewards = [0.9, 0.1, 0.5, 0.5, 1.0, 0.3]
    result = make_operator("dapo_dynamic_sampling")(table(rewards, [0, 0, 1, 1, 2, 2], stats={"accuracy": accuracy}))
    assert kept(result) == [False, False, False, False, True, True]
    assert (result[1]["num_groups_all_correct"], result[1]["num_groups_all_wrong"]) == (1.0, 1.0)


def test_truncated_responses_are_masked_but_keep_their_reward() -> None:
    given = table([0, 1, 9], [0, 0, 0], truncated_N=torch.tensor([True, False, True]))
    given = given.dropping(torch.tensor([False, False, True]), DropReason.REWARD_RANGE)[0]
    result, metrics = make_operator("mask_response_truncated")(given)
    assert result.masked_N is not None and result.masked_N.tolist() == [True, False, False]
    assert metrics == {"num_masked": 1.0}
    # The task has one failed and one successful rollout.
    assert kept(make_operator("reward_std_filter")(result)) == [True, True, False]
    with pytest.raises(ValueError, match="needs truncated_N"):
        make_operator("mask_response_truncated")(table([1.0]))


@pytest.mark.parametrize(
    ("op", "expected"),
    [("ADD", [2.0, 1.0, 3.0]), ("SUB", [0.0, 1.0, 3.0]), ("MUL", [1.0, 0.0, 3.0]), ("DIV", [1.0, 1.0, 3.0])],
)
def test_reward_shaping(op: str, expected: list[float]) -> None:
    stats = {"quality": torch.tensor([0.5, 0.0, math.nan])}
    rules = {"reward_shaping_configs": [{"stats_key": "quality", "op_type": op, "weight": 2.0}]}
    shaped, _ = make_operator("reward_shaping_mapper", rules)(table([1, 1, 3], stats=stats))
    assert shaped.rewards_N.tolist() == expected


def test_pass_rates_are_the_means_of_the_kept_rollouts() -> None:
    groups, rates = pass_rates(table([1, 0, 1, math.nan], [0, 0, 2, 1]))
    assert (groups.tolist(), rates.tolist()) == ([0, 2], [0.5, 1.0])
    metrics = make_operator("pass_rate_calculator")(table([1, 0, 1], [0, 0, 1]))[1]
    assert (metrics["pass_rate_mean"], metrics["pass_rate_valid_frac"]) == (0.75, 0.5)


def test_a_rollout_counts_once_in_its_task() -> None:
    # Task 0: a solved rollout of three turns, the first of them dropped, and a failed one; task 1: a lone one of two.
    rows = table([1, 1, 1, 0, 1, 1], [0, 0, 0, 0, 1, 1], rollout_N=torch.tensor([0, 0, 0, 1, 2, 2]))
    rows, _ = rows.dropping(torch.tensor([True, False, False, False, False, False]), DropReason.REWARD_RANGE)
    assert rows.counted_N.tolist() == [False, True, False, True, True, False]
    assert pass_rates(rows)[1].tolist() == [0.5, 1.0]
    # Over rows the spread of task 0 would be 0.47, and task 1 would have two rollouts.
    for threshold in (0.48, -1.0):
        spread = make_operator("reward_std_filter", {"threshold": threshold})(rows)
        assert kept(spread) == [False, True, True, True, False, False]


def test_operators_run_in_order_over_kept_rows() -> None:
    rows = table([-5, 1, 1, 0, 1], [0, 0, 0, 1, 1])
    positive, metrics = make_operator("reward_filter", {"threshold": 0.0})(rows)
    result, more = make_operator("reward_std_filter")(positive)
    metrics |= more
    reasons = [DropReason.REWARD_RANGE, DropReason.LOW_STD, DropReason.LOW_STD, 0, 0]
    assert result.reasons_N.tolist() == reasons
    assert (metrics["dropped/reward_range"], metrics["dropped/low_std"]) == (1.0, 2.0)


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_no_operator_loses_a_row(name: str) -> None:
    given = table([1, math.nan, 0], [0, 0, 1], truncated_N=torch.tensor([False, True, False]))
    assert len(make_operator(name)(given)[0].rewards_N) == 3


def test_a_wrong_operator_or_rule_is_an_error() -> None:
    with pytest.raises(UserError, match="did you mean reward_filter"):
        make_operator("reward_fliter")
    with pytest.raises(UserError, match="op_type is 'POW'"):
        make_operator("reward_shaping_mapper", {"reward_shaping_configs": [{"stats_key": "x", "op_type": "POW"}]})
