"""Promises of deltas: a rebuilt version equals the complete one bit by bit on every machine."""

import itertools
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_kills import killed_at_put

from rftdask.errors import DamagedError, NotFoundError, StorageError
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer import delta as deltas
from rftdask.synchronizer import manifest as manifests
from rftdask.synchronizer import node_cache as node_copy
from rftdask.synchronizer.delta import DeltaFile, compute_delta
from rftdask.synchronizer.manifest import NAME, read_manifest
from rftdask.synchronizer.node_cache import NodeCache
from rftdask.synchronizer.published import (
    WEIGHTS_POINTER,
    Published,
    is_loadable,
    latest_published,
    published_as,
    published_versions,
    read_pointer,
    read_published,
    remove_weights_below,
)
from rftdask.synchronizer.publisher import Publisher
from rftdask.testing.storage_faults import FaultyStorage
from tests.unit.synchronizer.sync_cases import new_storage, publish_weights

NUM_WORDS = 4000
TIMEOUT_S = 5.0
MODEL = "model.safetensors"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary TMPDIR, with blocks of 1,000 bytes."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for module in (manifests, node_copy, deltas):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1000)
    return folder


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "run")) if request.param == "folder" else new_storage()


def weights(version: int) -> dict[str, bytes]:
    """Weights of a version: 40 of 4,000 words change from version to version."""
    words = np.random.default_rng(0).integers(0, 2**16, NUM_WORDS).astype(np.uint16)
    for step in range(1, version + 1):
        words[np.random.default_rng(step).choice(NUM_WORDS, 40, replace=False)] ^= 1
    return {MODEL: words.tobytes()}


def publish(storage: Storage, versions: range, full_publish_interval: int = 100) -> list[Published]:
    publisher = Publisher(storage, "main", full_publish_interval)
    return [publisher.publish(version, weights(version)) for version in versions]


def made(storage: Storage, published: Published) -> dict[str, bytes]:
    copy = NodeCache(storage, published, TIMEOUT_S)
    try:
        return {path.name: path.read_bytes() for path in copy.files}
    finally:
        copy.close()


def stored_bytes(storage: Storage, version: int) -> int:
    manifest = read_manifest(storage, f"weights/{version}")
    assert manifest is not None
    return sum(len(storage.get(f"weights/{version}/{name}")) for name in manifest.files)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 1300), st.integers(0, 40))
def test_a_delta_rebuilds_the_new_file_from_the_old_one(seed: int, size: int, num_changed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 2**16, size + 1000).astype(np.uint16)
    new = old.copy()
    new[rng.integers(0, len(new), num_changed)] = rng.integers(0, 2**16, num_changed)
    data = compute_delta(old.tobytes(), new.tobytes())
    assert data is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.delta")
        path.write_bytes(data)
        delta = DeltaFile(path)
        assert delta.num_blocks == -(-2 * len(old) // 1000)
        for number in range(delta.num_blocks):
            block = old[number * 500 : (number + 1) * 500]
            positions, xors = delta.changes(number)
            before = block[positions].tobytes()
            block[positions] ^= xors
            assert delta.is_result(number, block[positions].tobytes())
            assert not len(positions) or not (xors == 0).any()
            assert not len(positions) or not delta.is_result(number, before)
    assert (old == new).all()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"abcd", b"abcdef"),
        (b"abc", b"abd"),
        (b"", b""),
        (bytes(9000), np.random.default_rng(0).bytes(9000)),
        (b"ab", b"ac"),
    ],
    ids=["longer", "odd", "empty", "all", "small"],
)
def test_a_delta_that_saves_too_little_is_not_published(old: bytes, new: bytes) -> None:
    assert compute_delta(old, new) is None


def test_float32_weights_have_no_delta() -> None:
    values = np.random.default_rng(0).normal(0, 0.02, 100_000).astype(np.float32)
    assert compute_delta(values.tobytes(), (values * np.float32(1.00001)).tobytes()) is None


def test_a_file_that_is_not_a_delta_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"hello", b"\x02\0\0\0\0\0\0\0{}"):
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(DamagedError, match="is not a delta"):
            DeltaFile(tmp_path / "x")


