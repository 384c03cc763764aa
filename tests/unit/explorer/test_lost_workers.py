"""Promises of the explorer's loop when it loses workers, with a fake of Dask's client:

- a worker that is lost after its batch had ended, before the result was fetched, is no failure of the batch;
- nor is one that was told to end, however often that happens to one batch;
- one that dies without a word is a suspicion, and after STRIKES in a row the batch runs in pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import KilledWorker

from rftdask.config import load_config
from rftdask.errors import StorageError
from rftdask.explorer.bisection import STRIKES
from rftdask.explorer.explorer import MAX_ATTEMPTS, ExplorePlan, Explorer
from rftdask.explorer.task_order import TaskOrder
from rftdask.explorer.worker_task import BEGAN_TOPIC, RolloutResult, RolloutSpec
from rftdask.monitor.events import Note
from rftdask.monitor.metrics import MetricsWriter
from rftdask.processes.dask_task import LEAVING_TOPIC
from rftdask.storage import open_storage

WORKER = "tcp://10.0.0.7:4711"
Outcome = Callable[["FakeClient", str, RolloutSpec], Any]


class FakeFuture:
    """Done when made."""

    def __init__(self, key: str, outcome: Any) -> None:
        self.key = key
        self.outcome = outcome
        self.status = (
            "error" if isinstance(outcome, Exception) and not isinstance(outcome, CancelledError) else "finished"
        )

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        callback(self)

    def exception(self) -> Any:
        return self.outcome

    def result(self, timeout: float) -> Any:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class FakeClient:
    """One worker, on which batches have the outcomes that a test gives, in turn, and then end well."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes = list(outcomes)
        self.submitted: list[RolloutSpec] = []
        self.topics: dict[str, Callable[[Any], None]] = {}

    def scheduler_info(self, n_workers: int) -> dict[str, Any]:
        return {"workers": {WORKER: {"resources": {"explorer": 1}}}}

    def submit(self, task: Any, spec: RolloutSpec, *, key: str, **options: Any) -> FakeFuture:
        self.submitted.append(spec)
        return FakeFuture(key, (self.outcomes.pop(0) if self.outcomes else ended_well)(self, key, spec))

    def say(self, topic: str, message: Any) -> None:
        self.topics[topic]((0.0, message))

    def subscribe_topic(self, topic: str, handler: Callable[[Any], None]) -> None:
        self.topics[topic] = handler

    def unsubscribe_topic(self, topic: str) -> None:
        del self.topics[topic]

    def cancel(self, futures: list[Any], force: bool) -> None:
        return


def ended_well(client: FakeClient, key: str, spec: RolloutSpec) -> RolloutResult:
    return RolloutResult(spec.key, ("shard",), 0, WORKER)


def lost_with_the_result(client: FakeClient, key: str, spec: RolloutSpec) -> Exception:
    return CancelledError()


def told_to_end(client: FakeClient, key: str, spec: RolloutSpec) -> Exception:
    client.say(LEAVING_TOPIC, WORKER)
    return died(client, key, spec)


def died(client: FakeClient, key: str, spec: RolloutSpec) -> Exception:
    client.say(BEGAN_TOPIC, (WORKER, key))
    return KilledWorker(key, SimpleNamespace(address=WORKER), 0)  # type: ignore[arg-type]


def failed(client: FakeClient, key: str, spec: RolloutSpec) -> Exception:
    return StorageError("the disk is full")


def explore(client: FakeClient, name: str) -> list[str]:
    """Run an explore step of one batch of two tasks; what the explorer noted."""
    tree = {
        "mode": "explore",
        "checkpoint_root_dir": "memory://lost-workers",
        "name": name,
        "model": {"model_path": "none", "max_model_len": 32},
        "buffer": {"batch_size": 2, "total_steps": 1, "explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
        "explorer": {"tasks_per_batch": 2},
    }
    storage, notes = open_storage(f"memory://lost-workers/{name}"), []
    Explorer(
        client,  # type: ignore[arg-type]  # the few calls that an explorer makes
        storage,
        load_config(tree),
        ExplorePlan(num_steps=1, sizes=(2,), order=TaskOrder(), evals=()),
        {role: MetricsWriter(storage, role) for role in ("explorer", "eval")},
        threads=1,
        log_file=None,
        emit=lambda event: notes.append(event.text if isinstance(event, Note) else ""),
        cancelled=lambda: False,
        trainer_ended_at=lambda: None,
    ).run()
    return [note for note in notes if note]


@pytest.mark.parametrize("loss", [lost_with_the_result, told_to_end])
def test_a_batch_is_never_blamed_for_workers_that_were_taken_away(loss: Outcome) -> None:
    client = FakeClient(*[loss] * (MAX_ATTEMPTS + STRIKES))
    assert explore(client, loss.__name__) == []
    assert len(client.submitted) == MAX_ATTEMPTS + STRIKES + 1
    assert {spec.slots for spec in client.submitted} == {None}, "it runs whole, so it samples the same bits"


def test_a_batch_whose_workers_die_without_a_word_runs_in_pieces() -> None:
    client = FakeClient(*[died] * STRIKES)
    assert "in pieces" in explore(client, "died")[-1]
    assert [spec.slots for spec in client.submitted] == [*[None] * STRIKES, (0,), (1,)]


def test_a_batch_that_raises_is_tried_a_few_times() -> None:
    with pytest.raises(Exception, match=f"failed {MAX_ATTEMPTS} times.*the disk is full"):
        explore(FakeClient(*[failed] * MAX_ATTEMPTS), "failed")
