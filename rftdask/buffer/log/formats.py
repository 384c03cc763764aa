"""Formats of a shard: experiences as the bytes of a Parquet file or of JSON lines, and the verified rows of such bytes.

The same experiences give the same bytes. JSON lines, readable by people, hold one experience per line with the fields
of `SCHEMA` and nothing rounded: {"schema": "1.0", "run": ..., "uid": ..., ...}. A number is the shortest text of the
same float32. Files are several times larger than Parquet, and slower to read.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from rftdask.buffer.log.columns import SCHEMA, experiences_to_table
from rftdask.buffer.log.schema import ADDED_COLUMNS, EXPERTS_COLUMN, SCHEMA_VERSION, Experience
from rftdask.buffer.log.shard import ShardName
from rftdask.errors import DamagedError, DataError

_PAGE_BYTES = 1 << 16
"""Page size of a column. A page that fits the processor's cache is 10 % cheaper to write than the usual megabyte."""


def encode_parquet(experiences: Sequence[Experience], run: str = "", codec: str = "lz4") -> bytes:
    """Encode experiences as a Parquet file.

    Args: codec: lz4 for file systems, where time matters; zstd for object stores, where size matters.
    Raises: ValueError: as `experiences_to_table`.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(
        experiences_to_table(experiences, run),
        sink,
        compression=codec,
        compression_level=1 if codec == "zstd" else None,
        # Few rows and many different values: dictionaries and statistics cost more to write than they save, except for
        # experts: 128 of them need 7 bits instead of 32.
        use_dictionary=[EXPERTS_COLUMN],
        write_statistics=False,
        # 5 % smaller and 20 % slower to write: worth it over a network.
        use_byte_stream_split=["rollout_logprobs.list.element"] if codec == "zstd" else False,
        data_page_size=_PAGE_BYTES,
        # One row group: a shard is read whole.
        row_group_size=1 << 20,
    )
    data: bytes = sink.getvalue().to_pybytes()
    return data


def decode_parquet(name: ShardName, data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Decode and verify the rows, with these columns of `SCHEMA`; None: with every column of the file.

    Raises: DamagedError: bytes or rows do not match the name; DataError: another schema.
    """
    _check_bytes(name, data)
    try:
        # Not read_table: it looks for a data set first, which costs as much as reading a small shard. Without the page
        # checksums: the checksum of all bytes was just verified.
        with pq.ParquetFile(pa.BufferReader(data), pre_buffer=False) as file:
            table = file.read(columns, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise DamagedError(f"shard {name.text}: its checksum fits, but it is not a Parquet file: {error}") from error
    _check_version(name, {(table.schema.metadata or {}).get(b"rftdask.schema", b"").decode()})
    wanted = SCHEMA.names if columns is None else columns
    table = with_added_columns(table, wanted)
    missing = set(wanted) - set(table.column_names)
    if missing or table.num_rows != name.num_rows:
        raise DamagedError(f"shard {name.text}: {table.num_rows} rows, columns missing: {sorted(missing) or 'none'}")
    return table


def with_added_columns(table: pa.Table, wanted: Sequence[str] = SCHEMA.names) -> pa.Table:
    """Return the table with null columns for the wanted ones that an earlier schema version lacks."""
    for column in ADDED_COLUMNS:
        if column in wanted and column not in table.column_names:
            kind = SCHEMA.field(column)
            table = table.append_column(kind, pa.nulls(table.num_rows, kind.type))
    return table


def to_lines(table: pa.Table, head: Mapping[str, str] | None = None) -> bytes:
    """Encode a table of `SCHEMA` as JSON lines, each beginning with `head`.

    Null values of `ADDED_COLUMNS` are omitted, so such a row has the same bytes as in earlier schema versions.
    """

    def shortest(column: pa.ChunkedArray) -> pa.ChunkedArray:
        # float32 via its shortest text to float64, which Python then prints as 0.1 instead of 0.10000000149.
        if pa.types.is_float32(column.type):
            return column.cast(pa.string()).cast(pa.float64())
        if pa.types.is_list(column.type) and pa.types.is_float32(column.type.value_type):
            return column.cast(pa.list_(pa.string())).cast(pa.list_(pa.float64()))
        return column

    columns = {field.name: shortest(table.column(field.name)).to_pylist() for field in SCHEMA}
    columns["metrics"] = [dict(pairs) for pairs in columns["metrics"]]
    lines = []
    for row in zip(*columns.values(), strict=True):
        fields = dict(zip(columns, row, strict=True))
        present = {key: value for key, value in fields.items() if value is not None or key not in ADDED_COLUMNS}
        lines.append(json.dumps({**(head or {}), **present}, ensure_ascii=False) + "\n")
    return "".join(lines).encode()


def encode_lines(experiences: Sequence[Experience], run: str = "", codec: str = "") -> bytes:
    """Encode experiences as JSON lines, which are not compressed. Raises: ValueError: as `experiences_to_table`."""
    return to_lines(experiences_to_table(experiences), {"schema": SCHEMA_VERSION, "run": run})


def decode_lines(name: ShardName, data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Decode and verify the rows, with all columns. Raises: as `decode_parquet`."""
    _check_bytes(name, data)
    try:
        # The last element follows the last newline, and is empty.
        rows = [json.loads(line) for line in data.decode().split("\n")[:-1]]
        versions = {str(row["schema"]) for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"shard {name.text}: its checksum fits, but it is not JSON lines: {error!r}") from error
    _check_version(name, versions)
    # Older shards lack ADDED_COLUMNS; newer ones may have more fields, which are ignored below.
    missing = {field for row in rows for field in SCHEMA.names if field not in row} - set(ADDED_COLUMNS)
    if missing or len(rows) != name.num_rows:
        raise DamagedError(f"shard {name.text}: {len(rows)} rows, fields missing: {sorted(missing) or 'none'}")
    try:
        return pa.Table.from_pylist([{**row, "metrics": list(row["metrics"].items())} for row in rows], SCHEMA)
    except (pa.ArrowException, ValueError, TypeError, AttributeError) as error:
        raise DamagedError(f"shard {name.text}: its checksum fits, but its fields do not: {error}") from error


def _check_bytes(name: ShardName, data: bytes) -> None:
    if zlib.crc32(data) != name.crc32:
        raise DamagedError(
            f"shard {name.text}: crc32 {zlib.crc32(data):08x} does not match its name ({len(data)} bytes)"
        )


def _check_version(name: ShardName, versions: Iterable[str]) -> None:
    # Later minor versions add columns that this reader ignores.
    if other := {v for v in versions if v.partition(".")[0] != SCHEMA_VERSION.partition(".")[0]}:
        raise DataError(
            f"shard {name.text}: schema version {', '.join(sorted(other)) or 'unknown'}, this rftdask reads "
            f"{SCHEMA_VERSION}; use the version that wrote the run (run.json names it)"
        )


@dataclass(frozen=True)
class Format:
    """One format of a shard."""

    encode: Callable[[Sequence[Experience], str, str], bytes]
    """(experiences, run, codec) -> bytes."""
    decode: Callable[[ShardName, bytes, Sequence[str] | None], pa.Table]
    """(name, bytes, columns or None for all) -> verified rows, with at least these columns."""
    complete: Callable[[pa.Table], pa.Table] = with_added_columns
    """Rows of any schema version -> the same rows with all columns of `SCHEMA`."""


FORMATS = {"parquet": Format(encode_parquet, decode_parquet), "jsonl": Format(encode_lines, decode_lines)}
"""Formats by the suffix of shard names."""
