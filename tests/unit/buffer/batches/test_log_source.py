"""Promises of the log source: the batch of a step is its ledger entry; every row ends in exactly one state."""

import contextlib
import itertools
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_kills import killed_before

from rftdask.buffer.batches.audit import Audit
from rftdask.buffer.batches.ledger import Ledger, LedgerEntry
from rftdask.buffer.batches.source import BatchNotReady
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.schema import Status
from rftdask.buffer.log.shard import ShardName
from rftdask.errors import DamagedError, EmptyBatchError, FencedError, RoleError, StorageError, WaitTimeout
from rftdask.storage import Storage
from rftdask.testing.storage_faults import FaultyStorage
from tests.unit.buffer import buffer_cases
from tests.unit.buffer.buffer_cases import (
    BATCHES,
    batch_of,
    commit_batch,
    committed,
    entries,
    experience,
    find_whole,
    make_source,
    new_storage,
    take,
    uids,
)
from tests.unit.buffer.buffer_cases import sound_audit as audit


@pytest.mark.parametrize("order", list(itertools.permutations(BATCHES)))
def test_ordered_batches_do_not_depend_on_arrival(order: tuple[tuple[int, int], ...]) -> None:
    storage = new_storage()
    source = make_source(storage, max_read_timeout_s=0.0)
    log = ParquetLog(storage)
    batches = []
    for step, batch in order:
        commit_batch(log, step, batch)
        while len(batches) < 4:
            try:
                batches += take(source, [len(batches) + 1])
            except WaitTimeout:
                break
    assert batches == [uids(0, 1), uids(2, 3), uids(4, 5), uids(6, 7)]
    assert audit(storage) == Audit(committed=16, trained=16, waiting=0)


def test_unordered_batches_train_arrived_groups_first() -> None:
    storage = new_storage()
    source = make_source(storage, ordered=False)
    commit_batch(ParquetLog(storage), 2, 1)
    assert take(source, [1]) == [uids(6, 7)]
    commit_batch(ParquetLog(storage), 1, 0)
    assert take(source, [2]) == [uids(0, 1)]
    assert audit(storage).trained == 8


def test_a_batch_is_written_down_before_it_is_handed_out() -> None:
    inner = committed()
    with pytest.raises(StorageError, match="killed"):
        batch_of(make_source(FaultyStorage(inner, killed_before("put_new"))), 1)
    assert audit(inner) == Audit(committed=16, trained=0, waiting=16)
    found = batch_of(make_source(inner), 1)
    assert found is not None
    assert Ledger(inner).read(1) == found[0]


@settings(max_examples=25)
@given(
    ordered=st.booleans(),
    size=st.integers(1, 3),
    saved_at=st.integers(0, 4),
    killed_at=st.integers(0, 4),
    failing=st.sets(st.tuples(st.integers(0, 7), st.integers(0, 1)), max_size=5),
)
def test_a_resumed_source_hands_out_the_very_same_batches(
    ordered: bool, size: int, saved_at: int, killed_at: int, failing: set[tuple[int, int]]
) -> None:
    def statuses(task: int, rollout: int) -> Status:
        return Status.FAILED if rollout and (task, rollout) in failing else Status.OK

    num = 8 // size
    whole = committed(statuses=statuses)
    expected = take(make_source(whole, ordered=ordered, groups_per_batch=size), range(1, num + 1))
    storage = committed(statuses=statuses)
    saved_at = min(saved_at, num)
    killed_at = min(max(saved_at, killed_at), num)
    first = make_source(storage, ordered=ordered, groups_per_batch=size)
    batches = take(first, range(1, saved_at + 1))
    state = first.state_dict()
    take(first, range(saved_at + 1, killed_at + 1))
    second = make_source(storage, ordered=ordered, groups_per_batch=size)
    second.load_state_dict(state)
    batches += take(second, range(saved_at + 1, num + 1))
    assert batches == expected
    assert second.state_dict() == _cursor_after(whole, ordered, size, num)
    found = audit(storage)
    assert found.dropped.get("failed", 0) <= len(failing)
    assert found.trained == sum(len(uids) for uids in expected)


def _cursor_after(storage: Storage, ordered: bool, size: int, num: int) -> dict[str, object]:
    """State of a source that only replays the ledger."""
    source = make_source(storage, ordered=ordered, groups_per_batch=size)
    take(source, range(1, num + 1))
    return source.state_dict()


def test_later_arrivals_never_change_a_batch() -> None:
    storage = new_storage()
    commit_batch(ParquetLog(storage), 2, 0)
    first = take(make_source(storage, ordered=False), [1])
    commit_batch(ParquetLog(storage), 1, 0)
    assert take(make_source(storage, ordered=False), [1, 2]) == [*first, uids(0, 1)]


