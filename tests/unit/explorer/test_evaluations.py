"""Promises of evaluations: read from shards, what ran twice counts once, so does a rollout of several turns, and
a failure is no correct answer.
"""

from __future__ import annotations

from dataclasses import replace

from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.schema import Experience, Status
from rftdask.explorer.evaluation import evaluation_metrics
from rftdask.storage import open_storage


def answer(index: int, reward: float | None) -> Experience:
    status = Status.FAILED if reward is None else Status.OK
    metrics = {} if reward is None else {"accuracy": reward}
    return Experience("held", 0, index, 0, explore_step=4, status=status, reward=reward, metrics=metrics)


def test_means_are_over_all_rollouts_of_the_version_each_once() -> None:
    storage = open_storage("memory://evaluations")
    log = ParquetLog(storage, "eval/held")
    log.commit([answer(0, 1.0), answer(1, None)], explore_step=4, batch=0)
    log.commit([answer(2, 1.0), answer(3, 0.0)], explore_step=4, batch=1)
    ParquetLog(storage, "eval/held").commit([answer(2, 1.0), answer(3, 0.0)], explore_step=4, batch=1)
    log.commit([answer(0, 0.0)], explore_step=5, batch=0)
    metrics = evaluation_metrics(log, 4)
    assert {name: metrics[name] for name in ("reward", "num_rollouts", "accuracy")} == {
        "reward": 0.5,
        "num_rollouts": 4.0,
        "accuracy": 0.5,
    }
    assert metrics["reward/mean@1"] == metrics["accuracy/mean@1"] == 0.5


def test_the_rollouts_of_a_task_are_told_together_and_a_rollout_of_several_turns_counts_once() -> None:
    log = ParquetLog(open_storage("memory://repeats"), "eval/held")
    turns = [
        replace(answer(0, 1.0), turn=turn, metrics={"accuracy": 1.0, "num_response_tokens": 4.0 + turn})
        for turn in (0, 1)
    ]
    lost = replace(answer(0, None), rollout=1)
    log.commit([*turns, lost, answer(1, 0.0), replace(answer(1, 0.0), rollout=1)], explore_step=4, batch=0)
    metrics = evaluation_metrics(log, 4)
    assert (metrics["num_rollouts"], metrics["reward"], metrics["accuracy"]) == (4.0, 0.25, 0.25)
    assert (metrics["reward/mean@2"], metrics["reward/std@2"]) == (0.25, 0.25)
    assert (metrics["accuracy/best@2"], metrics["accuracy/worst@2"]) == (0.375, 0.125)
    assert metrics["num_response_tokens"] == 9 / 5
