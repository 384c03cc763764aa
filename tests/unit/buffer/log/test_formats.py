"""Promises of the formats of a shard: bytes or rows that do not match its name are refused, as is another schema."""

import dataclasses
import io
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rftdask.buffer.log.columns import SCHEMA, decode_parquet, experiences_to_table
from rftdask.buffer.log.schema import ADDED_COLUMNS
from rftdask.buffer.log.shard import ShardName
from rftdask.errors import DamagedError, DataError
from tests.unit.buffer.buffer_cases import experience, parquet_shard

ROWS = [experience(task, k) for task in (4, 5) for k in (0, 1)]
SHARD = parquet_shard(ROWS)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_shard_comes_back_as_it_was_written(codec: str) -> None:
    assert decode_parquet(*parquet_shard(ROWS, codec)).equals(experiences_to_table(ROWS))


@settings(max_examples=50)
@given(st.data())
def test_a_flipped_bit_is_found_wherever_it_is(data: st.DataObject) -> None:
    name, whole = SHARD
    at = data.draw(st.integers(0, len(whole) - 1))
    bit = data.draw(st.integers(0, 7))
    for columns in (None, ["uid"]):  # even in a column that is not requested
        with pytest.raises(DamagedError, match=r"crc32 [0-9a-f]{8} does not match its name"):
            decode_parquet(name, whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :], columns)


@pytest.mark.parametrize("keep", [0, 1, 4, -1])
def test_a_truncated_shard_is_refused(keep: int) -> None:
    name, data = SHARD
    with pytest.raises(DamagedError, match=name.text):
        decode_parquet(name, data[:keep])


def test_a_shard_below_the_name_of_another_is_refused() -> None:
    with pytest.raises(DamagedError, match="does not match its name"):
        decode_parquet(SHARD[0], parquet_shard([experience()])[1])


def test_rows_that_differ_from_the_name_are_refused() -> None:
    name, data = SHARD
    with pytest.raises(DamagedError, match="4 rows"):
        decode_parquet(dataclasses.replace(name, num_rows=5), data)


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
        decode_parquet(*with_schema(version))


def test_a_later_minor_schema_is_read() -> None:
    assert decode_parquet(*with_schema("1.7")).num_rows == 1


def test_a_shard_of_schema_1_0_has_null_states_and_turn_rewards() -> None:
    table = decode_parquet(*with_schema("1.0", *ADDED_COLUMNS))
    assert table.column_names == SCHEMA.names
    assert (table.column("env_state").to_pylist(), table.column("turn_reward").to_pylist()) == ([None], [None])
    assert pa.concat_tables([table, decode_parquet(*SHARD)]).num_rows == 5  # one log may hold both
    assert decode_parquet(*with_schema("1.0", "env_state"), ["env_state", "uid"]).column("env_state").null_count == 1


def test_a_missing_column_is_named() -> None:
    with pytest.raises(DamagedError, match=r"columns missing: \['truth'\]"):
        decode_parquet(*with_schema("1.0", "truth"))
    with pytest.raises(DamagedError, match=r"columns missing: \['truth'\]"):
        decode_parquet(*with_schema("1.0", "truth"), ["uid", "truth"])


def test_only_requested_columns_are_decoded() -> None:
    rows = decode_parquet(*SHARD)
    some = decode_parquet(*SHARD, ["reward", "tokens"])
    assert some.equals(rows.select(["reward", "tokens"]))


def test_valid_bytes_that_are_not_parquet_are_damaged() -> None:
    name = ShardName(1, 0, "ab", 1, 0, 0, zlib.crc32(b"not parquet at all"))
    with pytest.raises(DamagedError, match="not a Parquet file"):
        decode_parquet(name, b"not parquet at all")


def test_strangers_can_read_a_shard() -> None:
    import duckdb  # in the dev extra; late: half a second of import for this one test

    _, data = SHARD
    with duckdb.connect() as connection:
        connection.register("shard", pq.read_table(pa.BufferReader(data)))
        query = "select task_index, avg(reward), count(*) from shard group by all order by all"
        found = connection.sql(query).fetchall()
    assert found == [(4, 0.5, 2), (5, 0.5, 2)]
