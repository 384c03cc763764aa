"""Promises of evaluations: which versions are due, the size of units, that each is recorded once, and its metrics."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.schema import Experience, Status
from rftdask.config import Config, load_config
from rftdask.data.task_schedule import TaskRef
from rftdask.driver.stage import bench_versions
from rftdask.errors import DataError
from rftdask.explorer.evaluation import EvaluationQueue, evaluation_metrics, expected_best, repeat_metrics
from rftdask.monitor.metrics import MetricsWriter
from rftdask.storage import open_storage
from rftdask.synchronizer.styles import WeightRequirement
from tests.unit.synchronizer.sync_cases import publish_weights

SIZES = {"large": 10, "small": 3}
REPEAT_TIMES = {"large": 1, "small": 4}


def stage(*overrides: str) -> Config:
    tree = {
        "model": {"model_path": "m", "max_model_len": 64},
        "algorithm": {"repeat_times": 2},
        "buffer": {"batch_size": 2, "explorer_input": {"taskset": {"path": "t.jsonl"}}},
        "explorer": {"eval_interval": 4},
    }
    return load_config(tree, overrides)


def make_unit(
    folder: str, step: int, unit_index: int, tasks: Sequence[TaskRef], repeat_times: int, weights: WeightRequirement
) -> Any:
    assert weights == WeightRequirement(step, exact=True)
    return SimpleNamespace(folder=folder, explore_step=step, unit_index=unit_index, tasks=tasks, weights=weights)


def make_queue(
    config: Config,
    *tasksets: str,
    versions: tuple[int, ...] = (),
    url: str = "memory://evaluation-queue",
    metrics: dict[str, float] | None = None,
) -> tuple[EvaluationQueue, list[tuple[str, int]]]:
    """metrics: receives all recorded metrics."""
    recorded: list[tuple[str, int]] = []

    def record(taskset: str, version: int, values: dict[str, float]) -> None:
        recorded.append((taskset, version))
        if metrics is not None:
            metrics.update(values)

    tree = config.to_dict()
    tree["buffer"]["explorer_input"]["eval_tasksets"] = [
        {"name": name, "path": f"{name}.jsonl", "repeat_times": REPEAT_TIMES[name]} for name in tasksets
    ]
    return EvaluationQueue(open_storage(url), load_config(tree), SIZES, versions, make_unit, record), recorded


def due_versions(config: Config, newest: int, ended_at: int | None, versions: tuple[int, ...] = ()) -> list[int]:
    return make_queue(config, "small", versions=versions)[0].versions_in_use(newest, ended_at)


@pytest.mark.parametrize(
    ("overrides", "newest", "ended_at", "due"),
    [
        ((), 0, None, [0]),
        ((), 9, None, [0, 4, 8]),
        ((), 9, 9, [0, 4, 8, 9]),
        ((), 8, 8, [0, 4, 8]),
        (("explorer.eval_on_startup=false",), 9, None, [4, 8]),
        (("mode=explore",), 9, None, [0]),
    ],
)
def test_versions_are_due_at_start_interval_and_end(
    overrides: tuple[str, ...], newest: int, ended_at: int | None, due: list[int]
) -> None:
    assert due_versions(stage(*overrides), newest, ended_at) == due


def test_published_versions_at_the_interval_are_due_in_training() -> None:
    storage = open_storage("memory://evaluation-queue")
    for version in (4, 6, 8):
        publish_weights(storage, version, {"w": b"x"})
    path = "buffer.trainer_input.experience_buffer.path=d.jsonl"
    of_dataset = ("mode=train", "algorithm={algorithm_type: sft}", path)
    assert due_versions(stage(*of_dataset, "trainer.eval_interval=4"), 8, None) == [0, 4, 8]
    # An earlier start published at another interval: version 3 is missing, 6 exists.
    assert due_versions(stage(*of_dataset, "trainer.eval_interval=3"), 8, 8) == [0, 6, 8]
    assert due_versions(stage(*of_dataset), 8, 8) == [0, 8], "0: before the first step and after the last"


def test_bench_evaluates_its_versions() -> None:
    assert due_versions(stage(), 9, None, versions=(0, 3)) == [0, 3]


def test_bench_evaluates_all_checkpoints_or_only_the_newest() -> None:
    storage, newest = open_storage("memory://bench-versions"), stage("explorer.bench_on_latest_checkpoint=true")
    assert bench_versions(storage, stage()) == (0,)
    with pytest.raises(DataError, match="no checkpoint to evaluate"):
        bench_versions(storage, newest)
    for step in (4, 12):
        storage.put(f"global_step_{step}/manifest.json", b"{}")
    assert bench_versions(storage, stage()) == (0, 4, 12)
    assert bench_versions(storage, newest) == (12,)


def test_a_unit_has_at_most_the_rollouts_of_a_training_unit() -> None:
    queue, _ = make_queue(stage(), "large", "small")
    queue.add_due(newest=0, ended_at=None)
    assert len(queue.waiting) == 6
    sizes = [
        (taken.folder, taken.unit_index, len(taken.tasks)) for taken in (queue.waiting.popleft() for _ in range(6))
    ]
    assert sizes == [
        ("eval/large", 0, 4), ("eval/large", 1, 4), ("eval/large", 2, 2),
        ("eval/small", 0, 1), ("eval/small", 1, 1), ("eval/small", 2, 1),
    ]  # fmt: skip


def test_an_evaluation_is_recorded_once_at_its_last_unit() -> None:
    queue, recorded = make_queue(stage(), "large")
    queue.add_due(newest=0, ended_at=None)
    queue.add_due(newest=0, ended_at=None)
    assert len(queue.waiting) == 3 and not queue.is_empty(0, None)
    first, second, third = (queue.waiting.popleft() for _ in range(3))
    for unit, expected in ((third, []), (first, []), (second, [("large", 0)])):
        queue.finish(unit)
        assert recorded == expected
    assert queue.is_empty(0, None) and not queue.is_empty(4, None)


def test_an_unrecorded_evaluation_is_recorded_by_the_next_driver() -> None:
    storage = open_storage("memory://evaluation-queue")
    for unit in range(3):
        ParquetLog(storage, "eval/small").commit([answer(unit, 1.0)], explore_step=4, unit=unit)
    for _ in range(2):
        queue, recorded = make_queue(stage(), "small")
        queue.read()
        assert recorded == [("small", 4)]
        assert queue.versions_in_use(newest=4, ended_at=None) == [0]
    with MetricsWriter(storage, "eval") as metrics:
        metrics.write(4, {"reward": 1.0}, taskset="small")
    for versions, expected in (((), []), ((4,), [("small", 4)])):  # bench reports its versions again
        queue, recorded = make_queue(stage(), "small", versions=versions)
        queue.read()
        assert recorded == expected


@pytest.mark.parametrize(
    ("overrides", "ranges"), [((), set()), (("monitor.detailed_stats=true",), {"max", "min", "std"})]
)
def test_ranges_are_recorded_with_detailed_stats(overrides: tuple[str, ...], ranges: set[str]) -> None:
    url, metrics = f"memory://ranges-{len(overrides)}", dict[str, float]()
    for unit in range(3):
        ParquetLog(open_storage(url), "eval/small").commit([answer(unit, 1.0)], explore_step=4, unit=unit)
    queue, recorded = make_queue(stage(*overrides), "small", url=url, metrics=metrics)
    queue.read()
    assert recorded == [("small", 4)] and metrics["reward"] == 1.0
    assert {name.partition("/")[2] for name in metrics if name.startswith("reward/") and "@" not in name} == ranges


def answer(index: int, reward: float | None) -> Experience:
    status = Status.FAILED if reward is None else Status.OK
    metrics = {} if reward is None else {"accuracy": reward}
    return Experience("held", 0, index, 0, explore_step=4, status=status, reward=reward, metrics=metrics)


def test_means_count_all_rollouts_of_the_version_once() -> None:
    storage = open_storage("memory://evaluations")
    log = ParquetLog(storage, "eval/held")
    log.commit([answer(0, 1.0), answer(1, None)], explore_step=4, unit=0)
    log.commit([answer(2, 1.0), answer(3, 0.0)], explore_step=4, unit=1)
    ParquetLog(storage, "eval/held").commit([answer(2, 1.0), answer(3, 0.0)], explore_step=4, unit=1)
    log.commit([answer(0, 0.0)], explore_step=5, unit=0)
    metrics = evaluation_metrics(log, 4)
    assert [metrics[name] for name in ("reward", "num_rollouts", "accuracy")] == [0.5, 4.0, 0.5]
    assert metrics["reward/mean@1"] == metrics["accuracy/mean@1"] == 0.5


def test_metrics_over_repeats_count_a_rollout_of_turns_once() -> None:
    log = ParquetLog(open_storage("memory://repeats"), "eval/held")
    of_turns = [{"accuracy": 1.0, "num_response_tokens": 4.0 + turn} for turn in (0, 1)]
    turns = [replace(answer(0, 1.0), turn=turn, metrics=of_turns[turn]) for turn in (0, 1)]
    lost = replace(answer(0, None), rollout=1)
    log.commit([*turns, lost, answer(1, 0.0), replace(answer(1, 0.0), rollout=1)], explore_step=4, unit=0)
    metrics = evaluation_metrics(log, 4)
    assert (metrics["num_rollouts"], metrics["reward"], metrics["accuracy"]) == (4.0, 0.25, 0.25)
    assert (metrics["reward/mean@2"], metrics["reward/std@2"]) == (0.25, 0.25)
    assert (metrics["accuracy/best@2"], metrics["accuracy/worst@2"]) == (0.375, 0.125)
    assert metrics["num_response_tokens"] == 9 / 5
    detailed = evaluation_metrics(log, 4, detailed=True)
    assert {name: value for name, value in detailed.items() if name in metrics} == metrics
    assert (detailed["reward/max"], detailed["reward/min"], detailed["reward/std"]) == (1.0, 0.0, 3**0.5 / 4)


@pytest.mark.parametrize("missing", [{}, {"accuracy": math.nan}])
def test_only_reported_metrics_and_failures_count(missing: dict[str, float]) -> None:
    log = ParquetLog(open_storage(f"memory://reported/{len(missing)}"), "eval/held")
    answers = [answer(0, 1.0), replace(answer(1, 1.0), metrics=missing), answer(2, 1.0), answer(3, None)]
    log.commit(answers, explore_step=4, unit=0)
    metrics = evaluation_metrics(log, 4)
    assert (metrics["reward"], metrics["num_rollouts"]) == (0.75, 4.0)
    assert (metrics["accuracy"], metrics["accuracy/count"]) == (pytest.approx(2 / 3), 3.0)
    assert metrics["accuracy/mean@1"] == pytest.approx(2 / 3)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=5), st.integers(1, 4))
def test_best_of_k_is_the_mean_over_draws_with_replacement(values: list[float], k: int) -> None:
    draws = list(product(values, repeat=k))
    assert expected_best(values, k) == pytest.approx(sum(map(max, draws)) / len(draws), abs=1e-9)
    worst = repeat_metrics("r", [values])
    for size in (size for size in range(2, len(values) + 1) if f"r/worst@{size}" in worst):
        draws = list(product(values, repeat=size))
        assert worst[f"r/worst@{size}"] == pytest.approx(sum(map(min, draws)) / len(draws), abs=1e-9)


def test_best_of_k_exists_for_powers_of_two_and_all() -> None:
    two = repeat_metrics("reward", [[0.0, 1.0], [1.0, 1.0]])
    assert two == {"reward/mean@2": 0.75, "reward/std@2": 0.25, "reward/best@2": 0.875, "reward/worst@2": 0.625}
    names = repeat_metrics("a", [[0.0] * 6])
    assert [name for name in names if "best" in name] == ["a/best@2", "a/best@4", "a/best@6"]
    assert repeat_metrics("a", [[0.5]]) == {"a/mean@1": 0.5, "a/std@1": 0.0} and repeat_metrics("a", []) == {}
