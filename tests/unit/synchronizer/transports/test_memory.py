"""Promises of in-memory versions: what an engine may load is held, or written to storage in time."""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rftdask.errors import NotFoundError
from rftdask.processes.ranks import Ranks
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.fingerprint import Fingerprint
from rftdask.synchronizer.node_cache import SHARED_MEMORY, NodeCache
from rftdask.synchronizer.published import (
    Published,
    held_versions,
    is_loadable,
    latest_published,
    latest_written,
    read_published,
    remove_weights_below,
)
from rftdask.synchronizer.publisher import Publisher
from rftdask.synchronizer.transports.memory import InMemoryPublisher
from tests.thread_ranks import in_threads
from tests.unit.synchronizer.sync_cases import new_storage
from tests.unit.synchronizer.test_publisher import staged

TIMEOUT_S = 5.0
SAID = Fingerprint(sequences=((3, 1, 4),), logprobs=((-2.5, -0.1),), dtype="float32")


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replacement of /dev/shm, and a temporary TMPDIR."""
    for name in ("memory", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv(SHARED_MEMORY, str(tmp_path / "memory"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "memory"


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "run")) if request.param == "folder" else new_storage()


def together(storage: Storage, size: int, work: Callable[[Publisher, Ranks], Any], *, holds: bool = True) -> list[Any]:
    def rank(ranks: Ranks) -> Any:
        publisher = Publisher(storage, "main", 1, ranks, InMemoryPublisher(storage) if holds else None)
        return work(publisher, ranks)

    return in_threads(size, rank)


def publish(publisher: Publisher, ranks: Ranks, version: int) -> Published:
    return publisher.publish(version, staged(version, ranks), SAID)


def content(copy: NodeCache) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in copy.files}


def left(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("size", [1, 2])
def test_in_memory_files_equal_stored_files(storage: Storage, size: int, memory: Path) -> None:
    as_files = new_storage()
    (expected, *_) = together(as_files, size, lambda publisher, ranks: publish(publisher, ranks, 1), holds=False)

    def work(publisher: Publisher, ranks: Ranks) -> dict[str, bytes]:
        published = publish(publisher, ranks, 1)
        assert published == expected and published.held is not None
        ranks.broadcast(None)
        there = latest_published(storage)
        assert there == expected and there is not None and there.held is not None and there.fingerprint == SAID
        assert not storage.list("weights/1") or storage.list("weights/1") == ["MANIFEST.json"]
        copy = NodeCache(storage, there, TIMEOUT_S)
        found = content(copy)
        copy.close()
        ranks.all_gather(None)
        return found

    written = NodeCache(as_files, expected, TIMEOUT_S)
    assert together(storage, size, work) == [content(written)] * size
    written.close()


@pytest.mark.parametrize("size", [1, 2])
def test_a_version_written_to_storage_leaves_memory(storage: Storage, size: int, memory: Path) -> None:
    def work(publisher: Publisher, ranks: Ranks) -> list[Published]:
        made = [publish(publisher, ranks, version) for version in (1, 2)]
        ranks.all_gather(None)
        assert not is_loadable(storage, 1) and held_versions(storage, 0) == [1, 2] and held_versions(storage, 1) == [2]
        assert latest_written(storage) is None
        ranks.all_gather(None)
        publisher.write_held()
        ranks.all_gather(None)
        return made

    made, *_ = together(storage, size, work)
    assert [read_published(storage, version) for version in (1, 2)] == made
    assert is_loadable(storage, 1) and is_loadable(storage, 2) and not held_versions(storage, 0)
    assert latest_written(storage) == made[1]
    assert not left(memory)


def test_versions_that_cannot_be_loaded_are_released(storage: Storage, memory: Path) -> None:
    publisher = Publisher(storage, "main", holder=InMemoryPublisher(storage))
    published = [publish(publisher, Ranks(), version) for version in (1, 2)]
    remove_weights_below(storage, 2)
    served = NodeCache(storage, published[0], TIMEOUT_S)
    publish(publisher, Ranks(), 3)
    assert [path.read_bytes() for path in served.files], "an engine serves it"
    served.close()
    with pytest.raises(NotFoundError, match="no process on this machine holds"):
        NodeCache(storage, published[0], TIMEOUT_S)
    publisher.write_held()
    assert [is_loadable(storage, version) for version in (1, 2, 3)] == [False, True, True]


def test_without_memory_a_version_is_written_to_storage(
    storage: Storage, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(file: int, data: object, place: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", no_room)
    published = publish(Publisher(storage, "main", holder=InMemoryPublisher(storage)), Ranks(), 1)
    monkeypatch.undo()
    assert published.held is None and is_loadable(storage, 1)
    assert "version 1 is written to storage instead of memory: cannot store weights below" in caplog.text
    assert not left(memory)


def test_a_half_written_version_of_a_dead_rank_is_not_loadable(storage: Storage) -> None:
    publisher = Publisher(storage, "main", holder=InMemoryPublisher(storage))
    published = publish(publisher, Ranks(), 1)
    file = NodeCache(storage, published, TIMEOUT_S)
    storage.put("weights/1/model.safetensors", file.files[0].read_bytes())
    file.close()
    assert not is_loadable(storage, 1), "its manifest still marks it as in memory"
    again = publish(Publisher(storage, "main", holder=InMemoryPublisher(storage)), Ranks(), 1)
    assert again == published and again.held is not None