def test_a_chain_of_deltas_equals_complete_versions_bit_by_bit(storage: Storage) -> None:
    publisher = Publisher(storage, "main", 10)
    other = new_storage()
    served = None
    for version in range(1, 41):
        published = publisher.publish(version, weights(version))
        assert (published.delta is None) == (version % 10 == 1)
        copy = NodeCache(storage, published, TIMEOUT_S)
        assert copy.files[0].read_bytes() == weights(version)[MODEL]
        if served is not None:
            served.close()
        served = copy
        if version % 15 == 0:
            whole = publish_weights(other, version, weights(version))
            assert (whole.content_hash, whole.files) == (published.content_hash, published.files)
            assert published == whole, "the same weights"
            remove_weights_below(storage, version - 1)
    manifest = read_manifest(storage, "weights/40")
    assert manifest is not None and published_as(manifest, "").content_hash == published.content_hash
    assert served is not None
    served.close()


def test_deltas_are_small_and_every_nth_version_is_complete(storage: Storage) -> None:
    bases = [
        published.delta and (published.delta.base, published.delta.whole)
        for published in publish(storage, range(1, 8), 3)
    ]
    assert bases == [None, (1, 1), (2, 1), None, (4, 4), (5, 4), None]
    assert stored_bytes(storage, 1) == 2 * NUM_WORDS
    assert stored_bytes(storage, 2) < 2 * NUM_WORDS / 2
    assert [published.delta for published in publish(new_storage(), range(1, 4), 1)] == [None] * 3


def test_a_machine_with_the_base_reads_only_the_delta(storage: Storage) -> None:
    versions, reads = publish(storage, range(1, 5)), list[str]()

    def note(verb: str, path: str, stage: str) -> None:
        if stage == "after" and not path.endswith(NAME):
            reads.append(path)

    noted = FaultyStorage(storage, note)
    cold = NodeCache(noted, versions[2], TIMEOUT_S)
    assert sorted(set(reads)) == [f"weights/1/{MODEL}", f"weights/2/{MODEL}.delta", f"weights/3/{MODEL}.delta"]
    reads.clear()
    warm = NodeCache(noted, versions[3], TIMEOUT_S)
    assert set(reads) == {f"weights/4/{MODEL}.delta"}
    assert warm.files[0].read_bytes() == weights(4)[MODEL]
    cold.close()
    warm.close()


def test_an_unused_version_leaves_nothing_on_the_machine(storage: Storage, temporary: Path) -> None:
    versions = publish(storage, range(1, 4))
    copies = [NodeCache(storage, published, TIMEOUT_S) for published in versions]
    for copy in copies:
        copy.close()
    assert not [path for path in temporary.rglob("*") if path.is_file()]


