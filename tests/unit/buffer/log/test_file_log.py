"""Promises of the experience log as files, in addition to those of every log (test_log_contract.py)."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from storage_kills import Killed, killed_at, killed_before

from rftdask.buffer.log.file_log import ParquetLog
from rftdask.errors import DamagedError, StorageError
from rftdask.storage import Storage, open_storage
from rftdask.testing.storage_faults import FaultyStorage
from tests.unit.buffer.buffer_cases import commit_batch, experience, find_whole, new_storage


@pytest.fixture(params=["memory", "local"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    yield new_storage() if request.param == "memory" else open_storage(tmp_path)


def test_a_failed_commit_leaves_no_shard(storage: Storage) -> None:
    with pytest.raises(StorageError, match="killed"):
        commit_batch(ParquetLog(FaultyStorage(storage, killed_before("put"))), 1, 0)
    assert find_whole(ParquetLog(storage), 1, 0) is None


def test_foreign_files_are_not_listed(storage: Storage) -> None:
    log = ParquetLog(storage)
    name = log.commit([experience()], explore_step=1, unit=0)
    for path in ("experiences/notes.txt", "experiences/000000/README.md", "experiences/mine/x.parquet"):
        storage.put(path, b"?")
    assert log.shards() == [name]


def test_quarantine_keeps_the_bytes_and_the_first_reason(storage: Storage) -> None:
    log = ParquetLog(storage)
    name = commit_batch(log, 1, 0)
    storage.put(log.path(name), b"bad")
    log.quarantine(name, "crc32 does not match")
    log.quarantine(name, "again")
    assert storage.get(f"experiences/quarantine/{name.text}") == b"bad"
    reason = json.loads(storage.get(f"experiences/quarantine/{name.text}.reason.json"))
    assert reason == {"shard": name.text, "reason": "crc32 does not match"}


def test_a_shard_counts_as_quarantined_once_unit_is_undone() -> None:
    # When the count rises, the explorer checks once which units must run again; a listed shard would be missed.
    inner = new_storage()
    log = ParquetLog(inner)
    name = commit_batch(log, 1, 0)
    counts: list[tuple[int, bool]] = []

    def look(verb: str, path: str, stage: str) -> None:
        if verb in ("put", "remove"):
            counts.append((log.num_quarantined(), find_whole(log, 1, 0) is not None))

    ParquetLog(FaultyStorage(inner, look)).quarantine(name, "bad")
    assert set(counts) == {(0, True), (1, False)}


@pytest.mark.parametrize("fail_at", range(3))
def test_quarantine_resumes_after_a_crash_at_any_write(fail_at: int) -> None:
    inner = new_storage()
    log = ParquetLog(inner)
    name = commit_batch(log, 1, 0)
    with pytest.raises(Killed):
        ParquetLog(FaultyStorage(inner, killed_at(fail_at))).quarantine(name, "bad")
    assert find_whole(log, 1, 0) is not None
    log.quarantine(name, "bad")
    assert (find_whole(log, 1, 0), log.num_quarantined()) == (None, 1)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b'{"num_explore_steps": null}', b'{"num_explore_steps": 3', b"\xff"]
)
def test_a_damaged_seal_raises_with_advice(data: bytes) -> None:
    storage = new_storage()
    storage.put("experiences/SEALED.json", data)
    with pytest.raises(DamagedError, match=r"experiences/SEALED.json is damaged .* remove it"):
        ParquetLog(storage).sealed_at()
