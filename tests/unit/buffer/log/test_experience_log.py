"""Promises of the experience log as files, beside those of every log (test_log_contract.py): a name in the listing is
the commit; what is damaged goes aside with its bytes and the reason, whatever crashes meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rftdask.buffer.log.file_log import STEPS_PER_BUCKET, ParquetLog
from rftdask.errors import DamagedError, NotFoundError, StorageError
from rftdask.storage import Storage, open_storage
from rftdask.testing.storage_faults import FaultyStorage
from tests.unit.buffer.buffer_cases import commit_batch, experience, find_whole, new_storage


@pytest.fixture(params=["memory", "local"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    yield new_storage() if request.param == "memory" else open_storage(tmp_path)


def test_shards_come_sorted_by_step_and_batch_from_the_step_asked_for(storage: Storage) -> None:
    log = ParquetLog(storage)
    steps = [STEPS_PER_BUCKET + 1, 1, STEPS_PER_BUCKET - 1, STEPS_PER_BUCKET, 2]
    for step in steps:
        for batch in (1, 0):
            log.commit([experience(step=step)], explore_step=step, unit=batch)
    listed = [(name.explore_step, name.unit) for name in log.shards()]
    assert listed == [(step, batch) for step in sorted(steps) for batch in (0, 1)]
    assert [n.explore_step for n in log.shards(STEPS_PER_BUCKET)] == [64, 64, 65, 65]


def test_a_commit_that_fails_is_not_there(storage: Storage) -> None:
    def fail(verb: str, path: str, stage: str) -> None:
        if verb == "put" and stage == "before":
            raise StorageError("disk full")

    with pytest.raises(StorageError, match="disk full"):
        commit_batch(ParquetLog(FaultyStorage(storage, fail)), 1, 0)
    assert find_whole(ParquetLog(storage), 1, 0) is None


def test_files_of_others_are_not_seen(storage: Storage) -> None:
    log = ParquetLog(storage)
    name = log.commit([experience()], explore_step=1, unit=0)
    for path in ("experiences/notes.txt", "experiences/000000/README.md", "experiences/mine/x.parquet"):
        storage.put(path, b"?")
    assert log.shards() == [name]


def damage(storage: Storage, log: ParquetLog, *, step: int = 1, batch: int = 0) -> None:
    name = find_whole(log, step, batch)
    assert name is not None
    data = storage.get(log.path(name))
    storage.put(log.path(name), data[:-20] + b"!" + data[-19:])


def test_a_shard_set_aside_makes_its_batch_undone_and_keeps_its_bytes(storage: Storage) -> None:
    log = ParquetLog(storage)
    name = commit_batch(log, 1, 0)
    damage(storage, log)
    with pytest.raises(DamagedError):
        log.read(name)
    bad = storage.get(log.path(name))
    log.quarantine(name, "crc32 does not match")
    assert find_whole(log, 1, 0) is None
    assert log.shards() == []
    assert log.num_quarantined() == 1
    assert storage.get(f"experiences/quarantine/{name.text}") == bad
    reason = json.loads(storage.get(f"experiences/quarantine/{name.text}.reason.json"))
    assert reason == {"shard": name.text, "reason": "crc32 does not match"}
    with pytest.raises(NotFoundError):
        log.read(name)


def test_setting_aside_twice_is_once(storage: Storage) -> None:
    log = ParquetLog(storage)
    name = commit_batch(log, 1, 0)
    log.quarantine(name, "first")
    log.quarantine(name, "second")
    assert log.num_quarantined() == 1
    assert json.loads(storage.get(f"experiences/quarantine/{name.text}.reason.json"))["reason"] == "first"


def test_a_shard_counts_as_set_aside_only_when_its_batch_is_undone() -> None:
    # Who sees the count rise looks once which batches must run again; a shard still listed then would be missed.
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
def test_setting_aside_goes_on_after_a_crash_at_any_write(fail_at: int) -> None:
    inner = new_storage()
    log = ParquetLog(inner)
    name = commit_batch(log, 1, 0)
    writes: list[str] = []

    def crash(verb: str, path: str, stage: str) -> None:
        if verb in ("put", "remove") and stage == "before":
            writes.append(path)
            if len(writes) == fail_at + 1:
                raise StorageError("killed")

    with pytest.raises(StorageError, match="killed"):
        ParquetLog(FaultyStorage(inner, crash)).quarantine(name, "bad")
    assert find_whole(log, 1, 0) is not None
    log.quarantine(name, "bad")
    assert (find_whole(log, 1, 0), log.num_quarantined()) == (None, 1)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b'{"num_explore_steps": null}', b'{"num_explore_steps": 3', b"\xff"]
)
def test_a_damaged_seal_is_told_with_the_remedy(data: bytes) -> None:
    storage = new_storage()
    storage.put("experiences/SEALED.json", data)
    with pytest.raises(DamagedError, match=r"experiences/SEALED.json is damaged .* remove it"):
        ParquetLog(storage).sealed_at()
