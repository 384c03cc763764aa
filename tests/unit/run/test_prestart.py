"""Promises of a head start: the roles of the next stage get one, once, at the first step of the stage before it; where
it fails nothing else does; and what nobody took is ended.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from rftdask.cluster.base import Layout, WorkerPlan
from rftdask.config import Config, load_config
from rftdask.monitor.events import Note, Step
from rftdask.processes.child import end_ahead, start_ahead
from rftdask.run.prestart import HeadStart

STEP = Step("trainer", 1, {})
LAYOUT = Layout((WorkerPlan("trainer-0", ("trainer",), 3), WorkerPlan("explorer-0", ("explorer",), 2)))
WORKERS = {
    "tcp://t": {"resources": {"trainer": 1.0}},
    "tcp://e": {"resources": {"explorer": 1.0}},
    "tcp://f": {"resources": {"explorer": 1.0}},
}


class FakeClient:
    """Notes what it is told to run on which workers, as Dask's client would."""

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken
        self.ran: list[tuple[Any, tuple[Any, ...], list[str]]] = []

    def scheduler_info(self, n_workers: int) -> dict[str, Any]:
        if self.broken:
            raise OSError("the scheduler is gone")
        return {"workers": WORKERS}

    def run(self, function: Any, *args: Any, workers: Sequence[str], on_error: str) -> None:
        self.ran.append((function, args, list(workers)))


def stage(mode: str, *overrides: str) -> Config:
    tree = {
        "mode": mode,
        "model": {"model_path": "m", "max_model_len": 64},
        "buffer": {"explorer_input": {"taskset": {"path": "t.jsonl"}}},
    }
    return load_config(tree, overrides)


def after_first_steps(client: FakeClient, *stages: Config) -> list[tuple[Any, tuple[Any, ...], list[str]]]:
    """What ran by the time that each stage has told of two steps."""
    fake: Any = client
    with HeadStart(fake, LAYOUT, stages) as ahead:
        for number in range(len(stages)):
            ahead.after(number, Note("it begins"))
            ahead.after(number, STEP)
            ahead.after(number, STEP)
            for thread in threading.enumerate():
                if thread.name == "ahead":
                    thread.join(60)
    return client.ran


def test_each_role_of_the_next_stage_gets_one_on_its_workers() -> None:
    ran = after_first_steps(FakeClient(), stage("train"), stage("both"))
    assert [(function, args[:2], workers) for function, args, workers in ran] == [
        (start_ahead, ("rftdask.engines.server:serve", 2), ["tcp://e", "tcp://f"]),
        (start_ahead, ("rftdask.trainer.rank:serve", 3), ["tcp://t"]),
        (end_ahead, (), ["tcp://t", "tcp://e", "tcp://f"]),
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        ("mode=explore", "explorer.rollout_model.engine_type=fake"),
        ("mode=explore", "explorer.rollout_model.engine_type=vllm"),
        ("mode=explore", "explorer.env_vars={HF_HUB_OFFLINE: '1'}"),
        ("mode=train", "trainer.trainer_type=fake"),
    ],
)
def test_roles_whose_imports_are_few_or_depend_on_their_environment_get_none(overrides: tuple[str, ...]) -> None:
    ran = after_first_steps(FakeClient(), stage("train"), stage("both", *overrides))
    assert [function for function, _, _ in ran] == [end_ahead]


def test_one_stage_has_nobody_to_give_a_head_start_to() -> None:
    assert after_first_steps(FakeClient(), stage("both")) == []


def test_where_the_workers_cannot_be_told_the_stage_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    assert after_first_steps(FakeClient(broken=True), stage("train"), stage("both")) == []
    assert "no head start" in caplog.text
