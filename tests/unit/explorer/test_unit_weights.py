"""Promise: a unit whose weights a trainer of another process has removed meanwhile takes the newest that are there; one
whose own run removed them, or that evaluates just these weights, says so."""

from types import SimpleNamespace

import pytest

from rftdask.config import load_config
from rftdask.errors import StorageError
from rftdask.explorer import worker_task
from rftdask.explorer.worker_task import RolloutTask
from rftdask.storage import open_storage
from rftdask.synchronizer.styles import WeightRequirement
from rftdask.weights.published import publish_weights, remove_weights_below


def weights_of(name: str, mode: str, folder: str) -> int:
    """The version that a unit gets which wants version 1, where 2 and 3 alone are left."""
    storage = open_storage(f"memory://unit-weights/{name}")
    for version in (1, 2, 3):
        publish_weights(storage, version, b"weights", "main")
    remove_weights_below(storage, 2)
    taskset = {"taskset": {"path": "tasks.jsonl"}}
    config = load_config(
        {
            "mode": mode,
            "checkpoint_root_dir": "memory://unit-weights",
            "name": name,
            "model": {"model_path": "none", "max_model_len": 32},
            "buffer": {"batch_size": 2, "total_steps": 1, "explorer_input": taskset},
        }
    )
    unit = RolloutTask(storage.url, "", folder, 2, 0, (), 2, False, WeightRequirement(1, exact=True), 1, None)
    published = worker_task._wait_for_weights(storage, unit, config)
    assert published is not None
    return published.version


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_dataset(name: str) -> SimpleNamespace:
        raise KeyError(name)  # no synchronizer: storage itself is asked

    monkeypatch.setattr(worker_task, "get_client", lambda: SimpleNamespace(get_dataset=get_dataset))
    monkeypatch.setattr(worker_task, "make_called_off", lambda: lambda: False)


def test_weights_that_another_trainer_removed_give_way_to_the_newest() -> None:
    assert weights_of("explore", "explore", "experiences") == 3


@pytest.mark.parametrize("mode, folder", [("both", "experiences"), ("explore", "eval/held_out")])
def test_weights_that_must_be_these_are_said_to_be_gone(mode: str, folder: str) -> None:
    with pytest.raises(StorageError, match="version 1 were published and are gone"):
        weights_of(f"{mode}-{folder.partition('/')[0]}", mode, folder)
