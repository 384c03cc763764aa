"""Promises of back-pressure: the bound holds, and work for the next training batch is always admitted."""

import pytest

from rftdask.buffer.batches.backpressure import SETTLED_NOTE, Backpressure, SettledGroups, UnreadLimit
from rftdask.buffer.batches.ledger import Ledger, LedgerEntry
from rftdask.buffer.log.file_log import ParquetLog
from tests.unit.buffer.buffer_cases import commit_batch, make_source, new_storage, take
from tests.unit.config.config_cases import config, grpo


@pytest.mark.parametrize(
    ("limit", "unread", "mean_bytes", "admitted"),
    [
        (UnreadLimit(10, None, always=4), 9, 0.0, True),
        (UnreadLimit(10, None, always=4), 10, 0.0, False),
        (UnreadLimit(2, None, always=4), 3, 0.0, True),  # a train batch needs it
        (UnreadLimit(2, None, always=4), 4, 0.0, False),
        (UnreadLimit(None, 1000, always=4), 9, 100.0, True),
        (UnreadLimit(None, 1000, always=4), 10, 100.0, False),
        (UnreadLimit(None, 1000, always=4), 10**6, 0.0, True),  # nothing is known of sizes yet
        (UnreadLimit(10, 1000, always=4), 9, 200.0, False),
        (UnreadLimit(None, 1, always=4), 0, 10.0**9, True),
    ],
)
def test_the_smaller_limit_decides_and_a_train_batch_passes(
    limit: UnreadLimit, unread: int, mean_bytes: float, admitted: bool
) -> None:
    assert limit.admits(unread, mean_bytes) == admitted


@pytest.mark.parametrize("noted", [True, False])
def test_settled_groups_are_counted_on_from_where_they_were(noted: bool) -> None:
    storage = new_storage()
    for batch in (0, 1):
        commit_batch(ParquetLog(storage), 1, batch)
    source = make_source(storage, groups_per_batch=1, note_settled=noted)
    settled = SettledGroups(Ledger(storage))
    assert settled.count() == 0
    take(source, [1, 2])
    assert settled.count() == 2
    take(source, [3])
    assert (settled.count(), SettledGroups(Ledger(storage)).count()) == (3, 3)


def test_a_note_saves_reading_earlier_entries() -> None:
    ledger = Ledger(new_storage())
    ledger.write(LedgerEntry(1, "main", (), positions=((1, 0),)))
    ledger.write(LedgerEntry(2, "main", (), positions=((1, 1),), notes={SETTLED_NOTE: 70}))
    ledger.write(LedgerEntry(3, "main", (), positions=((1, 2), (1, 3))))
    assert SettledGroups(ledger).count() == 72


def test_no_unit_begins_at_the_unread_limit() -> None:
    stage = config(grpo(), "algorithm.repeat_times=2", "buffer.trainer_input.experience_buffer.capacity=20")
    pressure = Backpressure(stage, Ledger(new_storage()))
    assert [pressure.has_room(num_groups) for num_groups in (9, 10)] == [True, False]