def test_a_rollout_batch_that_ran_twice_is_trained_once() -> None:
    storage = committed()
    commit_batch(ParquetLog(storage), 1, 0)
    source = make_source(storage)
    commit_batch(ParquetLog(storage), 1, 1)
    batches = take(source, [1, 2])
    commit_batch(ParquetLog(storage), 1, 0)  # after it was trained
    batches += take(source, [3, 4])
    assert batches == [uids(0, 1), uids(2, 3), uids(4, 5), uids(6, 7)]
    assert audit(storage) == Audit(committed=28, trained=16, waiting=0, dropped={"repeat": 12})


def test_only_one_copy_of_an_untrained_unit_counts() -> None:
    storage = new_storage()
    for _ in range(2):
        commit_batch(ParquetLog(storage), 1, 0)
    assert audit(storage) == Audit(committed=8, trained=0, waiting=4, dropped={"repeat": 4})


def test_copies_of_one_batch_may_be_settled_group_by_group() -> None:
    storage = new_storage()
    commit_batch(ParquetLog(storage), 1, 0)
    source = make_source(storage, groups_per_batch=1)
    take(source, [1])
    state = source.state_dict()
    commit_batch(ParquetLog(storage), 1, 0)
    resumed = make_source(storage, groups_per_batch=1)
    resumed.load_state_dict(state)
    assert take(resumed, [2]) == [uids(1)]
    assert audit(storage) == Audit(committed=8, trained=4, waiting=0, dropped={"repeat": 4})


def damage(storage: Storage, name: ShardName) -> None:
    path = ParquetLog(storage).path(name)
    storage.put(path, storage.get(path)[:-1])


def test_a_damaged_shard_goes_aside_and_its_batch_is_waited_for() -> None:
    storage = new_storage()
    log = ParquetLog(storage)
    damage(storage, commit_batch(log, 1, 0))
    source = make_source(storage)
    with pytest.raises(WaitTimeout):
        batch_of(source, 1)
    assert (log.num_quarantined(), find_whole(log, 1, 0)) == (1, None)
    commit_batch(log, 1, 0)
    assert take(source, [1]) == [uids(0, 1)]
    assert audit(storage) == Audit(committed=4, trained=4, waiting=0)


def test_a_damaged_shard_of_the_ledger_is_never_replaced() -> None:
    storage = committed()
    take(make_source(storage), [1])
    damage(storage, next(n for n in ParquetLog(storage).shards() if (n.explore_step, n.unit) == (1, 0)))
    commit_batch(ParquetLog(storage), 1, 0)
    with pytest.raises(DamagedError, match=r"shard 00000001-0000-.* does not match its name"):
        batch_of(make_source(storage), 1)


def test_a_timeout_reports_the_missing_groups() -> None:
    storage = committed([(1, 1)])
    with pytest.raises(WaitTimeout) as caught:
        batch_of(make_source(storage), 1)
    text = str(caught.value)
    assert "batch 1 was not complete after 0 s: 2 groups are waiting, 2 are needed, " in text
    assert "the oldest open explore step is 1" in text and "max_read_timeout" in text
    assert audit(storage) == Audit(committed=4, trained=0, waiting=4)


def test_a_sealed_log_leaves_an_incomplete_batch_waiting() -> None:
    storage = committed()
    ParquetLog(storage).seal(2)
    source = make_source(storage, groups_per_batch=3)
    assert take(source, [1, 2]) == [uids(0, 1, 2), uids(3, 4, 5)]
    assert batch_of(source, 3) is None
    assert audit(storage) == Audit(committed=16, trained=12, waiting=4)


def test_a_sealed_log_with_a_hole_is_waited_for() -> None:
    storage = committed([(1, 0), (2, 0), (2, 1)])
    ParquetLog(storage).seal(2)
    source = make_source(storage, groups_per_batch=8)
    with pytest.raises(WaitTimeout):
        batch_of(source, 1)
    commit_batch(ParquetLog(storage), 1, 1)
    assert sorted(take(source, [1])[0]) == sorted(uids(*range(8)))


def test_after_the_deadline_arrived_groups_form_a_batch() -> None:
    storage = committed([(1, 1)])
    source = make_source(storage, ordered=False, groups_per_batch=3)
    assert take(source, [1]) == [uids(2, 3)]
    assert entries(storage)[0].notes == {"num_missing_groups": 1}
    assert audit(storage) == Audit(committed=4, trained=4, waiting=0)
    with pytest.raises(WaitTimeout, match="0 groups are waiting, 3 are needed"):
        batch_of(source, 2)


