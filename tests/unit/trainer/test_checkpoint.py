"""Promises of checkpoints: valid or not there; the newest valid one stays; the pointer follows the manifest."""

from contextlib import nullcontext

import pytest
from storage_kills import killed_at_put, killed_before

from rftdask.buffer.log.retention import ResumePoint
from rftdask.errors import DamagedError, StorageError
from rftdask.storage import Storage
from rftdask.synchronizer.manifest import NAME, is_valid
from rftdask.synchronizer.published import CHECKPOINT_POINTER, read_pointer
from rftdask.testing.storage_faults import FaultyStorage
from rftdask.trainer.checkpoint import Checkpoints, checkpoint_steps, newest_valid_checkpoint, oldest_resume_point
from tests.unit.trainer.trainer_cases import new_storage


@pytest.fixture
def storage() -> Storage:
    return new_storage()


def save(storage: Storage, step: int, keep: int = 0) -> None:
    Checkpoints(storage, "main", keep).save(step, {"actor/model.safetensors": b"model %d" % step}, {"step": step})


def test_the_newest_is_loaded_with_its_state_and_files(storage: Storage) -> None:
    assert Checkpoints(storage, "main").load_newest() is None
    for step in (2, 10, 4):
        save(storage, step)
    found = Checkpoints(storage, "main").load_newest()
    assert found is not None
    step, state, files = found
    assert (step, state, files["actor/model.safetensors"]) == (10, {"step": 10}, b"model 10")
    assert list(files) == ["actor/model.safetensors", "trainer_state.json"]
    assert checkpoint_steps(storage) == [2, 4, 10]
    assert read_pointer(storage, CHECKPOINT_POINTER) == 10


@pytest.mark.parametrize("killed_at", range(4))
def test_a_save_that_is_killed_leaves_the_one_before(storage: Storage, killed_at: int) -> None:
    save(storage, 2)
    puts: list[str] = []

    with pytest.raises(StorageError, match="killed"):
        save(FaultyStorage(storage, killed_at_put(killed_at, puts)), 4)
    whole = killed_at == 3  # only the pointer was missing
    assert newest_valid_checkpoint(storage) == (4 if whole else 2)
    assert read_pointer(storage, CHECKPOINT_POINTER) == 2
    found = Checkpoints(storage, "main").load_newest()
    assert found is not None
    assert found[0] == read_pointer(storage, CHECKPOINT_POINTER) == (4 if whole else 2)
    save(storage, 4)
    assert newest_valid_checkpoint(storage) == read_pointer(storage, CHECKPOINT_POINTER) == 4


@pytest.mark.parametrize("path", ["actor/model.safetensors", "trainer_state.json", NAME])
def test_a_damaged_checkpoint_is_none_and_is_written_again(storage: Storage, path: str) -> None:
    save(storage, 2)
    save(storage, 4)
    storage.put(f"global_step_4/{path}", b"{}")
    found = Checkpoints(storage, "main").load_newest()
    assert found is not None
    assert found[0] == 2
    save(storage, 4)
    assert newest_valid_checkpoint(storage) == 4


@pytest.mark.parametrize(
    ("killed_at", "valid"),
    [(None, [3, 6, 7]), (2, [3, 5, 7]), (3, [3, 6, 7])],
    ids=["not killed", "before the manifest of 6", "before the pointer to 6"],
)
def test_one_interim_checkpoint_stays_beyond_newest(storage: Storage, killed_at: int | None, valid: list[int]) -> None:
    for step in range(1, 8):
        dies = killed_at is not None and step == 6
        checkpoints = Checkpoints(
            FaultyStorage(storage, killed_at_put(killed_at or 0, [])) if dies else storage, "main"
        )
        checkpoints.load_newest()  # as every start of a trainer does
        with pytest.raises(StorageError) if dies else nullcontext():
            checkpoints.save(step, {"a": b"%d" % step}, {"step": step}, interim=step != 3)
    assert [step for step in checkpoint_steps(storage) if is_valid(storage, f"global_step_{step}")] == valid


