"""Promise: if a trainer in another process has removed the weights of a unit, the unit takes the newest ones."""

from types import SimpleNamespace

import pytest

from rftdask.config import load_config
from rftdask.errors import StorageError, WaitTimeout
from rftdask.rollouts import work_unit_task
from rftdask.rollouts.work_unit_task import may_join
from rftdask.rollouts.work_units import RolloutTask
from rftdask.storage import open_storage
from rftdask.synchronizer.published import Published, remove_weights_below
from rftdask.synchronizer.styles import WeightRequirement
from tests.unit.synchronizer.sync_cases import publish_weights


def weights_of(name: str, mode: str, folder: str, version: int = 1, timeout_s: float = 3600.0) -> int:
    """Version that a unit that requires `version` gets if only 2 and 3 exist."""
    storage = open_storage(f"memory://unit-weights/{name}")
    for number in (1, 2, 3):
        publish_weights(storage, number, b"weights")
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
    weights = WeightRequirement(version, exact=True)
    unit = RolloutTask(storage.url, "", 1, None, folder, 2, 0, (), 2, False, weights)
    published = work_unit_task._wait_for_weights(storage, unit, config)
    assert published is not None
    return published.version


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_dataset(name: str) -> SimpleNamespace:
        raise KeyError(name)  # no synchronizer: the storage is read

    monkeypatch.setattr(work_unit_task, "get_client", lambda: SimpleNamespace(get_dataset=get_dataset))
    monkeypatch.setattr(work_unit_task, "make_cancel_check", lambda: lambda: False)


def test_weights_that_another_trainer_removed_give_way_to_newer() -> None:
    assert weights_of("explore", "explore", "experiences") == 3


@pytest.mark.parametrize("mode, folder", [("both", "experiences"), ("explore", "eval/held_out")])
def test_a_required_version_that_was_removed_is_an_error(mode: str, folder: str) -> None:
    with pytest.raises(StorageError, match="version 1 were published and are gone"):
        weights_of(f"{mode}-{folder.partition('/')[0]}", mode, folder)


def test_the_wait_for_weights_ends_after_sync_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = iter([False] * 40)  # two seconds, then the unit is cancelled
    monkeypatch.setattr(work_unit_task, "make_cancel_check", lambda: lambda: next(checks, True))
    with pytest.raises(WaitTimeout, match=r"policy version 4 was not published within 0 s; newest: 3\."):
        weights_of("waits", "both", "experiences", version=4, timeout_s=0.1)


@pytest.mark.parametrize(
    ("required", "served", "newest", "joins"),
    [
        (WeightRequirement(0, exact=False), 0, None, True),  # the model folder, and nothing newer
        (WeightRequirement(2, exact=False), 3, 3, True),
        (WeightRequirement(2, exact=False), 2, 3, True),  # fresh enough: newer ones would have to wait for other units
        (WeightRequirement(2, exact=False), 1, 3, False),  # too stale by the time it is trained
        (WeightRequirement(3, exact=True), 3, 3, True),
        (WeightRequirement(3, exact=True), 2, 3, False),
        (WeightRequirement(0, exact=True), 1, None, False),  # evaluates the start
    ],
)
def test_a_unit_joins_others_if_its_requirement_allows(
    required: WeightRequirement, served: int, newest: int | None, joins: bool
) -> None:
    def weights(version: int) -> Published:
        return Published(version, "main" if version else "", f"hash{version}")

    assert may_join(required, weights(served), None if newest is None else weights(newest)) == joins


def test_weights_of_another_lineage_are_never_joined() -> None:
    required = WeightRequirement(1, exact=False)
    assert not may_join(required, Published(4, "main", "a"), Published(4, "retry", "b"))