def test_an_ordered_source_times_out_on_a_late_position() -> None:
    storage = committed([(1, 0)])
    with pytest.raises(WaitTimeout, match="batch 1 was not complete"):
        batch_of(make_source(storage, ordered=True, groups_per_batch=3), 1)
    assert audit(storage) == Audit(committed=4, trained=0, waiting=4)


def test_groups_that_failed_make_no_partial_batch() -> None:
    storage = committed([(1, 0)], statuses=lambda task, rollout: Status.FAILED)
    with pytest.raises(WaitTimeout):
        batch_of(make_source(storage, ordered=False, groups_per_batch=3), 1)
    assert audit(storage).waiting == 4


@settings(max_examples=30)
@given(st.integers(1, 5), st.permutations(BATCHES), st.lists(st.integers(0, 3), max_size=4))
def test_partial_batches_train_everything_once(size: int, order: list[tuple[int, int]], pauses: list[int]) -> None:
    storage = new_storage()
    log = ParquetLog(storage)
    source = make_source(storage, ordered=False, groups_per_batch=size, max_read_timeout_s=0.0)
    trained: list[str] = []
    step = 0
    for number, batch in enumerate(order):
        commit_batch(log, *batch)
        if number in pauses:  # the explorers are late: the trainer takes the arrived groups
            step += 1
            trained += take(source, [step])[0]
    log.seal(2)
    while (found := batch_of(source, step + 1)) is not None:
        step += 1
        trained += found[1].uids
    assert len(trained) == len(set(trained)) >= 2 * (8 - 8 % size), "no fewer than whole batches would have taken"
    assert audit(storage).waiting == 16 - len(trained)


def test_without_patience_only_a_complete_batch_is_returned() -> None:
    assert make_source(committed()).entry(1, patience_s=0.0) is not None
    with pytest.raises(BatchNotReady, match="batch 1 is not ready"):
        make_source(new_storage()).entry(1, patience_s=0.0)


def test_the_deadline_covers_repeated_calls_for_a_batch() -> None:
    source = make_source(new_storage(), max_read_timeout_s=0.05)
    with pytest.raises(WaitTimeout, match="batch 1 was not complete"):
        for _ in range(1000):
            with contextlib.suppress(BatchNotReady):
                source.entry(1, patience_s=0.001)


def test_an_entry_of_another_trainer_fences() -> None:
    storage = committed()
    mine, other = make_source(storage), make_source(storage)
    take(mine, [1])
    take(other, [1, 2])
    with pytest.raises(FencedError, match=r"ledger/main/00000002.json appeared .* another trainer is running"):
        batch_of(mine, 2)


def test_losing_the_race_for_an_entry_fences() -> None:
    inner = committed()

    def race(verb: str, path: str, stage: str) -> None:
        if verb == "put_new" and stage == "before":
            take(make_source(inner), [1])

    with pytest.raises(FencedError, match="was written by another trainer"):
        batch_of(make_source(FaultyStorage(inner, race)), 1)
    assert audit(inner).trained == 4


def some_fail(task: int, rollout: int) -> Status:
    return {(0, 1): Status.FAILED, (1, 0): Status.TIMEOUT, (2, 0): Status.TRUNCATED, (3, 1): Status.FILTERED}.get(
        (task, rollout), Status.OK
    )


def test_rows_of_unfinished_rollouts_are_dropped_with_a_reason() -> None:
    storage = committed(statuses=some_fail)
    assert take(make_source(storage), [1, 2]) == [("t/0/0/0/0", "t/0/1/1/0"), ("t/0/2/0/0", "t/0/2/1/0", "t/0/3/0/0")]
    reasons = {(rows.reason, rows.rows) for entry in entries(storage) for rows in entry.drop}
    assert reasons == {("failed", (1,)), ("timeout", (2,)), ("filtered", (3,))}
    assert audit(storage) == Audit(16, 5, 8, {"failed": 1, "timeout": 1, "filtered": 1})


