"""The experience log as JSON lines, for people: one experience a line, with every field, nothing rounded.

A line is {"schema": "1.0", "run": ..., "uid": ..., ...}, its fields those of `SCHEMA`. Numbers are the shortest that
give the same float32 again, so a line read back is the very same experience. A file is several times the size of
Parquet and slower to read; the protocol and the promises are the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pyarrow as pa

from rftdask.buffer.log.file_log import FileLog
from rftdask.buffer.log.schema import ADDED_COLUMNS, SCHEMA, SCHEMA_VERSION, Experience, experiences_to_table
from rftdask.buffer.log.shard import ShardName, check_bytes, check_version, shard_name
from rftdask.errors import DamagedError


class JsonlLog(FileLog):
    """Shards as files of JSON lines; the checksum of a file is in its name."""

    suffix = "jsonl"

    def _encode(self, experiences: Sequence[Experience], explore_step: int, unit: int) -> tuple[ShardName, bytes]:
        data = to_lines(experiences_to_table(experiences), {"schema": SCHEMA_VERSION, "run": self.run})
        name = shard_name(
            experiences, data, explore_step=explore_step, unit=unit, writer=self.writer, suffix=self.suffix
        )
        return name, data

    def _decode(self, name: ShardName, data: bytes, columns: Sequence[str] | None) -> pa.Table:
        return from_lines(name, data)


def to_lines(table: pa.Table, head: Mapping[str, str] | None = None) -> bytes:
    """A table of `SCHEMA` as JSON lines, each beginning with `head`; the same rows give the same bytes.

    What a column of a later minor version lacks is left out, so a row without it has the bytes it had before.
    """

    def shortest(column: pa.ChunkedArray) -> pa.ChunkedArray:
        # float32 as the float64 nearest to its shortest text, which is then what Python prints: 0.1, not 0.10000000149.
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


def from_lines(name: ShardName, data: bytes) -> pa.Table:
    """The rows, verified. Raises: DamagedError: they do not fit the name; DataError: another schema."""
    check_bytes(name, data)
    try:
        rows = [json.loads(line) for line in data.decode().split("\n")[:-1]]
        versions = {str(row["schema"]) for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"shard {name.text}: its checksum fits, but it is not JSON lines: {error!r}") from error
    check_version(name, versions)
    missing = {field for row in rows for field in SCHEMA.names if field not in row} - set(ADDED_COLUMNS)
    if missing or len(rows) != name.num_rows:
        raise DamagedError(f"shard {name.text}: {len(rows)} rows, fields missing: {sorted(missing) or 'none'}")
    try:
        return pa.Table.from_pylist([{**row, "metrics": list(row["metrics"].items())} for row in rows], SCHEMA)
    except (pa.ArrowException, ValueError, TypeError, AttributeError) as error:
        raise DamagedError(f"shard {name.text}: its checksum fits, but its fields do not: {error}") from error
