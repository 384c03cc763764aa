"""Promise: a unit whose weights a trainer of another process has removed meanwhile takes the newest that are there; one
whose own run removed them, or that evaluates just these weights, says so."""

from types import SimpleNamespace

import pytest

from rftdask.config import load_config
from rftdask.errors import StorageError, WaitTimeout
from rftdask.rollouts import work_unit_task as worker_task
from rftdask.rollouts.work_unit_task import may_join
from rftdask.rollouts.work_units import RolloutTask
from rftdask.storage import open_storage
from rftdask.synchronizer.published import Published, publish_weights, remove_weights_below
from rftdask.synchronizer.styles import WeightRequirement


def weights_of(name: str, mode: str, folder: str, version: int = 1, timeout_s: float = 3600.0) -> int:
    """The version that a unit gets which wants `version`, where 2 and 3 alone are left."""
    storage = open_storage(f"memory://unit-weights/{name}")
    for number in (1, 2, 3):
        publish_weights(storage, number, b"weights", "main")
    remove_weights_below(storage, 2)
    taskset = {"taskset": {"path": "tasks.jsonl"}}
    config = load_config(
        {
            "mode": mode,
            "checkpoint_root_dir": "memory://unit-weights",
            "name": name,
            "model": {"model_path": "none", "max_model_len": 32},
            "buffer": {"batch_size": 2, "total_steps": 1, "explorer_input": taskset},
            "synchronizer": {"sync_timeout": timeout_s},
        }
    )
    unit = RolloutTask(storage.url, "", folder, 2, 0, (), 2, False, WeightRequirement(version, exact=True), 1, None)
    published = worker_task._wait_for_weights(storage, unit, config)
    assert published is not None
    return published.version


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_dataset(name: str) -> SimpleNamespace:
        raise KeyError(name)  # no synchronizer: storage itself is asked

    monkeypatch.setattr(worker_task, "get_client", lambda: SimpleNamespace(get_dataset=get_dataset))
    monkeypatch.setattr(worker_task, "make_cancel_check", lambda: lambda: False)


def test_weights_that_another_trainer_removed_give_way_to_the_newest() -> None:
    assert weights_of("explore", "explore", "experiences") == 3


@pytest.mark.parametrize("mode, folder", [("both", "experiences"), ("explore", "eval/held_out")])
def test_weights_that_must_be_these_are_said_to_be_gone(mode: str, folder: str) -> None:
    with pytest.raises(StorageError, match="version 1 were published and are gone"):
        weights_of(f"{mode}-{folder.partition('/')[0]}", mode, folder)


def test_weights_that_do_not_come_are_waited_for_as_long_as_the_section_says(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([False] * 40)  # of two seconds, after which nobody wants them any more
    monkeypatch.setattr(worker_task, "make_cancel_check", lambda: lambda: next(looks, True))
    with pytest.raises(WaitTimeout, match=r"policy version 4 was not published in 0 s; newest: 3\."):
        weights_of("waits", "both", "experiences", version=4, timeout_s=0.1)


@pytest.mark.parametrize(
    ("required", "served", "newest", "joins"),
    [
        (WeightRequirement(0, exact=False), 0, None, True),  # the model folder, and nothing newer
        (WeightRequirement(2, exact=False), 3, 3, True),
        (WeightRequirement(2, exact=False), 2, 3, True),  # fresh enough: newer ones would have to wait for the others
        (WeightRequirement(2, exact=False), 1, 3, False),  # too stale by the time it is trained
        (WeightRequirement(3, exact=True), 3, 3, True),
        (WeightRequirement(3, exact=True), 2, 3, False),
        (WeightRequirement(0, exact=True), 1, None, False),  # evaluates the start
    ],
)
def test_a_unit_joins_others_with_weights_that_its_rule_allows(
    required: WeightRequirement, served: int, newest: int | None, joins: bool
) -> None:
    def weights(version: int) -> Published:
        return Published(version, "main" if version else "", f"hash{version}")

    assert may_join(required, weights(served), None if newest is None else weights(newest)) == joins


def test_weights_of_another_lineage_are_never_joined() -> None:
    required = WeightRequirement(1, exact=False)
    assert not may_join(required, Published(4, "main", "a"), Published(4, "retry", "b"))
