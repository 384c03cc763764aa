"""Promises of the agenda of evaluations.

- versions are due at the start, at every interval and at the end, each once on each taskset;
- a batch has no more rollouts than one of training;
- an evaluation is recorded when its last batch is on storage, and then it is not due again.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rftdask.config import Config, load_config
from rftdask.data.task_schedule import TaskRef
from rftdask.explorer.evaluation import EvalTaskset
from rftdask.explorer.evaluation_queue import EvalAgenda
from rftdask.storage import open_storage
from rftdask.synchronizer.styles import Admission

LARGE, SMALL = EvalTaskset("large", 0, 10, 1), EvalTaskset("small", 1, 3, 4)


def stage(*overrides: str) -> Config:
    tree = {
        "model": {"model_path": "m", "max_model_len": 64},
        "algorithm": {"repeat_times": 2},
        "buffer": {"batch_size": 2, "explorer_input": {"taskset": {"path": "t.jsonl"}}},
        "explorer": {"eval_interval": 4},
    }
    return load_config(tree, overrides)


def spec(folder: str, step: int, batch: int, tasks: list[TaskRef], repeat_times: int, admission: Admission) -> Any:
    assert admission.exact and admission.version == step
    return SimpleNamespace(folder=folder, explore_step=step, version=step, batch=batch, tasks=tasks)


def make_agenda(
    config: Config, *tasksets: EvalTaskset, versions: tuple[int, ...] = ()
) -> tuple[EvalAgenda, list[tuple[str, int]]]:
    recorded: list[tuple[str, int]] = []
    agenda = EvalAgenda(
        open_storage("memory://agenda"),
        config,
        tasksets,
        versions,
        spec,
        lambda taskset, version, metrics: recorded.append((taskset, version)),
    )
    return agenda, recorded


def due_versions(config: Config, newest: int, ended_at: int | None, versions: tuple[int, ...] = ()) -> list[int]:
    return make_agenda(config, SMALL, versions=versions)[0].versions_in_use(newest, ended_at)


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
def test_versions_are_due_at_the_start_at_every_interval_and_at_the_end(
    overrides: tuple[str, ...], newest: int, ended_at: int | None, due: list[int]
) -> None:
    assert due_versions(stage(*overrides), newest, ended_at) == due


def test_bench_names_its_versions() -> None:
    assert due_versions(stage(), 9, None, versions=(0, 3)) == [0, 3]


def test_a_batch_has_no_more_rollouts_than_one_of_training() -> None:
    agenda, _ = make_agenda(stage(), LARGE, SMALL)
    agenda.add_due(newest=0, ended_at=None)
    assert agenda.num_waiting == 6
    sizes = [(taken.folder, taken.batch, len(taken.tasks)) for taken in (agenda.take() for _ in range(6))]
    assert sizes == [
        ("eval/large", 0, 4), ("eval/large", 1, 4), ("eval/large", 2, 2),
        ("eval/small", 0, 1), ("eval/small", 1, 1), ("eval/small", 2, 1),
    ]  # fmt: skip


def test_an_evaluation_is_recorded_at_its_last_batch_and_is_not_due_again() -> None:
    agenda, recorded = make_agenda(stage(), LARGE)
    agenda.add_due(newest=0, ended_at=None)
    agenda.add_due(newest=0, ended_at=None)
    assert agenda.num_waiting == 3 and not agenda.is_empty(0, None)
    first, second, third = (agenda.take() for _ in range(3))
    assert not agenda.finished(third) and not agenda.finished(first) and recorded == []
    assert agenda.finished(second) and recorded == [("large", 0)]
    assert agenda.is_empty(0, None) and not agenda.is_empty(4, None)
