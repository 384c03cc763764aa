"""Promises of the ledger: a step is written once, a second writer is fenced, a damaged entry raises."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftdask.buffer.batches.ledger import Ledger, LedgerEntry, Rows
from rftdask.errors import DamagedError, FencedError
from tests.unit.buffer.buffer_cases import new_storage

ENTRY = LedgerEntry(
    step=7,
    lineage="main",
    use=(Rows("a.parquet", (0, 1, 3)), Rows("b.parquet", (2,))),
    drop=(Rows("a.parquet", (2,), "failed"),),
    positions=((7, 0), (7, 3)),
    notes={"priority": 0.5},
)

_rows = st.builds(Rows, st.text(max_size=9), st.lists(st.integers(0, 99), max_size=4).map(tuple), st.text(max_size=9))
_some_rows = st.lists(_rows, max_size=3).map(tuple)
_positions = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=4).map(tuple)
_notes = st.dictionaries(st.text(max_size=4), st.floats(allow_nan=False), max_size=2)


@given(st.builds(LedgerEntry, st.integers(1, 10**9), st.text(max_size=9), _some_rows, _some_rows, _positions, _notes))
def test_an_entry_comes_back_as_it_was_written(entry: LedgerEntry) -> None:
    assert LedgerEntry.from_json(entry.to_json()) == entry


def test_an_entry_is_read_by_its_step() -> None:
    ledger = Ledger(new_storage())
    assert (ledger.read(7), ledger.last_step()) == (None, 0)
    ledger.write(ENTRY)
    assert (ledger.read(7), ledger.read(8), ledger.last_step()) == (ENTRY, None, 7)


def test_a_second_writer_is_fenced_and_the_first_entry_stays() -> None:
    storage = new_storage()
    Ledger(storage).write(ENTRY)
    with pytest.raises(FencedError, match=r"ledger/main/00000007.json was written by another trainer"):
        Ledger(storage).write(LedgerEntry(7, "main", (Rows("c.parquet", (0,)),)))
    assert Ledger(storage).read(7) == ENTRY


def test_lineages_do_not_see_each_other() -> None:
    storage = new_storage()
    Ledger(storage).write(ENTRY)
    assert Ledger(storage, "fork").last_step() == 0


def test_files_of_others_are_not_steps() -> None:
    storage = new_storage()
    ledger = Ledger(storage)
    ledger.write(ENTRY)
    for name in ("notes.txt", "00000009.json.bak", "old/00000008.json"):
        storage.put(f"ledger/main/{name}", b"?")
    assert ledger.last_step() == 7


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b'"x"', b"\xff\xfe", ENTRY.to_json()[:-9], b'{"use": 1}'])
def test_a_damaged_entry_raises_with_its_path(data: bytes) -> None:
    storage = new_storage()
    storage.put("ledger/main/00000007.json", data)
    with pytest.raises(DamagedError, match=r"ledger/main/00000007.json is damaged .* restore it"):
        Ledger(storage).read(7)


@pytest.mark.parametrize(("step", "lineage"), [(8, "main"), (7, "fork")])
def test_an_entry_in_the_place_of_another_is_refused(step: int, lineage: str) -> None:
    storage = new_storage()
    storage.put(f"ledger/{lineage}/{step:08d}.json", ENTRY.to_json())
    with pytest.raises(DamagedError, match="holds step 7 of lineage main: files were moved"):
        Ledger(storage, lineage).read(step)
