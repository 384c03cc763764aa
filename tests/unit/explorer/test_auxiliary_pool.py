"""Promises of the pool of auxiliary models: every worker serves one model that fits its GPUs."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from distributed import Client, KilledWorker

from rftdask.config import Config, load_config
from rftdask.errors import ProcessLostError, RoleError, UserError, WaitTimeout
from rftdask.explorer import auxiliary_pool
from rftdask.explorer.auxiliary_pool import MAX_FAILURES, AuxiliaryPool, choose_model
from rftdask.rollouts.auxiliary_models import SERVING_TOPIC, AuxiliaryTask
from rftdask.storage.memory import MemoryStorage


class FakeTask:
    def __init__(self, key: str) -> None:
        self.key, self.status, self.error = key, "pending", cast(Any, None)

    def exception(self) -> Any:
        return self.error

    def fail(self, error: Exception) -> None:
        self.status, self.error = "error", error


class FakeClient:
    """The part of a distributed.Client that the pool uses."""

    def __init__(self) -> None:
        self.tasks: list[tuple[str, str, FakeTask]] = []
        """(worker, model, task) in the order of submission."""
        self.cancelled: list[FakeTask] = []
        self.serves: Any = None

    def submit(
        self, function: Any, request: AuxiliaryTask, *, key: str, workers: list[str], **options: Any
    ) -> FakeTask:
        task = FakeTask(key)
        self.tasks.append((workers[0], request.name, task))
        return task

    def subscribe_topic(self, topic: str, handler: Any) -> None:
        assert topic == SERVING_TOPIC
        self.serves = handler

    def unsubscribe_topic(self, topic: str) -> None:
        assert topic == SERVING_TOPIC

    def cancel(self, tasks: list[FakeTask], *, force: bool) -> None:
        self.cancelled += tasks


class World:
    """A pool with its workers, notes and requests for workers."""

    def __init__(self, *models: Mapping[str, Any], deadline_s: float = 100.0) -> None:
        self.client, self.notes, self.asked = FakeClient(), list[str](), list[int]()
        self.pool = AuxiliaryPool(
            cast(Client, self.client),
            MemoryStorage("memory://pool"),
            judged(*models),
            threads=2,
            log_folder=None,
            deadline_s=deadline_s,
            note=self.notes.append,
            scale=self.asked.append,
        )

    def look(self, **workers: float) -> None:
        """workers: GPUs of the connected workers by name."""
        infos = {name: {"name": name, "resources": {"auxiliary": amount}} for name, amount in workers.items()}
        self.pool.look({**cast(Any, infos), "explorer": cast(Any, {"name": "e", "resources": {"explorer": 1.0}})})

    def placed(self) -> list[tuple[str, str]]:
        return [(worker, model) for worker, model, _ in self.client.tasks]


def judged(*models: Mapping[str, Any]) -> Config:
    return load_config(
        {
            "model": {"model_path": "m", "max_model_len": 64},
            "buffer": {"explorer_input": {"taskset": {"path": "t.jsonl"}}},
            "explorer": {"auxiliary_models": [{"model_path": "j", "engine_type": "vllm", **model} for model in models]},
        }
    )


SMALL = {"name": "small", "engine_num": 2}
LARGE = {"name": "large", "engine_num": 1, "tensor_parallel_size": 4}


def test_every_worker_serves_a_model_that_fits_its_gpus() -> None:
    world = World(SMALL, LARGE)
    world.look(a=1, b=1, c=4)
    assert world.placed() == [("c", "large"), ("a", "small"), ("b", "small")]
    world.look(a=1, b=1, c=4, tiny=0.5)  # too small for any
    assert len(world.placed()) == 3
    world.pool.close()
    assert len(world.client.cancelled) == 3


def test_an_extra_worker_serves_the_model_with_fewest_engines() -> None:
    models = {model.asked_name: model for model in judged(SMALL, LARGE).models_apart}
    assert choose_model(models, {"small": 1, "large": 0}, 4) == "large"
    assert choose_model(models, {"small": 1, "large": 0}, 1) == "small"
    assert choose_model(models, {"small": 2, "large": 2}, 4) == "small"
    assert choose_model(models, {"small": 3, "large": 1}, 4) == "large"
    assert choose_model(models, {}, 0.5) is None


def test_the_next_worker_replaces_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auxiliary_pool, "_ASK_AGAIN_S", 0.0)
    world = World(SMALL)
    world.look(a=1, b=1)
    for _, _, task in world.client.tasks:
        world.client.serves((0.0, task.key))
    world.look(a=1, b=1)
    notes = [f"auxiliary model 'small' {what} worker {name}" for what in ("starts on", "is served by") for name in "ab"]
    assert world.notes == notes
    lost = SimpleNamespace(address="a")
    for number in range(2 * MAX_FAILURES):  # lost workers are not failed starts
        world.client.tasks[-1][2].fail(KilledWorker("k", cast(Any, lost), 0))
        name = f"c{number}"
        world.look(a=1, **{name: 1})
        assert world.placed()[-1] == (name, "small")
        world.client.serves((0.0, world.client.tasks[-1][2].key))
        world.look(a=1, **{name: 1})
    world.look(a=1)
    assert world.asked[-1] == 2 and "its worker was lost; it is replaced" in world.notes[4]


def test_an_engine_that_fails_repeatedly_ends_the_run() -> None:
    world = World(SMALL)
    world.look(a=1)
    for _ in range(MAX_FAILURES - 1):
        world.client.tasks[-1][2].fail(ProcessLostError("engine-vllm (pid 3) ended"))
        world.look(a=1)
    world.client.tasks[-1][2].fail(ProcessLostError("engine-vllm (pid 3) ended"))
    with pytest.raises(RoleError, match=r"'small' ended: ProcessLostError: engine-vllm.*4 in a row"):
        world.look(a=1)


def test_a_user_error_or_a_missing_worker_ends_the_run() -> None:
    world = World(SMALL)
    world.look(a=1)
    world.client.tasks[-1][2].fail(UserError("there is no model folder 'j'"))
    with pytest.raises(UserError, match="there is no model folder"):
        world.look(a=1)
    late = World(LARGE, deadline_s=0.0)
    late.look(a=1)
    with pytest.raises(
        WaitTimeout, match=r"no worker with 4 of the resource auxiliary .* 'large' in 0 s \(engine_num 1"
    ):
        late.look(a=1)