@given(st.dictionaries(st.tuples(st.integers(0, 7), st.integers(0, 1)), st.sampled_from(Status)), st.booleans())
@settings(max_examples=40)
def test_only_trainable_rows_are_ever_used(statuses: dict[tuple[int, int], Status], ordered: bool) -> None:
    storage = committed(statuses=lambda task, rollout: statuses.get((task, rollout), Status.OK))
    ParquetLog(storage).seal(2)
    source = make_source(storage, ordered=ordered)
    try:
        step = 1
        while (found := batch_of(source, step)) is not None:
            for uid in found[1].uids:
                _, _, task, rollout, _ = uid.split("/")
                assert statuses.get((int(task), int(rollout)), Status.OK).trainable
            step += 1
    except RoleError:
        pass  # a batch without a trainable row: see below
    audit(storage)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_batch_with_nothing_to_train_raises_the_first_cause(ordered: bool) -> None:
    storage = committed(statuses=lambda task, rollout: Status.FAILED if task < 2 else Status.OK)
    with pytest.raises(EmptyBatchError, match="fix the cause, then run again under another name") as caught:
        batch_of(make_source(storage, ordered=ordered), 1)
    assert "batch 1 has nothing to train: all rollouts of its 2 groups failed" in str(caught.value)
    assert "task 0 rollout 0 failed" in str(caught.value)
    assert audit(storage) == Audit(committed=16, trained=0, waiting=16)


@pytest.mark.parametrize("error", ["DataError: row 0: column 'answer' is empty", "PromptTooLongError: prompt of 9"])
@pytest.mark.parametrize("max_bad_rows", [1, 2])
def test_a_batch_of_few_bad_tasks_trains_nothing(error: str, max_bad_rows: int) -> None:
    storage = new_storage()
    bad = [experience(task, k, status=Status.FAILED, error=error) for task in (0, 1) for k in (0, 1)]
    ParquetLog(storage).commit(bad, explore_step=1, unit=0)
    source = make_source(storage, max_bad_rows=max_bad_rows)
    if max_bad_rows < 2:
        with pytest.raises(EmptyBatchError, match="all rollouts of its 2 groups failed"):
            batch_of(source, 1)
        return
    found = batch_of(source, 1)
    assert found is not None
    assert len(found[1]) == 0
    assert audit(storage).dropped == {"failed": 4}


def test_a_batch_of_other_failures_ends_the_run_with_bad_rows() -> None:
    storage = committed(statuses=lambda task, rollout: Status.FAILED if task < 2 else Status.OK)
    with pytest.raises(EmptyBatchError):
        batch_of(make_source(storage, max_bad_rows=9), 1)


def test_too_stale_groups_are_dropped_with_that_reason() -> None:
    storage = new_storage()
    log = ParquetLog(storage)
    commit_batch(log, 1, 0, version=0)
    commit_batch(log, 1, 1, version=2)
    ledger = Ledger(storage)
    for step in (1, 2):
        ledger.write(LedgerEntry(step, "main", (), positions=tuple((step + 1, slot) for slot in range(2))))
    source = make_source(storage, ordered=False, groups_per_batch=4, max_staleness=1)
    source.load_state_dict({"low": 1, "beyond": [[3, slot] for slot in range(4)] + [[4, slot] for slot in range(4)]})
    assert take(source, [3]) == [uids(2, 3)]
    assert audit(storage) == Audit(committed=8, trained=4, waiting=0, dropped={"stale": 4})


def test_two_lineages_train_the_same_log_apart() -> None:
    storage = committed()
    assert take(make_source(storage), [1]) == take(make_source(storage, lineage="fork"), [1])
    assert audit(storage).trained == 4


Plant = Callable[[Storage, LedgerEntry], None]


def trained_twice(storage: Storage, first: LedgerEntry) -> None:
    Ledger(storage).write(LedgerEntry(2, "main", first.use))


def missing_shard(storage: Storage, first: LedgerEntry) -> None:
    name = ShardName.try_parse(first.use[0].source)
    assert name is not None
    storage.remove(ParquetLog(storage).path(name))


def no_such_row(storage: Storage, first: LedgerEntry) -> None:
    rows = first.use[0]
    Ledger(storage).write(LedgerEntry(2, "main", (type(rows)(rows.source, (4,)),)))


def a_gap(storage: Storage, first: LedgerEntry) -> None:
    Ledger(storage).write(LedgerEntry(3, "main", ()))


@pytest.mark.parametrize(
    ("plant", "problem"),
    [
        (trained_twice, r"rows \[0, 1, 2, 3\] of .* are in the ledger more than once"),
        (missing_shard, r"00000001-0000-.* is in the ledger and not in the log"),
        (no_such_row, r"the ledger names row 4 of .*, which has 4"),
        (a_gap, r"ledger/main/00000002.json is missing, and the ledger goes on to step 3"),
    ],
)
def test_the_audit_finds_planted_faults(plant: Plant, problem: str) -> None:
    storage = committed()
    take(make_source(storage), [1])
    assert audit(storage).trained == 4
    plant(storage, entries(storage)[0])
    problems = buffer_cases.audit(storage).problems
    assert any(re.search(problem, line) for line in problems), problems
