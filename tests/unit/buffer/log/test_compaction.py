"""Promises of compaction: every experience is listed once and reads back identical, wherever the pass is killed."""

import itertools
import json
import pickle
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from storage_kills import WRITES, Killed, killed_at

from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.log import compaction
from rftdask.buffer.log.columns import SCHEMA
from rftdask.buffer.log.compaction import CompactedShards, MergedFile, merge_shards, read_merged, rows_of
from rftdask.buffer.log.file_log import STEPS_PER_BUCKET, JsonlLog, ParquetLog
from rftdask.buffer.log.log import first_open_step, note_complete
from rftdask.buffer.log.retention import ResumePoint, apply_retention
from rftdask.buffer.log.schema import Experience
from rftdask.buffer.log.shard import ShardName
from rftdask.cli.results.compact import settled_before
from rftdask.config.schema.buffer import RetentionConfig
from rftdask.errors import DamagedError, NotFoundError, StorageError, UserError
from rftdask.storage import Storage, open_storage
from rftdask.storage.base import in_order
from rftdask.testing.storage_faults import FaultyStorage
from tests.unit.buffer.buffer_cases import audit, commit_batch, experience, make_source, new_storage, take

NUM_STEPS = 4


def trained_run(storage: Storage, first: int = 1) -> None:
    """Explore steps of four tasks in two units each, one of which ran twice, all trained but the last."""
    log = ParquetLog(storage, run="r")
    commit_batch(log, first, 1)
    for step in range(1, NUM_STEPS + 1):
        for batch in (0, 1):
            commit_batch(ParquetLog(storage, run="r"), step, batch)
    take(make_source(storage), range(1, 2 * NUM_STEPS - 1))


def contents(storage: Storage) -> list[tuple[ShardName, pa.Table]]:
    """All rows, as read by a new reader."""
    log = ParquetLog(storage)
    return [(name, log.read(name)) for name in log.shards()]


def assert_same(found: list[tuple[ShardName, pa.Table]], expected: list[tuple[ShardName, pa.Table]]) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(a.equals(b, check_metadata=True) for (_, a), (_, b) in zip(found, expected, strict=True))


def compact(storage: Storage, before: int = NUM_STEPS) -> int:
    log = ParquetLog(storage)
    return log.compact([name for name in log.loose_shards() if name.explore_step < before]).num_shards


def s3_of(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("s3_url"))


