"""Promises of the metrics of an explore step: a rollout counts once, however many turns it took."""

import math
from dataclasses import replace
from typing import Any

import pytest

from rftdask.buffer.log.schema import Experience, Status
from rftdask.rollouts.rollout import RolloutTimes
from rftdask.rollouts.runner import UnitOutcome
from rftdask.rollouts.work_units import RolloutResult, RolloutTask, Sums, rollout_status, step_metrics, summarize_unit
from tests.unit.rollouts.rollout_cases import work_unit


def turn(task: int, rollout: int, number: int, reward: float | None, num_tokens: int, **fields: Any) -> Experience:
    """A row with two prompt tokens and `num_tokens` response tokens."""
    metrics = {} if reward is None else {"accuracy": reward, "num_response_tokens": float(num_tokens)}
    return Experience(
        taskset="t",
        epoch=0,
        task_index=task,
        rollout=rollout,
        explore_step=1,
        turn=number,
        reward=reward,
        tokens=[0] * (2 + num_tokens) if num_tokens else (),
        prompt_length=2 if num_tokens else 0,
        rollout_logprobs=[-1.0] * num_tokens,
        **{"metrics": metrics, **fields},
    )


def metrics_of(unit: RolloutTask, turns: list[Experience], times: list[RolloutTimes] | None = None) -> dict[str, float]:
    return step_metrics([summarize_unit(unit, UnitOutcome(turns, times or [], [], 0.0))], 1.0)


def test_a_rollout_of_several_turns_counts_once() -> None:
    # By hand: rollouts of 3 turns (reward 1), 1 turn (reward 0), 2 turns (reward 1, cut off), and one that failed.
    turns = [
        *(turn(0, 0, number, 1.0, 4) for number in range(3)),
        turn(0, 1, 0, 0.0, 6),
        turn(1, 0, 0, 1.0, 8),
        turn(1, 0, 1, 1.0, 2, status=Status.TRUNCATED),
        turn(1, 1, 0, None, 0, status=Status.FAILED),
    ]
    metrics = metrics_of(work_unit(0, 1), turns)
    assert metrics["num_rollouts"] == 4
    assert metrics["reward"] == metrics["accuracy"] == pytest.approx(2 / 3), "not 5/6, the mean over turns"
    assert metrics["response_length"] == pytest.approx((12 + 6 + 10) / 3)
    assert metrics["num_response_tokens"] == pytest.approx((4 + 4 + 4 + 6 + 8 + 2) / 6), "per row"
    assert metrics["truncated"] == pytest.approx(1 / 3)
    assert metrics["failed"] == 1 / 4
    assert metrics["pass@1"] == pytest.approx((1 / 2 + 1) / 2)


def test_the_greedy_baseline_does_not_count_in_metrics() -> None:
    turns = [turn(task, rollout, 0, float(rollout == 2), 4) for task in (0, 1) for rollout in range(3)]
    times = [RolloutTimes(generate_s=100.0 if rollout == 2 else 1.0) for _ in (0, 1) for rollout in range(3)]
    metrics = metrics_of(work_unit(0, 1, greedy_baseline=True), turns, times)
    assert (metrics["num_rollouts"], metrics["reward"], metrics["rollout/generate_s"]) == (4, 0.0, 1.0)


def test_expected_answers_with_the_lowest_reward_are_counted() -> None:
    def answer(task: int, rollout: int, text: str, reward: float, **fields: Any) -> Experience:
        return turn(task, rollout, 0, reward, 4, response_text=text, truth=f"{task} km", **fields)

    answers = [
        answer(0, 0, "0 km\n", 0.0),
        answer(0, 1, "0 km", 0.5),
        answer(1, 0, "1 km", 0.0, status=Status.TRUNCATED),
        answer(1, 1, "1", 1.0),
    ]
    assert metrics_of(work_unit(0, 1), answers)["unpaid_truths"] == 1
    # No reward is lower than the others, or no row has an expected answer.
    assert "unpaid_truths" not in metrics_of(work_unit(0, 1), [replace(row, reward=0.0) for row in answers])
    assert "unpaid_truths" not in metrics_of(work_unit(0, 1), [replace(row, truth="") for row in answers])


def test_each_of_several_tasksets_has_its_own_mean_reward() -> None:
    turns = [turn(0, 0, 0, 1.0, 4), turn(0, 1, 0, 0.0, 4), turn(1, 0, 0, 0.5, 4)]
    assert not any(name.startswith("taskset/") for name in metrics_of(work_unit(0, 1), turns))
    others = [replace(turns[0], taskset="u")]
    units = [summarize_unit(work_unit(0, 1), UnitOutcome(rows, [], [], 0.0)) for rows in (turns, others)]
    metrics = step_metrics(units, 1.0)
    assert (metrics["taskset/t/reward"], metrics["taskset/u/reward"]) == (0.5, 1.0)
    assert metrics["reward"] == pytest.approx(2.5 / 4)


def test_the_bytes_of_a_unit_are_those_of_all_committed_rows() -> None:
    turns = [turn(0, rollout, 0, 1.0, 4) for rollout in range(3)]
    result = summarize_unit(work_unit(0, greedy_baseline=True), UnitOutcome(turns, [], [], 0.0))
    assert result.num_bytes == 3 * (4 * 6 + 4 * 4)


