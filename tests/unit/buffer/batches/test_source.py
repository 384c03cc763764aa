"""Promises of the dataset source: every row once in each epoch, the same batches after a resume, no other dataset."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftdask.buffer.batches.audit import Audit
from rftdask.buffer.batches.batch import TrainingBatch, batch_from_table
from rftdask.buffer.batches.ledger import Ledger, LedgerEntry, Rows
from rftdask.buffer.batches.log_source import EntryReader
from rftdask.buffer.batches.source import BASELINE, BatchFilter, DatasetSource, Demonstrations, RowOrder
from rftdask.buffer.log.columns import experiences_to_table
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.schema import Turn
from rftdask.errors import DataError, EmptyBatchError, FencedError
from rftdask.storage import Storage
from tests.unit.buffer.buffer_cases import audit, batch_of, committed, entries, experience, make_source, new_storage


def rows(numbers: Sequence[int]) -> list[tuple[Sequence[int], int, Sequence[bool] | None]]:
    return [((1, 2, n), 1, None) for n in numbers]


def make(storage: Storage, **fields: Any) -> DatasetSource:
    values: dict[str, Any] = {"num_rows": 6, "fingerprint": "f1", "batch_size": 2, "total_epochs": 2, "shuffle_seed": 7}
    values.update(fields)
    return DatasetSource(rows, values.pop("num_rows"), values.pop("fingerprint"), Ledger(storage), **values)


def numbers(source: DatasetSource, first: int = 1, last: int = 10**6) -> list[list[int]]:
    found = []
    for step in range(first, last + 1):
        batch = batch_of(source, step)
        if batch is None:
            break
        found.append([int(tokens[-1]) for tokens in batch[1].row_tokens()])
        assert list(batch[0].use[0].rows) == found[-1]
    return found


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.none() | st.integers(0, 99))
def test_every_row_comes_once_in_each_epoch(num_rows: int, size: int, epochs: int, seed: int | None) -> None:
    source = make(new_storage(), num_rows=num_rows, batch_size=size, total_epochs=epochs, shuffle_seed=seed)
    flat = [n for batch in numbers(source) for n in batch]
    assert len(flat) == num_rows * epochs // size * size, "only what does not fill a batch is left out"
    for start in range(0, len(flat), num_rows):
        epoch = flat[start : start + num_rows]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(num_rows))
    if seed is None:
        assert flat == [n % num_rows for n in range(len(flat))]


def test_a_shuffle_differs_by_epoch_and_by_seed() -> None:
    source = make(new_storage(), num_rows=40, batch_size=40)
    first, second = numbers(source)
    assert first != second != list(range(40))
    assert numbers(make(new_storage(), num_rows=40, batch_size=40, shuffle_seed=8))[0] != first


def test_any_integer_is_a_seed() -> None:
    assert numbers(make(new_storage(), shuffle_seed=-1, total_epochs=1))


@pytest.mark.parametrize("killed_at", range(7))
def test_a_resumed_source_gives_the_same_batches(killed_at: int) -> None:
    expected = numbers(make(new_storage()))
    storage = new_storage()
    first = make(storage)
    assert numbers(first, last=killed_at) == expected[:killed_at]
    second = make(storage)
    second.load_state_dict(first.state_dict())
    assert numbers(second) == expected


def test_checkpoint_and_ledger_refuse_another_dataset() -> None:
    storage = new_storage()
    first = make(storage)
    numbers(first, last=1)
    changed = make(storage, fingerprint="f2")
    with pytest.raises(DataError, match="the dataset has changed since the checkpoint: was dataset:f1, is dataset:f2"):
        changed.load_state_dict(first.state_dict())
    with pytest.raises(
        DataError, match=r"ledger/main/00000001.json was written for dataset:f1, the dataset is now dataset:f2"
    ):
        batch_of(changed, 1)


def test_a_second_trainer_is_fenced() -> None:
    storage = new_storage()
    mine, other = make(storage), make(storage)
    batch_of(mine, 1)
    batch_of(other, 1)  # recorded before its first read: it agrees
    batch_of(other, 2)
    with pytest.raises(FencedError, match="another trainer is running"):
        batch_of(mine, 2)


def test_the_ledger_decides_and_not_the_seed() -> None:
    storage = new_storage()
    Ledger(storage).write(LedgerEntry(1, "main", (Rows("dataset:f1", (5, 5)),)))
    assert numbers(make(storage), last=1) == [[5, 5]]


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        make(new_storage(), num_rows=0)


def test_a_row_of_another_epoch_is_another_uid() -> None:
    source = make(new_storage(), num_rows=2)
    batches = [batch_of(source, 1), batch_of(source, 2)]
    uids = [uid for found in batches if found for uid in found[1].uids]
    assert len(set(uids)) == 4
    assert uids[0].startswith("dataset:f1/0/")


class DropRollout(BatchFilter):
    """Drops one rollout of every task, and doubles and raises the rewards of the others."""

    def __init__(self, rollout: int | None, reason: str = "why") -> None:
        self._rollout = rollout
        self._reason = reason

    def reasons(self, table: pa.Table, step: int) -> list[str]:
        drop = [self._rollout is None or k == self._rollout for k in table.column("rollout").to_pylist()]
        return [self._reason if d else "" for d in drop]

    def rewards(self, table: pa.Table) -> np.ndarray:
        return 2 * super().rewards(table) + 5


def filled() -> Storage:
    return committed([(1, 0), (1, 1)])


def first(storage: Storage, **options: object) -> tuple[LedgerEntry, TrainingBatch]:
    found = batch_of(make_source(storage, **options), 1)
    assert found is not None
    return found


def test_dropped_rows_are_in_the_ledger_with_their_reason() -> None:
    storage = filled()
    entry, batch = first(storage, batch_filter=DropRollout(0))
    assert [rows.rows for rows in entry.use] == [(1,), (3,)]
    assert [(rows.rows, rows.reason) for rows in entry.drop] == [((0,), "why"), ((2,), "why")]
    assert batch.uids == ("t/0/0/1/0", "t/0/1/1/0")
    assert audit(storage) == Audit(committed=8, trained=2, waiting=4, dropped={"why": 2})


def test_a_replay_trains_the_same_rewards() -> None:
    storage = filled()
    _, batch = first(storage, batch_filter=DropRollout(0))
    _, again = first(storage, batch_filter=DropRollout(0))
    assert batch.rewards.tolist() == again.rewards.tolist() == [7.0, 7.0]


class MaskRollout(BatchFilter):
    """Masks the second rollout of every task."""

    def masked(self, table: pa.Table) -> np.ndarray:
        return table.column("rollout").to_numpy() == 1


def test_a_masked_row_is_in_the_batch_without_trained_tokens() -> None:
    entry, batch = first(filled(), batch_filter=MaskRollout())
    assert sum(len(rows.rows) for rows in entry.use) == len(batch) == 4 and not entry.drop
    trained = [bool(mask.any()) for mask in batch.row_masks()]
    assert trained == [uid.split("/")[3] == "0" for uid in batch.uids]


def test_a_batch_without_rows_is_still_a_batch() -> None:
    storage = filled()
    source = make_source(storage, batch_filter=DropRollout(None))
    found = batch_of(source, 1)
    assert found is not None
    assert (len(found[1]), found[1].sampled, found[0].use) == (0, False, ())
    found = batch_of(source, 2)
    assert found is not None and found[0].step == 2


def test_the_baseline_is_the_reward_of_the_dropped_rollout() -> None:
    storage = filled()
    for _ in range(2):  # the second time from the ledger
        _, batch = first(storage, batch_filter=DropRollout(1, BASELINE))
        assert batch.baselines is not None
        assert batch.baselines.tolist() == [7.0, 7.0], "curated like the rewards it is compared with"
        assert batch.uids == ("t/0/0/0/0", "t/0/1/0/0")


def read(numbers: Sequence[int]) -> list[tuple[Sequence[int], int, None]]:
    return [((1, 2, n), 1, None) for n in numbers]


def demonstrations(fingerprint: str = "f1", seed: int | None = None) -> Demonstrations:
    return Demonstrations(read, fingerprint, RowOrder(5, seed), per_batch=3)


def test_demonstrations_are_recorded_and_follow_the_rollouts() -> None:
    storage = filled()
    entry, batch = first(storage, demonstrations=demonstrations())
    assert entry.use[-1].source == "dataset:f1"
    assert entry.use[-1].rows == (0, 1, 2)
    assert batch.experts.tolist() == [False] * 4 + [True] * 3
    assert batch.groups.tolist() == [0, 0, 1, 1, 2, 3, 4]
    assert batch.rollouts.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert [row.tolist() for row in batch.row_tokens()[4:]] == [[1, 2, 0], [1, 2, 1], [1, 2, 2]]
    assert batch.uids[4:] == ("dataset:f1/0/0", "dataset:f1/1/1", "dataset:f1/2/2")
    assert audit(storage).trained == 4


def test_demonstrations_continue_across_batches_and_epochs() -> None:
    shown = demonstrations()
    assert [shown.rows(step)[0][0].rows for step in (1, 2)] == [(0, 1, 2), (3, 4, 0)]
    shuffled = demonstrations(seed=3)
    assert sorted(shuffled.rows(1)[0][0].rows + shuffled.rows(2)[0][0].rows[:2]) == [0, 1, 2, 3, 4]
    assert demonstrations(seed=3).rows(2) == shuffled.rows(2), "whatever was asked for before"


def without(*bad: int) -> Any:
    """A reader that cannot use some rows."""

    def read(numbers: Sequence[int]) -> list[tuple[Sequence[int], int, None]]:
        for number in {*numbers} & {*bad}:
            raise DataError(f"row {number}: column 'answer' holds NoneType, not text")
        return [((1, 2, n), 1, None) for n in numbers]

    return read


def test_rows_that_cannot_be_used_are_dropped_with_their_reason() -> None:
    storage = new_storage()

    def source() -> DatasetSource:
        fields: dict[str, Any] = {"batch_size": 3, "total_epochs": 1, "shuffle_seed": None}
        return DatasetSource(without(1), 6, "f1", Ledger(storage), **fields)

    for used in (source(), source()):  # the second one replays the ledger
        assert numbers(used) == [[0, 2], [3, 4, 5]]
    reason = "bad_row: row 1: column 'answer' holds NoneType, not text"
    assert [entry.drop for entry in entries(storage)] == [(Rows("dataset:f1", (1,), reason),), ()]


def test_a_forecast_reads_the_rows_that_its_step_trains() -> None:
    read = list[int]()
    usable = without(1)

    def counted(numbers: Sequence[int]) -> Any:
        read.extend(numbers)
        return usable(numbers)

    ledger, fields = Ledger(new_storage()), {"batch_size": 3, "total_epochs": 1, "shuffle_seed": None}
    source = DatasetSource(counted, 3, "f1", ledger, **fields)  # type: ignore[arg-type]
    forecast = source.look_ahead(1)
    assert forecast is not None
    source.read_ahead(forecast)
    assert source.entry(1) == forecast
    assert len(source.read(forecast)) == 2
    assert read == [0, 1, 2], "each row once"


def test_a_batch_without_a_usable_row_ends_the_run_unless_allowed() -> None:
    def source(max_bad_rows: int) -> DatasetSource:
        fields: dict[str, Any] = {"batch_size": 2, "total_epochs": 1, "shuffle_seed": None}
        return DatasetSource(without(0, 1), 4, "f1", Ledger(new_storage()), max_bad_rows=max_bad_rows, **fields)

    with pytest.raises(EmptyBatchError, match=r"batch 1 has nothing to train: none of its 2 rows can be used.*row 0"):
        source(1).entry(1)
    allowed = source(2)
    entry = allowed.entry(1)
    assert entry is not None
    allowed.read_ahead(entry)
    assert len(allowed.read(entry)) == 0
    assert [len(batch) for _, batch in filter(None, [batch_of(allowed, 2)])] == [2]


def test_demonstrations_that_cannot_be_used_are_dropped() -> None:
    storage = filled()
    entry, batch = first(storage, demonstrations=Demonstrations(without(1), "f1", RowOrder(5, None), per_batch=3))
    assert entry.use[-1].rows == (0, 2)
    assert [rows.rows for rows in entry.drop if rows.of_dataset] == [(1,)]
    assert [row.tolist() for row in batch.row_tokens()[4:]] == [[1, 2, 0], [1, 2, 2]]
    assert audit(storage).problems == ()


def test_another_dataset_than_the_ledgers_is_refused() -> None:
    storage = filled()
    first(storage, demonstrations=demonstrations())
    with pytest.raises(DataError, match="dataset:f1, the dataset is now dataset:f2"):
        batch_of(make_source(storage, demonstrations=demonstrations("f2")), 1)
    with pytest.raises(DataError, match="no demonstrations are configured"):
        batch_of(make_source(storage), 1)


def test_turns_of_a_rollout_share_its_number() -> None:
    rows = [experience(0, 0), experience(0, 1), experience(0, 1, turn=1), experience(1, 0)]
    batch = batch_from_table(experiences_to_table(rows))
    assert batch.rollouts.tolist() == [0, 1, 1, 2]
    assert batch.turns.tolist() == [0, 0, 1, 0]
    assert batch.groups.tolist() == [0, 0, 0, 1]


def test_rows_of_one_turn_and_rows_of_several_stand_in_one_batch() -> None:
    turns = (Turn(0, 0, 1, 0, 1, "user", 7, 0, 0, "a", 0.5), Turn(2, 2, 3, 1, 2, "tool", 8))
    told = experience(0, 1, loss_mask=(True, False, True), turns=turns)
    alone = experience(0, 1, turn=1, env_state="b", turn_reward=0.25)
    batch = batch_from_table(experiences_to_table([alone, told, experience(1, 0)]))
    assert batch.num_turns.tolist() == [1, 2, 1]
    assert (batch.turns.tolist(), batch.turn_lengths.tolist()) == ([1, 0, 2, 0], [3, 1, 2, 3])
    assert batch.states is not None and batch.turn_rewards is not None
    assert (batch.states.tolist(), batch.turn_rewards.tolist()) == ([0, 1, -1, -1], [0.25, 0.5, 0.0, 0.0])
    rows = batch.by_turns()
    assert [row.tolist() for row in rows.row_tokens()] == [[0, 1, 9], [0], [1, 9], [1, 0, 9]]
    assert (rows.ordinals.tolist(), rows.rollouts.tolist()) == ([1, 0, 2, 0], [0, 0, 0, 1])


@given(st.sets(st.integers(0, 7)), st.booleans())
@settings(max_examples=30)
def test_reading_some_places_gives_rows_of_the_whole_batch(places: set[int], with_baseline: bool) -> None:
    storage = filled()
    shown = demonstrations()
    curation = DropRollout(0, BASELINE if with_baseline else "why")
    source = make_source(storage, groups_per_batch=4, batch_filter=curation, demonstrations=shown)
    entry, whole = batch_of(source, 1) or pytest.fail("no batch")
    at = sorted(place for place in places if place < len(whole))
    reader = EntryReader(ParquetLog(storage), batch_filter=curation, demonstrations=shown)
    part = reader.read(entry, at)
    assert part.uids == tuple(whole.uids[place] for place in at)
    for name in ("rewards", "lengths", "experts", "min_policy_versions", *(["baselines"] if with_baseline else [])):
        assert getattr(part, name).tolist() == getattr(whole, name)[at].tolist(), name
    assert [t.tolist() for t in part.row_tokens()][: len(part)] == [whole.row_tokens()[place].tolist() for place in at]
