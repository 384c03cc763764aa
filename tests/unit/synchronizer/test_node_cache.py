"""Promises of the node cache: each byte is read once per machine and verified; a version in use stays."""

import os
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rftdask.errors import DamagedError, NotFoundError, WaitTimeout
from rftdask.storage import Storage, open_storage, shared_folder
from rftdask.synchronizer import manifest as manifests
from rftdask.synchronizer import node_cache as node_copy
from rftdask.synchronizer.node_cache import NodeCache
from rftdask.synchronizer.published import Published
from rftdask.testing.storage_faults import FaultyStorage
from tests.unit.synchronizer.sync_cases import new_storage, publish_weights

DATA = b"0123456789"
TIMEOUT_S = 5.0


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary TMPDIR, with blocks of 4 bytes."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(manifests, "BLOCK_BYTES", 4)
    monkeypatch.setattr(node_copy, "BLOCK_BYTES", 4)
    return folder


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "run")) if request.param == "folder" else new_storage()


def publish(storage: Storage, version: int = 1) -> Published:
    return publish_weights(storage, version, DATA)


def left(temporary: Path) -> list[str]:
    return sorted(path.name for path in temporary.rglob("*") if path.is_file())


def test_the_first_process_reads_and_the_others_map(storage: Storage, temporary: Path) -> None:
    published, reads = publish(storage), list[str]()

    def note(verb: str, path: str, stage: str) -> None:
        if stage == "after":
            reads.append(f"{verb} {path}")

    first, second = (NodeCache(FaultyStorage(storage, note), published, TIMEOUT_S) for _ in range(2))
    assert reads == ["get weights/1/model.safetensors"] * 3, "each block once, for both"
    assert first.files == second.files
    assert [file.read_bytes() for file in second.files] == [DATA]
    assert [file.is_relative_to(temporary) for file in first.files] == [storage.url.startswith("memory")]
    first.close()
    assert second.files[0].read_bytes() == DATA and left(temporary)
    second.close()
    second.close()
    assert not left(temporary)


def test_one_of_several_concurrent_processes_reads(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    published, together, looked = publish(storage), threading.Barrier(3), threading.local()
    is_whole = NodeCache._is_whole

    def look(copy: NodeCache) -> bool:
        found = is_whole(copy)
        if not getattr(looked, "once", False):
            looked.once = True
            together.wait(TIMEOUT_S)
        return found

    monkeypatch.setattr(NodeCache, "_is_whole", look)
    with ThreadPoolExecutor(3) as threads:
        copies = [
            each.result() for each in [threads.submit(NodeCache, storage, published, TIMEOUT_S) for _ in range(3)]
        ]
    assert [copy.files[0].read_bytes() for copy in copies] == [DATA] * 3
    for copy in copies:
        copy.close()


def test_damaged_or_missing_weights_are_not_handed_out(storage: Storage, temporary: Path) -> None:
    published = publish(storage)
    for data in (b"0123x56789", b"012345678", b"0123456789x"):
        storage.put("weights/1/model.safetensors", data)
        with pytest.raises(DamagedError, match="do not match the manifest"):
            NodeCache(storage, published, TIMEOUT_S)
    storage.remove("weights/1")
    with pytest.raises(NotFoundError):
        NodeCache(storage, published, TIMEOUT_S)
    assert not left(temporary)


def test_a_file_replaced_while_it_is_read_is_not_handed_out(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "run"))
    published = publish(storage)

    def replace(verb: str, path: str, stage: str) -> None:
        if stage == "after":
            storage.put(path, DATA)

    with pytest.raises(DamagedError, match="changed while it was read"):
        NodeCache(FaultyStorage(storage, replace), published, TIMEOUT_S)


def test_a_file_written_since_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(str(tmp_path / "run"))
    published = publish(storage)
    held = NodeCache(storage, published, TIMEOUT_S)
    held.files[0].write_bytes(b"0123x56789")
    # Not while another process serves the verified file.
    with pytest.raises(WaitTimeout):
        NodeCache(storage, published, 0.1)
    monkeypatch.setattr(shared_folder, "_MAX_REFUSALS", 3)
    with pytest.raises(DamagedError, match="changed while others use them"):
        NodeCache(storage, published, 600.0)
    held.close()
    with pytest.raises(DamagedError):
        NodeCache(storage, published, TIMEOUT_S)


def test_a_version_in_use_stays_and_goes_after_its_process(temporary: Path) -> None:
    storage = new_storage()
    one, two = publish(storage, 1), publish_weights(storage, 2, DATA + b"2")
    ready, told = os.pipe()
    if not (pid := os.fork()):
        NodeCache(storage, one, TIMEOUT_S)
        os.write(told, b"x")
        signal.pause()
    assert os.read(ready, 1) == b"x"
    files = left(temporary)
    NodeCache(storage, two, TIMEOUT_S).close()
    assert left(temporary) == files, "a version in use was removed"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    NodeCache(storage, two, TIMEOUT_S).close()
    assert not left(temporary)
