"""Promises of a long log and a long ledger: the cost of a resume does not grow with them, even after damage."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storage_kills import WRITES, Killed, killed_at

from rftdask.buffer.batches.ledger import Ledger, LedgerEntry, Rows
from rftdask.buffer.log.file_log import STEPS_PER_BUCKET, ParquetLog
from rftdask.buffer.log.log import COMPLETE, first_open_step, note_complete, noted_complete
from rftdask.buffer.log.retention import ResumePoint, apply_retention, removable
from rftdask.buffer.log.shard import ShardName
from rftdask.config.schema.buffer import RetentionConfig
from rftdask.errors import DamagedError
from rftdask.storage import Storage
from rftdask.testing.storage_faults import FaultyStorage
from tests.unit.buffer.buffer_cases import audit, commit_batch, experience, find_whole, make_source, new_storage, take

LAST_STEP = 3 * STEPS_PER_BUCKET + 5
BATCHES = (0, 1)


def long_log(storage: Storage, last_step: int = LAST_STEP) -> ParquetLog:
    log = ParquetLog(storage)
    for step in range(1, last_step + 1):
        for batch in BATCHES:
            log.commit([experience(step, 0, step=step)], explore_step=step, unit=batch)
    return log


def count_calls(storage: Storage) -> tuple[FaultyStorage, Counter[str]]:
    calls: Counter[str] = Counter()

    def count(verb: str, path: str, stage: str) -> None:
        if stage == "before":
            calls[f"{verb} {path}"] += 1

    return FaultyStorage(storage, count), calls


@given(st.integers(1, 60), st.integers(0, 200))
def test_the_end_of_an_unbroken_run_is_found(first: int, length: int) -> None:
    storage = new_storage()
    ledger = Ledger(storage)
    for step in range(first, first + length):
        storage.put(ledger.path(step), b"{}")
    assert ledger.last_of_run(first) == first + length - 1


def test_finding_the_end_of_a_ledger_reads_few_entries() -> None:
    storage = new_storage()
    for step in range(1, 1001):
        storage.put(Ledger(storage).path(step), b"{}")
    counted, calls = count_calls(storage)
    assert Ledger(counted).last_of_run(1) == 1000
    assert not any(call.startswith("list") for call in calls)
    assert calls.total() <= 20
    calls.clear()
    assert Ledger(counted).last_of_run(991) == 1000
    assert calls.total() <= 8


def test_an_explorer_lists_only_steps_after_the_note() -> None:
    storage = new_storage()
    log = long_log(storage)
    assert first_open_step(storage, log) == 1, "without a note the log is listed from its start"
    note_complete(storage, 2 * STEPS_PER_BUCKET)
    counted, calls = count_calls(storage)
    again = ParquetLog(counted)
    first = first_open_step(counted, again)
    assert first == 2 * STEPS_PER_BUCKET + 1
    assert {name.explore_step for name in again.shards(first)} == set(range(first, LAST_STEP + 1))
    assert sorted(call for call in calls if call.startswith("list")) == [
        "list experiences", "list experiences/000002", "list experiences/000003",
        "list experiences/compact", "list experiences/quarantine",
    ]  # fmt: skip


@pytest.mark.parametrize("data", [b"", b"{", b'{"explore_step": 128, "crc32": "00000000"}', b"[]"])
def test_a_damaged_note_costs_a_listing_and_nothing_else(data: bytes) -> None:
    storage = new_storage()
    storage.put(COMPLETE, data)
    assert (noted_complete(storage), first_open_step(storage, ParquetLog(storage))) == (0, 1)


def test_a_unit_quarantined_before_the_note_is_open_until_rerun() -> None:
    storage = new_storage()
    log = long_log(storage, STEPS_PER_BUCKET)
    note_complete(storage, STEPS_PER_BUCKET)
    lost = find_whole(log, 7, 1)
    assert lost is not None
    log.quarantine(lost, "bad")
    assert first_open_step(storage, log) == 7
    log.commit([experience(7, 0, step=7)], explore_step=7, unit=1)
    assert first_open_step(storage, log) == STEPS_PER_BUCKET + 1


def test_counting_quarantined_shards_checks_each_original_once() -> None:
    storage = new_storage()
    names = long_log(storage, 4).shards()
    for name in names:
        ParquetLog(storage).quarantine(name, "bad")
    counted, calls = count_calls(storage)
    log = ParquetLog(counted)
    assert log.num_quarantined() == len(names)
    calls.clear()
    assert log.num_quarantined() == len(names)
    assert dict(calls) == {"list experiences/quarantine": 1}


NONE = RetentionConfig(keep="none")


def trained_run(storage: Storage, num_steps: int = 6) -> None:
    """`num_steps` explore steps of four tasks in two units each, all trained, in two training steps each."""
    for step in range(1, num_steps + 1):
        for batch in BATCHES:
            commit_batch(ParquetLog(storage), step, batch)
    take(make_source(storage), range(1, 2 * num_steps + 1))


def resume_point(step: int) -> ResumePoint:
    """The resume point of a checkpoint after `step` training steps of such a run."""
    return ResumePoint(step, step // 2 + 1)


def steps_of(storage: Storage) -> list[int]:
    return sorted({name.explore_step for name in ParquetLog(storage).shards()})


def apply(storage: Storage, rule: RetentionConfig, step: int) -> int:
    return apply_retention(storage, ParquetLog(storage), Ledger(storage), rule, resume_point(step))


def test_shards_settled_by_the_oldest_checkpoint_are_removed() -> None:
    storage = new_storage()
    trained_run(storage)
    before = audit(storage)
    assert apply(storage, NONE, 8) == 8
    assert steps_of(storage) == [5, 6]
    assert audit(storage) == before and before.problems == ()
    assert apply(storage, NONE, 8) == 0, "a second pass finds nothing"
    assert apply(storage, NONE, 10) == 2


def test_a_resume_from_the_oldest_checkpoint_replays_batches() -> None:
    storage = new_storage()
    trained_run(storage)
    source = make_source(storage)
    take(source, range(1, 8))
    state = source.state_dict()  # of a checkpoint in the middle of explore step 4
    expected = take(source, range(8, 13))
    apply_retention(storage, ParquetLog(storage), Ledger(storage), NONE, ResumePoint(7, 4))
    resumed = make_source(storage)
    resumed.load_state_dict(state)
    assert take(resumed, range(8, 13)) == expected
    assert steps_of(storage) == [4, 5, 6]


def test_a_shard_that_a_later_entry_names_stays() -> None:
    storage = new_storage()
    trained_run(storage)
    reused = ParquetLog(storage).shards()[1]
    Ledger(storage).write(LedgerEntry(13, "main", (Rows(reused.text, (0,)),)))
    apply(storage, NONE, 12)
    assert ParquetLog(storage).shards() == [reused]


def test_all_keeps_all_and_some_steps_may_stay_whole() -> None:
    storage = new_storage()
    trained_run(storage)
    assert apply(storage, RetentionConfig(keep="all"), 12) == 0
    assert apply(storage, RetentionConfig(keep="none", keep_steps=4), 12) == 4
    assert steps_of(storage) == [3, 4, 5, 6]


def test_thinning_keeps_a_fraction_chosen_by_unit_numbers() -> None:
    names = [ShardName(step, batch, "ab", 1, 0, 0, 0) for step in range(1, 501) for batch in BATCHES]
    gone = removable(names, RetentionConfig(keep="thin", keep_fraction=0.1), 501, ())
    assert 850 < len(gone) < 950
    others = [ShardName(name.explore_step, name.unit, "cd", 1, 0, 0, 1) for name in names]
    assert [(n.explore_step, n.unit) for n in removable(others, RetentionConfig(keep="thin"), 501, ())] == [
        (n.explore_step, n.unit) for n in gone
    ]


def test_units_that_ran_twice_are_not_removed() -> None:
    storage = new_storage()
    commit_batch(ParquetLog(storage), 1, 0)
    trained_run(storage, 3)
    before = audit(storage)
    assert before.dropped == {"repeat": 4}
    apply(storage, NONE, 6)
    assert [name.unit for name in ParquetLog(storage).shards()] == [0, 0]
    assert audit(storage) == before


def test_a_copy_committed_after_removal_is_a_repeat() -> None:
    storage = new_storage()
    trained_run(storage, 3)
    apply(storage, NONE, 6)
    commit_batch(ParquetLog(storage), 1, 0)  # by a worker that was lost for a long time
    found = audit(storage)
    assert (found.problems, found.waiting, found.dropped) == ((), 0, {"repeat": 4})


NUM_WRITES = 10
"""Writes of a pass over four steps: the record, eight shards, and the progress."""


def test_a_pass_records_names_removes_and_notes_progress() -> None:
    storage = new_storage()
    trained_run(storage)
    verbs: list[str] = []
    apply(FaultyStorage(storage, lambda verb, path, stage: verbs.append(f"{verb} {path}")), NONE, 8)
    writes = [call for call in verbs[::2] if call.split()[0] in WRITES]
    assert writes[0] == "put experiences/removed/000000.json"
    assert {call.split()[0] for call in writes[1:-1]} == {"remove"}
    assert writes[-1] == "put experiences/removed/UNTIL.json"
    assert len(writes) == NUM_WRITES


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("number", range(NUM_WRITES))
def test_a_killed_pass_keeps_counts_and_the_next_finishes_it(number: int, moment: str) -> None:
    storage = new_storage()
    trained_run(storage)
    before = audit(storage)
    with pytest.raises(Killed):
        apply(FaultyStorage(storage, killed_at(number, moment)), NONE, 8)
    assert audit(storage) == before
    apply(storage, NONE, 8)
    assert steps_of(storage) == [5, 6]
    assert audit(storage) == before


def test_a_damaged_record_of_removed_shards_raises() -> None:
    storage = new_storage()
    trained_run(storage)
    apply(storage, NONE, 8)
    storage.put("experiences/removed/000000.json", b"{}")
    with pytest.raises(DamagedError, match=r"experiences/removed/000000.json is damaged"):
        audit(storage)
