"""Promises of a shard: its name has everything a planner needs, and bytes that do not match it are refused."""

from __future__ import annotations

import dataclasses
import io
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftdask.buffer.log.columns import SCHEMA, experiences_to_table
from rftdask.buffer.log.schema import ADDED_COLUMNS
from rftdask.buffer.log.shard import Part, ShardName, decode_shard, encode_shard
from rftdask.errors import DamagedError, DataError
from tests.unit.buffer.buffer_cases import experience


def a_shard(codec: str = "lz4") -> tuple[ShardName, bytes]:
    rows = [
        experience(task, k, min_policy_version=task, max_policy_version=task + 2) for task in (4, 5) for k in (0, 1)
    ]
    return encode_shard(rows, explore_step=12, unit=3, writer="9f3a61c2b07d", run="r", codec=codec)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_shard_comes_back_as_it_was_written(codec: str) -> None:
    rows = [experience(task, k) for task in (4, 5) for k in (0, 1)]
    name, data = encode_shard(rows, explore_step=1, unit=0, writer="ab", codec=codec)
    assert decode_shard(name, data).equals(experiences_to_table(rows))


def test_a_name_has_step_unit_writer_rows_versions_and_checksum() -> None:
    name, data = a_shard()
    assert name.text == f"00000012-0003-9f3a61c2b07d-n4-v4-7-{zlib.crc32(data):08x}.parquet"
    assert ShardName.try_parse(name.text) == name


@given(
    st.builds(
        ShardName,
        explore_step=st.integers(0, 10**11),
        unit=st.integers(0, 10**6),
        writer=st.text("0123456789abcdef", min_size=1, max_size=12),
        num_rows=st.integers(0, 10**6),
        min_policy_version=st.integers(0, 10**9),
        max_policy_version=st.integers(0, 10**9),
        crc32=st.integers(0, 2**32 - 1),
        part=st.none()
        | st.sets(st.integers(0, 9), min_size=1).map(lambda slots: Part(tuple(sorted(slots)), num_tasks=10)),
    )
)
def test_a_name_is_read_back_from_its_text(name: ShardName) -> None:
    assert ShardName.try_parse(name.text) == name


@given(st.text("0123456789-nvabcdef.parquet", max_size=60) | st.text(max_size=20))
def test_a_parsed_shard_name_has_the_parsed_text(text: str) -> None:
    name = ShardName.try_parse(text)
    assert name is None or name.text == text


@pytest.mark.parametrize(
    "text", ["", "README.md", "SEALED.json", "00000012-0003-9f3a-n4-v4-7-1c291ca3.parquet.reason.json"]
)
def test_a_file_of_somebody_else_has_no_name(text: str) -> None:
    assert ShardName.try_parse(text) is None


def test_a_name_with_more_zeros_than_ours_is_not_ours() -> None:
    # It would be looked for below a path that does not exist.
    assert ShardName.try_parse("000000012-0003-9f3a-n4-v4-7-1c291ca3.parquet") is None


@settings(max_examples=50)
@given(st.data())
def test_a_flipped_bit_is_found_wherever_it_is(data: st.DataObject) -> None:
    name, whole = a_shard()
    at = data.draw(st.integers(0, len(whole) - 1))
    bit = data.draw(st.integers(0, 7))
    for columns in (None, ["uid"]):  # even in a column that is not requested
        with pytest.raises(DamagedError, match=r"crc32 [0-9a-f]{8} does not match its name"):
            decode_shard(name, whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :], columns)


@pytest.mark.parametrize("keep", [0, 1, 4, -1])
def test_a_truncated_shard_is_refused(keep: int) -> None:
    name, data = a_shard()
    with pytest.raises(DamagedError, match=name.text):
        decode_shard(name, data[:keep])


def test_a_shard_below_the_name_of_another_is_refused() -> None:
    name, _ = a_shard()
    _, other = encode_shard([experience()], explore_step=12, unit=3, writer="ff")
    with pytest.raises(DamagedError, match="does not match its name"):
        decode_shard(name, other)


def test_rows_that_differ_from_the_name_are_refused() -> None:
    name, data = a_shard()
    with pytest.raises(DamagedError, match="4 rows"):
        decode_shard(dataclasses.replace(name, num_rows=5), data)


def with_schema(version: str | None, *drop: str) -> tuple[ShardName, bytes]:
    """A shard as another version of the package would write it."""
    table = experiences_to_table([experience()])
    metadata = {} if version is None else {"rftdask.schema": version}
    table = table.replace_schema_metadata(metadata)
    table = table.drop_columns(list(drop))
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return ShardName(1, 0, "ab", 1, 0, 0, zlib.crc32(sink.getvalue())), sink.getvalue()


@pytest.mark.parametrize(("version", "said"), [("2.0", "2.0"), (None, "unknown")])
def test_another_major_schema_is_refused_with_advice(version: str | None, said: str) -> None:
    with pytest.raises(DataError, match=rf"schema version {said}, .* reads 1.5; use the version that wrote the run"):
        decode_shard(*with_schema(version))


def test_a_later_minor_schema_is_read() -> None:
    assert decode_shard(*with_schema("1.7")).num_rows == 1


def test_a_shard_of_schema_1_0_has_null_states_and_turn_rewards() -> None:
    table = decode_shard(*with_schema("1.0", *ADDED_COLUMNS))
    assert table.column_names == SCHEMA.names
    assert (table.column("env_state").to_pylist(), table.column("turn_reward").to_pylist()) == ([None], [None])
    assert pa.concat_tables([table, decode_shard(*a_shard())]).num_rows == 5  # one log may hold both
    assert decode_shard(*with_schema("1.0", "env_state"), ["env_state", "uid"]).column("env_state").null_count == 1


def test_a_missing_column_is_named() -> None:
    with pytest.raises(DamagedError, match=r"columns missing: \['truth'\]"):
        decode_shard(*with_schema("1.0", "truth"))
    with pytest.raises(DamagedError, match=r"columns missing: \['truth'\]"):
        decode_shard(*with_schema("1.0", "truth"), ["uid", "truth"])


def test_only_requested_columns_are_decoded() -> None:
    rows = decode_shard(*a_shard())
    some = decode_shard(*a_shard(), ["reward", "tokens"])
    assert some.equals(rows.select(["reward", "tokens"]))


def test_valid_bytes_that_are_not_parquet_are_damaged() -> None:
    name = ShardName(1, 0, "ab", 1, 0, 0, zlib.crc32(b"not parquet at all"))
    with pytest.raises(DamagedError, match="not a Parquet file"):
        decode_shard(name, b"not parquet at all")


def test_strangers_can_read_a_shard() -> None:
    import duckdb  # in the dev extra; late: half a second of import for this one test

    _, data = a_shard()
    with duckdb.connect() as connection:
        connection.register("shard", pq.read_table(pa.BufferReader(data)))
        query = "select task_index, avg(reward), count(*) from shard group by all order by all"
        found = connection.sql(query).fetchall()
    assert found == [(4, 0.5, 2), (5, 0.5, 2)]