@pytest.mark.parametrize("damaged", [f"weights/1/{MODEL}", f"weights/2/{MODEL}.delta", f"weights/3/{MODEL}.delta"])
def test_a_damaged_link_is_never_served(storage: Storage, damaged: str) -> None:
    newest = publish(storage, range(1, 4))[-1]
    assert is_loadable(storage, 3)
    data = bytearray(storage.get(damaged))
    data[len(data) // 2] ^= 1
    storage.put(damaged, bytes(data))
    assert not is_loadable(storage, 3)
    with pytest.raises(DamagedError):
        NodeCache(storage, newest, TIMEOUT_S)


def test_a_missing_or_replaced_base_is_an_error(storage: Storage) -> None:
    newest = publish(storage, range(1, 4))[-1]
    storage.remove("weights/2")
    assert not is_loadable(storage, 3)
    with pytest.raises(DamagedError, match="delta from version 2, which was removed or replaced"):
        NodeCache(storage, newest, TIMEOUT_S)
    publish_weights(storage, 2, weights(9))
    with pytest.raises(DamagedError, match="delta from version 2, which was removed or replaced"):
        NodeCache(storage, newest, TIMEOUT_S)
    storage.remove("weights/2")
    publish_weights(storage, 2, weights(2))
    assert made(storage, newest) == weights(3), "the complete base is as good"


def test_bases_of_kept_versions_are_kept(storage: Storage) -> None:
    publish(storage, range(1, 9), 3)  # complete versions: 1, 4, 7
    remove_weights_below(storage, 3)
    assert published_versions(storage) == list(range(1, 9))
    remove_weights_below(storage, 6)
    assert published_versions(storage) == list(range(4, 9))
    remove_weights_below(storage, 99)
    assert published_versions(storage) == [7, 8]
    assert made(storage, latest_published(storage) or pytest.fail()) == weights(8)


def test_removal_killed_anywhere_leaves_no_version_without_base() -> None:
    for killed_at in itertools.count():
        folder = new_storage()
        publish(folder, range(1, 7), 4)  # complete versions: 1, 5
        removes = itertools.count()

        def kill(
            verb: str, path: str, stage: str, killed_at: int = killed_at, removes: Iterator[int] = removes
        ) -> None:
            if (verb, stage) == ("remove", "before") and next(removes) == killed_at:
                raise StorageError("killed")

        try:
            remove_weights_below(FaultyStorage(folder, kill), 6)
        except StorageError:
            there = [version for version in range(1, 7) if read_published(folder, version)]
            assert all(is_loadable(folder, version) for version in there)
        else:
            assert published_versions(folder) == [5, 6] and killed_at == 8
            return


def test_a_kill_at_any_write_leaves_the_old_or_the_new_version() -> None:
    for killed_at in itertools.count():
        folder = new_storage()
        publish(folder, range(1, 3))
        puts: list[str] = []
        publisher = Publisher(FaultyStorage(folder, killed_at_put(killed_at + 3, puts)), "main", 100)
        publisher.publish(2, weights(2))  # exists already
        assert publisher.publish(3, weights(3)).delta is None, "the base may be of another process"
        try:
            published = publisher.publish(4, weights(4))
        except StorageError:
            newest = latest_published(folder)
            assert newest is not None and newest.version == 3 and made(folder, newest) == weights(3)
            # The next process finds the version or writes it again.
            assert made(folder, publish(folder, range(4, 5))[0]) == weights(4)
        else:
            assert published.delta is not None and read_pointer(folder, WEIGHTS_POINTER) == 4
            assert puts[3:] == [f"weights/4/{MODEL}.delta", f"weights/4/{NAME}", WEIGHTS_POINTER]
            return


def test_the_last_delta_can_be_completed_afterwards(storage: Storage) -> None:
    publisher = Publisher(storage, "main", 100)
    for version in (1, 2, 3):
        published = publisher.publish(version, weights(version))
    publisher.take_spare()
    publisher.write_whole(2)  # this process no longer has its bytes
    assert (read_published(storage, 2) or pytest.fail()).delta is not None
    storage.remove("weights/1")
    with pytest.raises((DamagedError, NotFoundError)):
        NodeCache(storage, published, TIMEOUT_S)
    publisher.write_whole(3)
    again = read_published(storage, 3)
    assert again is not None and again.delta is None and again == published
    assert made(storage, again) == weights(3)
    following = publisher.publish(4, weights(4))
    assert following.delta is not None and following.delta.whole == 3
    assert made(storage, following) == weights(4)


def test_the_delta_before_the_last_can_be_completed(storage: Storage) -> None:
    publisher = Publisher(storage, "main", 100)
    for version in (1, 2, 3):
        published = publisher.publish(version, weights(version))
    publisher.write_whole(2)
    storage.remove("weights/1")
    again = read_published(storage, 2)
    assert again is not None and again.delta is None and made(storage, again) == weights(2)
    assert made(storage, published) == weights(3) and read_pointer(storage, WEIGHTS_POINTER) == 3
    following = publisher.publish(4, weights(4))
    assert following.delta is not None and following.delta.base == 3


def test_added_or_removed_files_make_a_complete_version(storage: Storage) -> None:
    publisher = Publisher(storage, "main", 100)
    files: Mapping[str, bytes] = weights(1)
    publisher.publish(1, files)
    assert publisher.publish(2, {**files, "b": bytes(2000)}).delta is None
    assert publisher.publish(3, {**weights(2), "b": bytes(2000)}).delta is not None
    assert publisher.publish(4, weights(2)).delta is None


@pytest.mark.slow
def test_a_process_killed_while_rebuilding_leaves_nothing_valid(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "run"))
    newest = publish(storage, range(1, 3))[-1]
    for killed_at in range(2 * NUM_WORDS // 1000):
        if not (pid := os.fork()):
            check = node_copy.check_block

            def die(path: str, *rest: Any, number: int = killed_at, check: Callable[..., None] = check) -> None:
                if path.endswith(f"weights/2/{MODEL}") and rest[-1] == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                check(path, *rest)

            node_copy.check_block = die
            NodeCache(storage, newest, TIMEOUT_S)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        assert NodeCache.find(storage, newest) is None
    assert made(storage, newest) == weights(2)