def test_rows_that_operators_dropped_do_not_count_in_means() -> None:
    turns = [turn(0, 0, 0, 1.0, 4), turn(0, 1, 0, 0.0, 40, status=Status.FILTERED)]
    metrics = metrics_of(work_unit(0), turns)
    assert (metrics["reward"], metrics["response_length"], metrics["num_rollouts"]) == (1.0, 4.0, 2)


@pytest.mark.parametrize(
    ("turns", "status"),
    [
        ((Status.OK, Status.OK), Status.OK),
        ((Status.OK, Status.TRUNCATED), Status.TRUNCATED),
        ((Status.FILTERED, Status.OK), Status.OK),
        ((Status.FILTERED, Status.FILTERED), Status.FILTERED),
        ((Status.TIMEOUT,), Status.TIMEOUT),
    ],
)
def test_a_rollout_has_the_status_of_its_trainable_rows(turns: tuple[Status, ...], status: Status) -> None:
    assert rollout_status([turn(0, 0, i, 1.0, 1, status=s) for i, s in enumerate(turns)]) is status


def unit_result(index: int, version: int, sums: Sums) -> RolloutResult:
    return RolloutResult(("experiences", 1, index), (), version, "", sums=sums)


def test_a_step_is_the_sum_of_its_units() -> None:
    one = Sums(
        {"reward": (2.0, "rewarded"), "wait_s": (1.0, ""), "occupancy": (6.0, "slot_s"), "pass@1": (2.0, "pass@1")},
        {"rollouts": 2, "rewarded": 2, "engine_s": 4.0, "slot_s": 8.0, "sampled_tokens": 30, "pass@1": 2},
    )
    other = Sums(
        {"reward": (0.0, "rewarded"), "wait_s": (0.0, ""), "occupancy": (1.0, "slot_s"), "pass@1": (0.0, "pass@1")},
        {"rollouts": 6, "rewarded": 2, "engine_s": 2.0, "slot_s": 6.0, "sampled_tokens": 20, "pass@1": 6},
    )
    metrics = step_metrics([unit_result(0, 3, one), unit_result(1, 4, other)], step_s=4.5)
    assert (metrics["reward"], metrics["num_rollouts"]) == (0.5, 8.0)
    assert (metrics["pass@1"], metrics["policy_version"], metrics["tokens_per_s"]) == (0.25, 4.0, 10.0)
    assert metrics["occupancy"] == 0.5
    assert (metrics["step_s"], metrics["wait_s"]) == (4.5, 1.0), "the wall time is not the sum over concurrent units"


def test_a_workflow_metric_does_not_replace_a_built_in_one() -> None:
    metrics = metrics_of(
        work_unit(0, repeat_times=1), [turn(0, 0, 0, 1.0, 4, metrics={"reward": 99.0, "failed": 99.0})]
    )
    assert (metrics["reward"], metrics["failed"]) == (1.0, 0.0)


@pytest.mark.parametrize("missing", [{}, {"accuracy": math.nan}, {"accuracy": math.inf}])
def test_rollouts_without_a_metric_do_not_count_in_its_mean(missing: dict[str, float]) -> None:
    def unit(*metrics: dict[str, float]) -> RolloutResult:
        rows = [turn(0, rollout, 0, 1.0, 4, metrics=values) for rollout, values in enumerate(metrics)]
        return summarize_unit(work_unit(0, repeat_times=2), UnitOutcome(rows, [], [], 0.0))

    known = {"accuracy": 1.0, "format": 1.0}
    metrics = step_metrics([unit(known, {**missing, "format": 0.0}), unit(missing, missing)], 1.0)
    assert (metrics["reward"], metrics["accuracy"], metrics["format"]) == (1.0, 1.0, 0.5)
    assert (metrics["accuracy/count"], metrics["format/count"]) == (1.0, 2.0)
    assert "accuracy/count" not in step_metrics([unit(known, known), unit(known, known)], 1.0)


def test_a_step_that_was_set_aside_whole_has_metrics() -> None:
    poisoned = unit_result(0, 3, Sums({"failed": (4, "rollouts")}, {"rollouts": 4}))
    metrics = step_metrics([poisoned], step_s=1.0)
    assert (metrics["failed"], metrics["reward"], metrics["response_length"]) == (1.0, 0.0, 0.0)
    assert metrics["tokens_per_s"] == 0.0 and "occupancy" not in metrics


def test_uses_of_auxiliary_models_are_added_up() -> None:
    uses = {"auxiliary/a/b/calls": 3.0, "auxiliary/a/b/cost": 0.5}, {"auxiliary/a/b/calls": 4.0}, {}
    units = [
        summarize_unit(work_unit(0, repeat_times=1), UnitOutcome([turn(0, 0, 0, 1.0, 4)], [], [], 0.0)) for _ in uses
    ]
    for unit, use in zip(units, uses, strict=True):
        unit.sums.put(use)
    assert units[0].auxiliary_sums == uses[0]
    metrics = step_metrics(units, 1.0)
    assert (metrics["auxiliary/a/b/calls"], metrics["auxiliary/a/b/cost"]) == (7.0, 0.5)
