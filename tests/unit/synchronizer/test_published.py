"""Promises of published weights: the pointer names only complete versions, never goes back, and ignores garbage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storage_kills import killed_before

from rftdask.errors import StorageError
from rftdask.storage import Storage
from rftdask.synchronizer.manifest import NAME, Manifest, read_manifest, write_folder
from rftdask.synchronizer.published import (
    CHECKPOINT_MODEL_FILE,
    REQUEST_FILE,
    WEIGHTS_HASH,
    WEIGHTS_POINTER,
    latest_published,
    model_file,
    move_pointer,
    published_versions,
    read_checkpoint_weights,
    read_pointer,
    read_published,
    read_requested_version,
    remove_weights_below,
    request_version,
)
from rftdask.testing.storage_faults import FaultyStorage
from tests.unit.synchronizer.sync_cases import new_storage, publish_weights


@pytest.fixture
def storage() -> Storage:
    return new_storage()


def test_the_pointer_names_the_published_version(storage: Storage) -> None:
    assert latest_published(storage) is None
    published = publish_weights(storage, 3, b"w3")
    assert latest_published(storage) == published == read_published(storage, 3)
    assert (published.version, published.lineage, published.folder) == (3, "main", "weights/3")
    assert [name for name, _ in published.files] == ["model.safetensors"]
    assert storage.get(WEIGHTS_POINTER) == b"3\n"


def test_an_existing_version_is_kept(storage: Storage) -> None:
    first = publish_weights(storage, 3, b"w3")
    assert publish_weights(storage, 3, b"other bytes") == first
    assert storage.get("weights/3/model.safetensors") == b"w3"


@pytest.mark.parametrize("of_another_version", [False, True])
def test_an_invalid_version_does_not_exist_and_is_written_again(storage: Storage, of_another_version: bool) -> None:
    storage.put("weights/3/model.safetensors", b"torn")
    if of_another_version:
        write_folder(storage, "weights/3", Manifest("main", 2, {}), {"model.safetensors": b"w2"})
    assert read_published(storage, 3) is None
    publish_weights(storage, 3, b"w3")
    assert storage.get("weights/3/model.safetensors") == b"w3"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_the_pointer_never_goes_back(versions: list[int]) -> None:
    storage = new_storage()
    highest = 0
    for version in versions:
        write_folder(storage, f"weights/{version}", Manifest("main", version, {}), {})
        assert move_pointer(storage, WEIGHTS_POINTER, version) is (version > highest)
        highest = max(highest, version)
        assert read_pointer(storage, WEIGHTS_POINTER) == highest


@pytest.mark.parametrize("data", [b"", b"\n", b"x", b"-3", b"3.0", b"3 4", "\u0663".encode(), b"\xff\x00", b"0x1"])
def test_an_unreadable_pointer_counts_as_unchanged(storage: Storage, data: bytes) -> None:
    publish_weights(storage, 3, b"w3")
    storage.put(WEIGHTS_POINTER, data)
    assert read_pointer(storage, WEIGHTS_POINTER) is None
    assert latest_published(storage) is None
    publish_weights(storage, 4, b"w4")
    assert read_pointer(storage, WEIGHTS_POINTER) == 4


def test_a_pointer_to_missing_or_damaged_weights_is_ignored(storage: Storage) -> None:
    move_pointer(storage, WEIGHTS_POINTER, 9)
    assert latest_published(storage) is None
    storage.put(f"weights/9/{NAME}", b"{")
    assert latest_published(storage) is None


def test_a_larger_pointer_without_a_target_is_overwritten(storage: Storage) -> None:
    publish_weights(storage, 3, b"w3")
    storage.put(WEIGHTS_POINTER, b"90\n")
    publish_weights(storage, 10, b"w10")
    assert read_pointer(storage, WEIGHTS_POINTER) == 10


def test_old_weights_are_removed_but_never_the_newest(storage: Storage) -> None:
    for version in (1, 2, 3, 10):
        publish_weights(storage, version, b"w")
    remove_weights_below(storage, 3)
    assert published_versions(storage) == [3, 10]
    remove_weights_below(storage, 99)
    assert published_versions(storage) == [10]
    assert latest_published(storage) is not None


def test_removal_needs_a_pointer_and_takes_the_manifest_first(storage: Storage) -> None:
    for version in (1, 2):
        publish_weights(storage, version, b"w")
    storage.put(WEIGHTS_POINTER, b"?")
    remove_weights_below(storage, 99)
    assert published_versions(storage) == [1, 2]
    storage.put(WEIGHTS_POINTER, b"2\n")
    with pytest.raises(StorageError, match="killed"):
        remove_weights_below(FaultyStorage(storage, killed_before("remove", "weights/1")), 2)
    assert read_published(storage, 1) is None


def test_only_folders_with_a_number_are_versions(storage: Storage) -> None:
    publish_weights(storage, 12, b"w")
    for path in ("weights/notes/x", "weights/7", "weights/readme.txt"):
        storage.put(path, b"?")
    assert published_versions(storage) == [12]


def test_the_policy_of_a_checkpoint_loads_as_if_published(storage: Storage) -> None:
    assert read_checkpoint_weights(storage, "global_step_4") is None
    files = {CHECKPOINT_MODEL_FILE: b"policy", "actor/optimizer.safetensors": b"adam"}
    manifest = write_folder(storage, "global_step_4", Manifest("main", 4, {}), files)
    published = read_checkpoint_weights(storage, "global_step_4")
    assert published is not None
    assert (published.version, published.folder) == (4, "global_step_4")
    assert dict(published.files) == {CHECKPOINT_MODEL_FILE: manifest.files[CHECKPOINT_MODEL_FILE]}
    assert published.content_hash == publish_weights(storage, 4, b"policy").content_hash
    write_folder(storage, "global_step_5", Manifest("main", 5, {}), {"other": b""})
    assert read_checkpoint_weights(storage, "global_step_5") is None
    assert read_manifest(storage, "global_step_5") is not None


def test_a_checkpoint_of_several_ranks_has_one_file_per_rank(storage: Storage) -> None:
    files = {model_file(rank, 2): b"part %d" % rank for rank in range(2)}
    kept = {f"actor/{name}": data for name, data in files.items()}
    others = {"actor/optim.safetensors": b"adam", "actor/kl_coefs.safetensors": b"k", "critic/model.safetensors": b"c"}
    write_folder(storage, "global_step_4", Manifest("main", 4, {}), {**kept, **others})
    published = read_checkpoint_weights(storage, "global_step_4")
    assert published is not None and [name for name, _ in published.files] == list(kept)
    assert published.content_hash == publish_weights(storage, 4, files).content_hash


def test_a_checkpoint_records_the_published_hash(storage: Storage) -> None:
    published = publish_weights(storage, 4, b"narrow")
    files, extra = {CHECKPOINT_MODEL_FILE: b"wide"}, {WEIGHTS_HASH: published.content_hash}
    write_folder(storage, "global_step_4", Manifest("main", 4, {}, extra), files)
    kept = read_checkpoint_weights(storage, "global_step_4")
    assert kept is not None and kept.content_hash == published.content_hash


def test_the_requested_version_is_read_back(storage: Storage) -> None:
    assert read_requested_version(storage) == 0
    request_version(storage, 7)
    assert read_requested_version(storage) == 7
    storage.put(REQUEST_FILE, b"soon")
    assert read_requested_version(storage) == 0