def test_a_valid_checkpoint_is_not_written_again(storage: Storage) -> None:
    save(storage, 2)
    Checkpoints(storage, "main").save(2, {"actor/model.safetensors": b"other"}, {"step": 99})
    assert storage.get("global_step_2/actor/model.safetensors") == b"model 2"


@pytest.mark.parametrize(("keep", "kept"), [(0, [1, 2, 3, 4, 5]), (1, [5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5])])
def test_the_oldest_beyond_the_limit_go(storage: Storage, keep: int, kept: list[int]) -> None:
    for step in range(1, 6):
        save(storage, step, keep)
        assert newest_valid_checkpoint(storage) == step
    assert checkpoint_steps(storage) == kept


def test_newer_invalid_checkpoints_do_not_count(storage: Storage) -> None:
    storage.put("global_step_9/actor/model.safetensors", b"torn")
    for step in (2, 4):
        save(storage, step, keep=1)
    assert checkpoint_steps(storage) == [4, 9]
    assert newest_valid_checkpoint(storage) == 4


def test_a_checkpoint_that_goes_is_gone_before_its_files_are(storage: Storage) -> None:
    save(storage, 1)

    with pytest.raises(StorageError, match="killed"):
        save(FaultyStorage(storage, killed_before("remove", "global_step_1")), 2, keep=1)
    assert not is_valid(storage, "global_step_1")
    assert newest_valid_checkpoint(storage) == 2


def test_files_are_added_once_and_only_to_what_exists(storage: Storage) -> None:
    checkpoints = Checkpoints(storage, "main")
    save(storage, 2)
    checkpoints.complete(2, {"actor/huggingface/config.json": b"{}"}, interim=False)
    assert is_valid(storage, "global_step_2")
    before = storage.get(f"global_step_2/{NAME}")
    checkpoints.complete(2, {"actor/huggingface/config.json": b"other"}, interim=False)
    assert storage.get("global_step_2/actor/huggingface/config.json") == b"{}"
    assert storage.get(f"global_step_2/{NAME}") == before
    checkpoints.complete(3, {"x": b""}, interim=False)
    assert checkpoint_steps(storage) == [2]


def test_a_checkpoint_of_another_lineage_is_refused(storage: Storage) -> None:
    save(storage, 2)
    with pytest.raises(DamagedError, match="global_step_2 is of lineage main, this trainer works on fork"):
        Checkpoints(storage, "fork").load_newest()


def test_files_are_verified_when_they_are_read_and_not_before(storage: Storage) -> None:
    save(storage, 2)
    files = Checkpoints(storage, "main").files(2)
    assert files is not None
    storage.put("global_step_2/actor/model.safetensors", b"model 3")
    assert "actor/model.safetensors" in files and "absent" not in files and len(files) == 2
    with pytest.raises(DamagedError, match=r"actor/model\.safetensors: 7 bytes do not match"):
        files["actor/model.safetensors"]
    assert Checkpoints(storage, "main").files(3) is None


def test_other_folders_are_not_checkpoints(storage: Storage) -> None:
    for path in ("global_step_x/a", "global_step_/a", "old_global_step_3/a", "global_steps/a"):
        storage.put(path, b"")
    assert checkpoint_steps(storage) == []


def test_the_oldest_checkpoint_is_the_oldest_resume_point(storage: Storage) -> None:
    assert oldest_resume_point(storage) is None
    storage.put("global_step_1/actor/model.safetensors", b"half of a checkpoint")
    for step, low in ((10, 5), (2, 1), (4, 3)):
        Checkpoints(storage, "main").save(step, {"a": b"a"}, {"step": step, "source": {"low": low, "beyond": []}})
    assert oldest_resume_point(storage) == ResumePoint(step=2, explore_step=1)
    Checkpoints(storage, "main", max_to_keep=2).save(12, {}, {"step": 12, "source": {"low": 7, "beyond": []}})
    assert oldest_resume_point(storage) == ResumePoint(step=10, explore_step=5)
    storage.put("global_step_10/trainer_state.json", b"{}")
    with pytest.raises(DamagedError):
        oldest_resume_point(storage)
