"""Promise of JSON with a checksum: it reads back as written, and one flipped bit is always detected."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftdask.storage.checked_json import MAX_DEPTH, dump_checked, load_checked, parse_portable

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text().filter(lambda key: key != "crc32"), VALUES), st.sampled_from([None, 1]))
def test_a_written_tree_reads_back(tree: dict[str, object], indent: int | None) -> None:
    assert load_checked(dump_checked(tree, indent)) == tree


def test_no_flipped_bit_goes_unnoticed() -> None:
    tree = {"step": 14, "rows": [1, 2, 3], "source": "00000007-0000-abc.parquet", "notes": {"loss": 0.25}}
    data = dump_checked(tree)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found = load_checked(bytes(flipped))
        except ValueError:
            continue
        # The one place left is the name of the field itself; the content is then intact, with one field more.
        assert {key: found.get(key) for key in tree} == tree


@pytest.mark.parametrize("data", [b"", b"[1]", b'"x"', b"{", b"\xff"])
def test_only_objects_are_accepted(data: bytes) -> None:
    with pytest.raises(ValueError):
        load_checked(data)


def test_an_object_without_a_checksum_is_taken_as_it_is() -> None:
    assert load_checked(json.dumps({"a": 1}).encode()) == {"a": 1}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested deeper than 100 levels"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ["\\ud800"]}', "not text in UTF-8"),
        (b'{"\\udfff": 1}', "not text in UTF-8"),
        (b'"\xed\xa0\x80"', "not text in UTF-8"),
        (b"[NaN]", "nan, which is not a number"),
        (b"-1e999", "-inf, which is not a number"),
        (b"1" * 400, "not a number of float64"),
    ],
    ids=range(8),
)
def test_json_that_cannot_be_sent_on_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_portable(data)


def test_portable_json_is_parsed_as_it_is() -> None:
    data = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert parse_portable(data) == json.loads(data)
    assert parse_portable('{"a": "\\ud83d\\ude00", "b": [1e308, -7, null, true]}')["a"] == "\U0001f600"
