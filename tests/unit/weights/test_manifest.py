"""Promises of a manifest: a folder without a valid one is not there, and no byte is believed that it does not name."""

from __future__ import annotations

import itertools

import pytest
from storage_kills import killed_at_put

from rftdask.errors import DamagedError, NotFoundError, StorageError
from rftdask.storage import Storage, open_storage
from rftdask.testing.storage_faults import FaultyStorage
from rftdask.weights.manifest import (
    NAME,
    FileEntry,
    Manifest,
    extend_folder,
    is_valid,
    read_file,
    read_manifest,
    remove_folder,
    write_folder,
)

FILES = {"model.safetensors": b"weights", "a/b.json": b"{}"}
_numbers = itertools.count()


@pytest.fixture
def storage() -> Storage:
    return open_storage(f"memory://manifest-{next(_numbers)}")


def write(storage: Storage, files: dict[str, bytes] = FILES) -> Manifest:
    return write_folder(storage, "weights/3", files, lineage="main", version=3, extra={"note": 1})


def test_a_folder_comes_back_as_it_was_written(storage: Storage) -> None:
    written = write(storage)
    found = read_manifest(storage, "weights/3")
    assert found == written
    assert found is not None
    assert (found.lineage, found.version, found.extra) == ("main", 3, {"note": 1})
    assert {name: read_file(storage, "weights/3", found, name) for name in found.files} == FILES
    assert is_valid(storage, "weights/3")


@pytest.mark.parametrize("killed_at", range(3))
def test_a_folder_is_not_there_until_its_manifest_is(storage: Storage, killed_at: int) -> None:
    puts: list[str] = []

    with pytest.raises(StorageError, match="killed"):
        write(FaultyStorage(storage, killed_at_put(killed_at, puts)))
    assert puts[killed_at:] == [f"weights/3/{[*FILES, NAME][killed_at]}"]
    assert read_manifest(storage, "weights/3") is None
    assert not is_valid(storage, "weights/3")


@pytest.mark.parametrize("path", ["model.safetensors", "a/b.json"])
@pytest.mark.parametrize("data", [None, b"", b"WEIGHTS", b"weightsX"])
def test_a_missing_or_changed_file_makes_the_folder_invalid(storage: Storage, path: str, data: bytes | None) -> None:
    manifest = write(storage)
    if data is None:
        storage.remove(f"weights/3/{path}")
    else:
        storage.put(f"weights/3/{path}", data)
    with pytest.raises((DamagedError, NotFoundError), match=f"weights/3/{path}"):
        read_file(storage, "weights/3", manifest, path)
    assert not is_valid(storage, "weights/3")


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b"\xff", b'{"files": [], "lineage": "", "version": 1, "extra": {}}']
)
def test_a_manifest_that_cannot_be_read_is_told(storage: Storage, data: bytes) -> None:
    write(storage)
    storage.put(f"weights/3/{NAME}", data)
    with pytest.raises(DamagedError, match=r"weights/3/MANIFEST.json is damaged"):
        read_manifest(storage, "weights/3")
    assert not is_valid(storage, "weights/3")


def test_a_folder_grows_in_one_step(storage: Storage) -> None:
    seen: list[set[str]] = []

    def look(verb: str, path: str, stage: str) -> None:
        manifest = read_manifest(storage, "weights/3")
        assert manifest is not None
        assert is_valid(storage, "weights/3")
        seen.append(set(manifest.files))

    grown = extend_folder(FaultyStorage(storage, look), "weights/3", write(storage), {"x": b"1", "y": b"2"})
    assert read_manifest(storage, "weights/3") == grown
    assert [len(names) for names in seen] == [2, 2, 2, 2, 2, 4]


def test_a_folder_is_gone_before_its_files_are(storage: Storage) -> None:
    # On an object store a folder goes file by file: who is killed half-way must not leave one that says it is whole.
    write(storage)
    removed: list[tuple[str, bool]] = []

    def look(verb: str, path: str, stage: str) -> None:
        if verb == "remove" and stage == "before":
            removed.append((path, read_manifest(storage, "weights/3") is not None))

    remove_folder(FaultyStorage(storage, look), "weights/3")
    assert removed == [(f"weights/3/{NAME}", True), ("weights/3", False)]
    assert storage.list("weights") == []


def test_the_content_hash_names_content_and_not_version() -> None:
    one, two = FileEntry(1, "aa"), FileEntry(2, "bb")
    assert (
        Manifest("main", 1, {"x": one, "y": two}).content_hash == Manifest("fork", 2, {"y": two, "x": one}).content_hash
    )
    assert Manifest("main", 1, {"x": one}).content_hash != Manifest("main", 1, {"x": two}).content_hash
    assert Manifest("main", 1, {"x": one}).content_hash != Manifest("main", 1, {"z": one}).content_hash
