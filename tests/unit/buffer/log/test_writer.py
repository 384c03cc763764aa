"""Promises of a work unit committed in parts: wherever the writer dies, no group is lost and none is used twice."""

import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_kills import killed_before

from rftdask.buffer.batches.audit import audit_log
from rftdask.buffer.batches.groups import first_copies, group_numbers
from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.log import writer as writers
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.schema import Experience, Status
from rftdask.buffer.log.shard import MAX_PART_TASKS, Part, ShardName, done_units
from rftdask.buffer.log.writer import UnitWriter
from rftdask.errors import StorageError, WaitTimeout
from rftdask.storage import Storage
from rftdask.testing.storage_faults import FaultyStorage
from tests.living import wait_until
from tests.unit.buffer.buffer_cases import batch_of, experience, find_whole, make_source, new_storage, take

NUM_TASKS = 4
FOR_EVER_S = 1000.0


def group(task: int, **fields: object) -> list[Experience]:
    return [experience(task, rollout, **fields) for rollout in (0, 1)]  # type: ignore[arg-type]


def writer(log: ParquetLog, max_commit_delay_s: float | None = FOR_EVER_S, num_tasks: int = NUM_TASKS) -> UnitWriter:
    """The writer of a worker for the first work unit of the first step, after it has listed the log."""
    committed = [slot for name in log.find_all(1, 0) if name.part is not None for slot in name.part.slots]
    return UnitWriter(
        log, explore_step=1, unit=0, num_tasks=num_tasks, max_commit_delay_s=max_commit_delay_s, committed=committed
    )


def commit(log: ParquetLog, *slots: int) -> ShardName:
    rows = [row for slot in slots for row in group(slot)]
    return log.commit(rows, explore_step=1, unit=0, part=Part(slots, NUM_TASKS) if len(slots) < NUM_TASKS else None)


def held(log: ParquetLog) -> list[tuple[int, ...] | None]:
    return sorted((name.part.slots if name.part else None for name in log.shards()), key=str)


def test_groups_done_together_are_one_whole_shard() -> None:
    log = ParquetLog(new_storage())
    with writer(log) as batch:
        for slot in (2, 0, 3, 1):
            batch.add(slot, group(slot))
        (name,) = batch.finish()
    assert name.part is None and find_whole(log, 1, 0) == name
    assert log.read(name).column("task_index").to_pylist() == [0, 0, 1, 1, 2, 2, 3, 3], "in the order of the tasks"


def test_a_finished_group_does_not_wait_for_its_batch() -> None:
    log = ParquetLog(new_storage())
    with writer(log, max_commit_delay_s=0.001) as batch:
        batch.add(2, group(2))
        wait_until(lambda: held(log) == [(2,)])
        assert done_units(log.shards()) == set()
        assert find_whole(log, 1, 0) is None, "that is for whole batches"
        for slot in (3, 0, 1):
            batch.add(slot, group(slot))
        names = batch.finish()
    assert sorted(slot for name in names if name.part for slot in name.part.slots) == [0, 1, 2, 3]
    assert done_units(log.shards()) == {(1, 0)}


def test_a_batch_that_may_not_be_parted_is_not() -> None:
    log = ParquetLog(new_storage())
    for max_commit_delay_s, num_tasks in ((None, NUM_TASKS), (0.001, MAX_PART_TASKS + 1)):
        with writer(log, max_commit_delay_s, num_tasks) as batch:
            batch.add(0, group(0))
            time.sleep(0.01)
            assert log.shards() == []


def test_a_writer_that_fails_commits_nothing_more() -> None:
    log = ParquetLog(new_storage())
    with pytest.raises(RuntimeError, match="the engine died"), writer(log) as batch:
        batch.add(0, group(0))
        raise RuntimeError("the engine died")
    assert log.shards() == []


def test_a_commit_that_fails_in_the_background_fails_the_batch() -> None:
    log = ParquetLog(FaultyStorage(new_storage(), killed_before("put")))
    with writer(log, max_commit_delay_s=0.001) as batch:
        batch.add(0, group(0))
        time.sleep(0.02)
        batch.add(1, group(1))
        with pytest.raises(StorageError, match="killed"):
            batch.finish()


def test_after_a_commit_that_hangs_nothing_more_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "_JOIN_S", 0.05)
    begun, answers = threading.Event(), threading.Event()

    class HangingLog(ParquetLog):
        def commit(self, *args: Any, **options: Any) -> ShardName:
            begun.set()
            assert answers.wait(60)
            return super().commit(*args, **options)

    log = HangingLog(new_storage())
    batch = writer(log, max_commit_delay_s=0.001)
    for slot in (0, 1):  # the thread of the second group waits for that of the first
        batch.add(slot, group(slot))
        assert begun.wait(60)
    time.sleep(0.05)
    with pytest.raises(WaitTimeout, match="work unit 1/0: a commit has hung"):
        batch.close()
    answers.set()
    wait_until(lambda: not any(isinstance(thread, threading.Timer) for thread in threading.enumerate()))
    assert held(log) == [(0,)]