@pytest.mark.parametrize("kind", ["memory", "local", "s3"])
def test_each_experience_is_listed_once_and_read(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    storage = new_storage() if kind == "memory" else open_storage(tmp_path if kind == "local" else s3_of(request))
    trained_run(storage)
    was, counted = contents(storage), audit(storage)
    assert compact(storage) == 7
    assert [name.explore_step for name in ParquetLog(storage).loose_shards()] == [NUM_STEPS] * 2
    assert_same(contents(storage), was)
    assert audit(storage) == counted
    assert (counted.dropped, counted.waiting, counted.problems) == ({"repeat": 4}, 8, ())
    assert compact(storage) == 0, "a second pass finds nothing"


def test_a_restarted_trainer_gets_the_same_batches_after_it() -> None:
    storage = new_storage()
    trained_run(storage)
    expected = take(make_source(storage, lineage="again"), range(1, 2 * NUM_STEPS + 1))
    compact(storage)
    assert take(make_source(storage), range(1, 2 * NUM_STEPS + 1)) == expected
    assert take(make_source(storage, lineage="new"), range(1, 2 * NUM_STEPS + 1)) == expected


def test_a_later_pass_writes_a_new_file_and_leaves_the_first(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    trained_run(storage)
    compact(storage, before=3)
    first = {path: path.read_bytes() for path in (tmp_path / "experiences/compact").iterdir()}
    was = contents(storage)
    compact(storage, before=NUM_STEPS)
    assert {path: path.read_bytes() for path in first} == first
    assert len(list((tmp_path / "experiences/compact").iterdir())) == 2 * len(first) == 4
    assert [name for name, _ in contents(storage)] == [name for name, _ in was]


def test_other_tools_read_large_files_with_shard_and_row_columns(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    trained_run(storage)
    names = [name for name in ParquetLog(storage).shards() if name.explore_step < NUM_STEPS]
    compact(storage)
    (path,) = (tmp_path / "experiences/compact").glob("*.parquet")
    found = duckdb.sql(f"select shard, max(row) + 1 from '{path}' group by all order by all").fetchall()
    assert found == sorted((name.text, name.num_rows) for name in names)


def test_a_single_or_unreadable_shard_is_not_compacted() -> None:
    storage = new_storage()
    trained_run(storage)
    log = ParquetLog(storage)
    assert log.compact(log.shards()[:1]).num_shards == 0
    bad = log.shards()[1]
    storage.put(log.path(bad), b"PAR1")
    counted = audit(storage)
    assert compact(storage) == 6
    assert bad in log.loose_shards() and audit(storage) == counted


def test_only_parquet_shards_can_be_merged() -> None:
    with pytest.raises(UserError, match="JsonlLog has no small files to merge"):
        JsonlLog(new_storage()).compact([])


def test_a_pass_writes_the_file_then_its_record_then_removes() -> None:
    storage = new_storage()
    trained_run(storage)
    calls: list[tuple[str, str]] = []
    compact(FaultyStorage(storage, lambda verb, path, stage: calls.append((verb, path))))
    writes = [call for call in calls[::2] if call[0] in WRITES]
    assert [verb for verb, _ in writes[:2]] == ["put", "put"]
    assert writes[0][1].endswith(".parquet") and writes[1][1] == writes[0][1].replace(".parquet", ".json")
    assert ("local_copy", writes[0][1]) in calls[: calls.index(writes[1])], "it is read back before it counts"
    assert {verb for verb, _ in writes[2:]} == {"remove"} and len(writes) == 9


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("number", range(9))
def test_a_killed_pass_loses_nothing_and_the_next_finishes_it(number: int, moment: str) -> None:
    storage = new_storage()
    trained_run(storage)
    was, counted = contents(storage), audit(storage)
    with pytest.raises(Killed):
        compact(FaultyStorage(storage, killed_at(number, moment)))
    for _ in range(2):
        assert_same(contents(storage), was)
        assert audit(storage) == counted
        compact(storage)
    assert {name.explore_step for name in ParquetLog(storage).loose_shards()} == {NUM_STEPS}
    assert len(storage.list("experiences/compact")) == 2, "what was merged is not merged again"


def compacting_at(number: int, storage: Storage, **options: int) -> FaultyStorage:
    """The storage, in which a whole pass runs before the `number`-th read."""
    reads = itertools.count()

    def hook(verb: str, path: str, stage: str) -> None:
        if verb not in WRITES and stage == "before" and next(reads) == number:
            compact(storage, **options)

    return FaultyStorage(storage, hook)


@pytest.mark.parametrize("number", range(12))
def test_a_reader_during_a_pass_sees_every_experience_once(number: int) -> None:
    storage = new_storage()
    trained_run(storage)
    was = contents(storage)
    reader = ParquetLog(compacting_at(number, storage))
    assert reader.shards() == [name for name, _ in was]
    assert all(reader.read(name).equals(table) for name, table in was)


@pytest.mark.parametrize("number", range(12))
def test_two_passes_at_once_lose_nothing(number: int) -> None:
    """A process that lost its lease may not know it yet: a whole pass runs in the middle of another."""
    storage = new_storage()
    trained_run(storage)
    was = contents(storage)
    compact(compacting_at(number, storage, before=3))
    assert_same(contents(storage), was)


def test_a_damaged_large_file_raises_and_is_never_read(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    trained_run(storage)
    compact(storage)
    (path,) = (tmp_path / "experiences/compact").glob("*.parquet")
    data = path.read_bytes()
    name = next(n for n in ParquetLog(storage).shards() if n.explore_step == 1)
    (record,) = (tmp_path / "experiences/compact").glob("*.json")
    group = json.loads(record.read_text())["file"]["groups"][0]["span"]
    assert (group["begin"], json.loads(record.read_text())["file"]["tail"]["end"]) == (4, len(data))
    for at in range(group["begin"], len(data), 97):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(DamagedError, match="do not match their checksum"):
            ParquetLog(storage).read(name)
    with pytest.raises(DamagedError, match="it was compacted and cannot run again: restore the file"):
        ParquetLog(storage).quarantine(name, "bad")
    path.unlink()
    with pytest.raises(DamagedError, match=r"parquet is missing; restore it from a backup"):
        ParquetLog(storage).read(name)
    record.write_bytes(record.read_bytes().replace(b"-n4-", b"-n5-", 1))
    with pytest.raises(DamagedError, match="restore it from a backup: it names shards"):
        ParquetLog(storage).shards()


def test_a_file_that_storage_did_not_keep_takes_no_shard_with_it() -> None:
    storage = new_storage()
    trained_run(storage)
    was = contents(storage)

    def lose(verb: str, path: str, stage: str) -> None:
        if (verb, stage) == ("put", "after") and path.endswith(".parquet"):
            storage.put(path, storage.get(path)[:-1])

    with pytest.raises(DamagedError, match="is not what was written"):
        compact(FaultyStorage(storage, lose))
    assert ParquetLog(storage).loose_shards() == [name for name, _ in was]


def test_a_shard_that_does_not_exist_is_not_found() -> None:
    with pytest.raises(NotFoundError):
        ParquetLog(new_storage()).read(ShardName(1, 0, "ab", 1, 0, 0, 0))


def shard(step: int, rows: list[Experience], storage: Storage) -> tuple[ShardName, pa.Table]:
    log = ParquetLog(storage, run="r")
    name = log.commit(rows, explore_step=step, unit=0)
    return name, log.read(name)


def read_all(folder: Path, files: list[tuple[MergedFile, bytes]]) -> dict[str, pa.Table]:
    found = {}
    for file, data in files:
        (path := folder / f"{file.crc32:08x}").write_bytes(data)
        for number, group in enumerate(file.groups):
            table = read_merged(path, file, number)
            for text in group.shards:
                name = ShardName.try_parse(text)
                assert name is not None
                found[text] = rows_of(table, group, name)
    return found


def test_row_groups_hold_whole_shards_and_files_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = new_storage()
    sizes = (700, 0, 400, 1500, 3, 0, 9)
    shards = [shard(step, [experience(step, k) for k in range(size)], storage) for step, size in enumerate(sizes, 1)]
    (whole,) = list(merge_shards(shards))
    names = [name.text for name, _ in shards]
    assert [group.shards for group in whole[0].groups] == [tuple(names[:3]), (names[3],), tuple(names[4:])]
    parquet = pq.ParquetFile(pa.BufferReader(whole[1]))
    assert [parquet.metadata.row_group(n).num_rows for n in range(3)] == [1100, 1500, 12]
    monkeypatch.setattr(compaction, "MAX_FILE_BYTES", 1)
    files = list(merge_shards(shards))
    assert len(files) == 3
    for found in (read_all(tmp_path, [whole]), read_all(tmp_path, files)):
        assert all(found[name.text].equals(table, check_metadata=True) for name, table in shards)


def test_shards_of_another_schema_go_to_another_file(tmp_path: Path) -> None:
    storage = new_storage()
    shards = [shard(step, [experience(step)], storage) for step in (1, 2, 3)]
    later = shards[1][1].append_column(pa.field("mood", pa.string()), pa.array(["calm"]))
    shards[1] = (shards[1][0], later.replace_schema_metadata({"rftdask.schema": "1.99"}))
    files = list(merge_shards(shards))
    assert len(files) == 3
    found = read_all(tmp_path, files)
    assert all(found[name.text].equals(table, check_metadata=True) for name, table in shards)


def test_a_large_file_of_an_earlier_schema_gets_null_columns() -> None:
    storage = new_storage()
    trained_run(storage)
    expected = contents(storage)
    log = ParquetLog(storage)
    names = [name for name, _ in expected if name.explore_step < NUM_STEPS]
    older = [(name, log.read(name).drop_columns(["version_starts", "session"])) for name in names]
    CompactedShards(storage, "experiences").write(f"{0:06d}", iter(older))
    for name in names:
        storage.remove(log.path(name))
    assert [(name, table.select(SCHEMA.names)) for name, table in contents(storage)] == expected
    assert ParquetLog(storage).read(names[0], ["session", "uid"]).column_names == ["session", "uid"]


def test_a_log_that_read_a_large_file_pickles() -> None:
    storage = new_storage()
    trained_run(storage)
    compact(storage)
    log = ParquetLog(storage)
    name = log.shards()[0]
    table = log.read(name)
    assert pickle.loads(pickle.dumps(log)).read(name).equals(table)


def long_run(storage: Storage) -> None:
    """One unit of one task per explore step, into the second bucket, all trained."""
    log = ParquetLog(storage)
    for step in range(1, STEPS_PER_BUCKET + 9):
        log.commit([experience(step, 0, step=step)], explore_step=step, unit=0)
    source = make_source(storage, groups_per_batch=4, tasks_per_step=1, tasks_per_batch=1)
    take(source, range(1, (STEPS_PER_BUCKET + 8) // 4 + 1))


def apply(storage: Storage, explore_step: int) -> int:
    """Retention of a run whose oldest checkpoint has settled the steps before `explore_step`."""
    log, oldest = ParquetLog(storage), ResumePoint((explore_step - 1) // 4, explore_step)
    return apply_retention(storage, log, Ledger(storage), RetentionConfig(keep="compact"), oldest)


def test_a_bucket_is_compacted_once_its_groups_are_settled() -> None:
    storage = new_storage()
    long_run(storage)
    assert apply(storage, STEPS_PER_BUCKET - 3) == 0
    assert ParquetLog(storage).compacted_shards() == []
    assert apply(storage, STEPS_PER_BUCKET + 5) == STEPS_PER_BUCKET - 1
    log = ParquetLog(storage)
    assert {name.explore_step for name in log.compacted_shards()} == set(range(1, STEPS_PER_BUCKET))
    assert {name.explore_step for name in log.shards()} == set(range(1, STEPS_PER_BUCKET + 9))
    assert log.removed() == []
    assert apply(storage, STEPS_PER_BUCKET + 9) == 0


def test_looking_for_new_shards_lists_live_buckets_only() -> None:
    storage = new_storage()
    long_run(storage)
    apply(storage, STEPS_PER_BUCKET + 5)
    calls: list[str] = []
    counted = FaultyStorage(storage, lambda verb, path, stage: calls.append(f"{verb} {path}"))
    log = ParquetLog(counted)
    assert len(log.loose_shards(STEPS_PER_BUCKET + 9)) == 0
    assert calls[::2] == ["list experiences", "list experiences/000001"]
    calls.clear()
    log.shards(STEPS_PER_BUCKET + 1)
    assert calls[::2] == ["list experiences", "list experiences/000001", "list experiences/compact"]


def test_a_unit_compacted_after_its_rerun_is_not_open() -> None:
    storage = new_storage()
    long_run(storage)
    log = ParquetLog(storage)
    (name,) = log.find_all(7, 0)
    data = storage.get(log.path(name))
    log.quarantine(name, "bad")
    storage.put(log.path(name), data)
    note_complete(storage, STEPS_PER_BUCKET)
    apply(storage, STEPS_PER_BUCKET + 5)
    assert first_open_step(storage, ParquetLog(storage)) == STEPS_PER_BUCKET + 1


def test_settled_groups_are_counted_up_to_the_newest_entry() -> None:
    storage = new_storage()
    assert settled_before(Ledger(storage), 4) == 1
    trained_run(storage)
    assert settled_before(Ledger(storage), 4) == NUM_STEPS


def test_results_come_in_order_and_an_error_at_its_place() -> None:
    def call(item: int) -> int:
        if item == 5:
            raise StorageError("5")
        return item * 2

    assert list(in_order(call, range(5), 3)) == [0, 2, 4, 6, 8]
    taken = []
    with pytest.raises(StorageError, match="5"):
        for result in in_order(call, range(9), 3):
            taken.append(result)
    assert taken == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("ordered", [True, False])
def test_reading_ahead_does_not_change_the_batches(ordered: bool) -> None:
    outcomes = []
    for num_readers in (1, 8):
        storage = new_storage()
        log = ParquetLog(storage)
        log.writer = "ab"
        for step in (1, 2, 3):
            for batch in (1, 0):
                commit_batch(log, step, batch)
        bad = log.shards()[2]
        storage.put(log.path(bad), b"PAR1")
        reader = ParquetLog(storage)
        reader.num_readers = num_readers
        source = make_source(storage, log=reader, ordered=ordered)
        batches = take(source, [1, 2])
        commit_batch(log, 2, 0)
        batches += take(source, [3, 4, 5, 6])
        outcomes.append((batches, log.quarantined(), audit(storage)))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] == [bad] and outcomes[0][2].problems == ()
