"""Promises of a manifest: a folder without a valid one does not exist, and only bytes that match it are trusted."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from storage_kills import killed_at_put

from rftdask.errors import DamagedError, NotFoundError, StorageError
from rftdask.storage import Storage, open_storage
from rftdask.storage.base import Data
from rftdask.storage.memory import MemoryStorage
from rftdask.synchronizer import manifest as manifests
from rftdask.synchronizer.manifest import (
    NAME,
    FileEntry,
    Manifest,
    blocks_of,
    check_file,
    commit_folder,
    is_valid,
    read_file,
    read_manifest,
    remove_folder,
    stream_blocks,
    verify_blocks,
    write_folder,
)
from rftdask.testing.storage_faults import FaultyStorage
from tests.unit.synchronizer.sync_cases import new_storage

FILES = {"model.safetensors": b"weights", "a/b.json": b"{}"}


@pytest.fixture(params=["memory", "disk"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return new_storage() if request.param == "memory" else open_storage(str(tmp_path))


def write(storage: Storage, files: dict[str, bytes] = FILES) -> Manifest:
    return write_folder(storage, "weights/3", Manifest("main", 3, {}, {"note": 1}), files)


def test_a_folder_is_read_back_as_written(storage: Storage) -> None:
    written = write(storage)
    found = read_manifest(storage, "weights/3")
    assert found == written
    assert found is not None
    assert (found.lineage, found.version, found.extra) == ("main", 3, {"note": 1})
    assert {name: read_file(storage, "weights/3", found, name) for name in found.files} == FILES
    assert is_valid(storage, "weights/3")


@pytest.mark.parametrize("killed_at", range(3))
def test_a_folder_does_not_exist_before_its_manifest(storage: Storage, killed_at: int) -> None:
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
def test_an_unreadable_manifest_is_an_error(storage: Storage, data: bytes) -> None:
    write(storage)
    storage.put(f"weights/3/{NAME}", data)
    with pytest.raises(DamagedError, match=r"weights/3/MANIFEST.json is damaged"):
        read_manifest(storage, "weights/3")
    assert not is_valid(storage, "weights/3")


def test_a_folder_grows_atomically(storage: Storage) -> None:
    seen: list[set[str]] = []

    def look(verb: str, path: str, stage: str) -> None:
        manifest = read_manifest(storage, "weights/3")
        assert manifest is not None
        assert is_valid(storage, "weights/3")
        seen.append(set(manifest.files))

    grown = write_folder(FaultyStorage(storage, look), "weights/3", write(storage), {"x": b"1", "y": b"2"})
    assert read_manifest(storage, "weights/3") == grown
    assert [len(names) for names in seen] == [2, 2, 2, 2, 2, 4]


def test_a_folder_is_gone_before_its_files(storage: Storage) -> None:
    # An object store removes file by file; a kill half-way must not leave a folder with a valid manifest.
    write(storage)
    removed: list[tuple[str, bool]] = []

    def look(verb: str, path: str, stage: str) -> None:
        if verb == "remove" and stage == "before":
            removed.append((path, read_manifest(storage, "weights/3") is not None))

    remove_folder(FaultyStorage(storage, look), "weights/3")
    assert removed == [(f"weights/3/{NAME}", True), ("weights/3", False)]
    assert storage.list("weights") == []


def test_the_content_hash_depends_on_content_only() -> None:
    one, two = FileEntry(1, "aa"), FileEntry(2, "bb")
    assert (
        Manifest("main", 1, {"x": one, "y": two}).content_hash == Manifest("fork", 2, {"y": two, "x": one}).content_hash
    )
    assert Manifest("main", 1, {"x": one}).content_hash != Manifest("main", 1, {"x": two}).content_hash
    assert Manifest("main", 1, {"x": one}).content_hash != Manifest("main", 1, {"z": one}).content_hash


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "BLOCK_BYTES", 4)
    monkeypatch.setattr(manifests, "PIECE_BYTES", 2)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("size", range(10))
def test_every_byte_of_a_file_counts(size: int) -> None:
    data = bytes(range(size))
    entry = FileEntry.of(data)
    check_file("model", data, entry)
    for place in range(size):
        with pytest.raises(DamagedError):
            check_file("model", data[:place] + b"x" + data[place + 1 :], entry)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("num_readers", [1, 2, 3, 7])
def test_readers_verify_a_folder_together(storage: Storage, num_readers: int) -> None:
    written = write(storage, {"large": b"0123456789", "small": b"123", "four": b"1234"})
    assert [len(written.files[name].blocks) for name in ("large", "small", "four")] == [3, 0, 0]
    assert read_manifest(storage, "weights/3") == written

    def verify() -> None:
        for place in range(num_readers):
            list(verify_blocks(storage, "weights/3", written, blocks_of(written)[place::num_readers]))

    verify()
    for data in (b"x123456789", b"0123x56789", b"012345678x", b"012345678", b"01234567", b"0123456789x", b""):
        storage.put("weights/3/large", data)
        with pytest.raises(DamagedError):
            verify()
        assert not is_valid(storage, "weights/3")


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 6, 8, 9])
def test_blocks_come_in_pieces_and_a_wrong_one_never_completely(storage: Storage, size: int) -> None:
    data = bytes(range(size))
    written = write(storage, {"first": b"xyz", "large": data})
    blocks = [block for block in blocks_of(written) if block[0] == "large"]

    def pieces() -> Iterator[Data]:
        return stream_blocks(storage, "weights/3", written, [("first", 0), *blocks])

    assert [bytes(piece) for piece in pieces() if len(piece)] == [
        *(b"xy", b"z"),
        *(data[place : place + 2] for place in range(0, size, 2)),
    ]
    changed = [data[:place] + b"x" + data[place + 1 :] for place in range(size)]
    for wrong in [*changed, *(data[:place] for place in range(size)), data + b"x"]:
        storage.put("weights/3/large", wrong)
        seen = b""
        with pytest.raises(DamagedError, match="large"):
            for piece in pieces():
                seen += piece
        assert len(seen) < 3 + max(1, size)


@pytest.mark.usefixtures("small_blocks")
def test_readers_share_the_blocks() -> None:
    reads: list[tuple[str, int]] = []

    class Counting(MemoryStorage):
        def get_part(self, path: str, start: int, stop: int) -> bytes:
            data = super().get_part(path, start, stop)
            reads.append((path, len(data)))
            return data

    storage = Counting("memory://counted-blocks")
    written = write(storage, {"large": b"0123456789", "other": b"0123456"})
    for place in range(3):
        list(verify_blocks(storage, "weights/3", written, blocks_of(written)[place::3]))
    large, other = "weights/3/large", "weights/3/other"
    assert sorted(reads) == [(large, 2), (large, 4), (large, 4), (other, 3), (other, 4)]


@pytest.mark.usefixtures("small_blocks")
def test_block_hashes_and_older_byte_hashes_both_verify(storage: Storage) -> None:
    data = b"0123456789"
    now = write(storage, {"large": data}).files["large"]
    assert now.sha256 == hashlib.sha256("".join(now.blocks).encode()).hexdigest()
    before = FileEntry(len(data), hashlib.sha256(data).hexdigest(), now.blocks)
    commit_folder(storage, "weights/3", Manifest("main", 3, {"large": before}))
    assert is_valid(storage, "weights/3")
    assert read_file(storage, "weights/3", Manifest("main", 3, {"large": before}), "large") == data
    storage.put("weights/3/large", b"0123x56789")
    assert not is_valid(storage, "weights/3")


def test_a_manifest_without_blocks_is_read(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write(storage, {"large": b"0123456789"})
    monkeypatch.setattr(manifests, "BLOCK_BYTES", 4)
    assert read_manifest(storage, "weights/3") == written
    assert is_valid(storage, "weights/3")