@pytest.mark.parametrize("killed_after", [1, 2, 3])
def test_after_a_kill_only_missing_groups_are_committed(killed_after: int) -> None:
    storage = new_storage()
    for slot in range(killed_after):
        commit(ParquetLog(storage), slot)
    log = ParquetLog(storage)
    with writer(log) as batch:
        for slot in range(NUM_TASKS):  # the engine answers for all of them again
            batch.add(slot, group(slot))
        (rest,) = batch.finish()
    assert rest.part == Part(tuple(range(killed_after, NUM_TASKS)), NUM_TASKS)
    assert done_units(log.shards()) == {(1, 0)}
    assert audit(storage).committed == 2 * NUM_TASKS


def audit(storage: Storage):  # type: ignore[no-untyped-def]
    found = audit_log(ParquetLog(storage), Ledger(storage), NUM_TASKS)
    assert found.problems == ()
    return found


def test_a_part_is_trained_before_its_batch_is_done() -> None:
    storage = new_storage()
    commit(ParquetLog(storage), 1, 3)
    source = make_source(storage, tasks_per_batch=NUM_TASKS, ordered=False)
    assert take(source, [1]) == [("t/0/1/0/0", "t/0/1/1/0", "t/0/3/0/0", "t/0/3/1/0")]
    commit(ParquetLog(storage), 0, 2)
    assert take(source, [2]) == [("t/0/0/0/0", "t/0/0/1/0", "t/0/2/0/0", "t/0/2/1/0")]
    assert audit(storage).trained == 8


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 3), min_size=1).map(lambda slots: tuple(sorted(slots))), max_size=5), st.booleans()
)
def test_every_group_is_trained_once_despite_overlapping_parts(parts: list[tuple[int, ...]], ordered: bool) -> None:
    storage = new_storage()
    for slots in (*parts, (0, 1, 2, 3)):
        commit(ParquetLog(storage), *slots)
    batches = take(make_source(storage, tasks_per_batch=NUM_TASKS, ordered=ordered), [1, 2])
    assert sorted(uid for uids in batches for uid in uids) == [f"t/0/{n}/{k}/0" for n in range(4) for k in (0, 1)]
    found = audit(storage)
    assert (found.trained, found.waiting) == (8, 0)
    assert found.dropped.get("repeat", 0) == 2 * sum(map(len, parts))


@given(st.lists(st.sets(st.integers(0, 3), min_size=1).map(lambda slots: tuple(sorted(slots))), max_size=6))
def test_a_batch_is_done_exactly_when_its_parts_add_up(parts: list[tuple[int, ...]]) -> None:
    names = [ShardName(1, 0, f"{n:x}", 2, 0, 0, 0, part=Part(slots, 4)) for n, slots in enumerate(parts)]
    assert (done_units(names) == {(1, 0)}) == (set().union(*parts) == {0, 1, 2, 3})


def test_of_groups_in_several_shards_the_first_copies_are_taken() -> None:
    log = ParquetLog(new_storage())
    names = [commit(log, *slots) for slots in ((1, 2), (0, 1), (0, 1, 2, 3))]
    tables = first_copies((name, log.read(name)) for name in names)
    assert [table.column("task_index").unique().to_pylist() for table in tables] == [[1, 2], [0], [3]]
    assert group_numbers(log.read(names[2])).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_failed_rollouts_of_a_part_are_dropped_by_reason() -> None:
    storage = new_storage()
    log = ParquetLog(storage)
    kinds = [Status.OK, Status.TIMEOUT, Status.TRUNCATED, Status.FAILED, Status.TIMEOUT]
    rows = [
        experience(task, k, status=status, min_policy_version=k) for task in (1, 3) for k, status in enumerate(kinds)
    ]
    log.commit(rows, explore_step=1, unit=0, part=Part((1, 3), NUM_TASKS))
    found = batch_of(make_source(storage, tasks_per_batch=NUM_TASKS, ordered=False), 1)
    assert found is not None
    entry = found[0]
    assert [rows.rows for rows in entry.use] == [(0, 2), (5, 7)]
    assert [(rows.reason, rows.rows) for rows in entry.drop] == [
        ("failed", (3,)), ("timeout", (1, 4)), ("failed", (8,)), ("timeout", (6, 9)),
    ]  # fmt: skip
    assert entry.positions == ((1, 1), (1, 3))
