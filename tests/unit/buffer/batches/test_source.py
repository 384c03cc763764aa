"""Promises of the dataset source: every row once in each epoch, the same batches after a resume, no other dataset."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftdask.buffer.batches.ledger import Ledger, LedgerEntry, Rows
from rftdask.buffer.batches.source import DatasetSource
from rftdask.errors import DataError, FencedError
from rftdask.storage import Storage
from tests.unit.buffer.buffer_cases import batch_of, new_storage


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
