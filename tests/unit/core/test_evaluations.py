"""Promises of evaluations: read from shards, a batch that ran twice counts once, a failure is no correct answer."""

from __future__ import annotations

from rftdask.buffer.experience import Experience, Status
from rftdask.buffer.log_files import ParquetLog
from rftdask.explorer.evaluations import evaluation_metrics
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
    assert evaluation_metrics(log, 4) == {"reward": 0.5, "num_rollouts": 4.0, "accuracy": 0.5}
