"""Merge: the rows of many shards as few large Parquet files, of which each row says where it is from. Pure; no storage.

A row has two columns more, `shard` and `row`, by which ledger entries name it. A row group holds whole shards, so the
rows of one are read without the others'. Every byte is covered by a checksum: one of each row group, and one of what
follows the last.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rftdask.buffer.log.shard import ShardName
from rftdask.errors import DamagedError

MAX_FILE_BYTES = 256 << 20
"""A file ends with the row group that passes this; the merger holds one file in memory."""
MIN_GROUP_ROWS = 1024
"""A row group ends with the shard that passes this."""
_PLACE = pa.schema([pa.field("shard", pa.string(), nullable=False), pa.field("row", pa.int32(), nullable=False)])

Shards = Iterable[tuple[ShardName, pa.Table]]


@dataclass(frozen=True)
class Span:
    """Bytes of a file that are checked together."""

    begin: int
    end: int
    crc32: int


@dataclass(frozen=True)
class RowGroup:
    """Whole shards, one after another."""

    span: Span
    shards: tuple[str, ...]
    """Their names, in the order of the rows."""


@dataclass(frozen=True)
class MergedFile:
    """What one large file holds, and what its bytes must be."""

    size_bytes: int
    crc32: int
    groups: tuple[RowGroup, ...]
    tail: Span
    """From the end of the last row group to the end of the file: the index of the columns, and the schema."""

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(shard for group in self.groups for shard in group.shards)


def merge_shards(shards: Shards) -> Iterator[tuple[MergedFile, bytes]]:
    """Large files with these shards, in their order. The same shards give the same bytes.

    Shards of another schema begin another file. Those without any row, at the end of a file, are in none.
    """
    for _, alike in groupby(shards, key=lambda shard: _schema_key(shard[1].schema)):
        groups: list[tuple[str, ...]] = []
        for names, table in _row_groups(alike):
            if not groups:
                sink = io.BytesIO()
                writer = _writer(sink, table.schema)
            writer.write_table(table, row_group_size=len(table))
            groups.append(names)
            if sink.tell() >= MAX_FILE_BYTES:
                yield _finish(writer, sink, groups)
                groups = []
        if groups:
            yield _finish(writer, sink, groups)


def read_merged(path: Path, file: MergedFile, number: int) -> pa.Table:
    """Row group `number`, verified. Raises: DamagedError."""
    with path.open("rb") as opened:
        for span in (file.groups[number].span, file.tail):
            opened.seek(span.begin)
            if zlib.crc32(opened.read(span.end - span.begin)) != span.crc32:
                raise DamagedError(f"{path.name}: bytes {span.begin} to {span.end} do not match their checksum")
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as parquet:
            return parquet.read_row_group(number, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise DamagedError(f"{path.name}: its checksums fit, but it is not a Parquet file: {error}") from error


def rows_of(table: pa.Table, group: RowGroup, name: ShardName) -> pa.Table:
    """The rows of one shard of a row group, as the shard had them. Raises: DamagedError: they are not its rows."""
    names = [ShardName.try_parse(text) for text in group.shards]
    before = names[: group.shards.index(name.text)]
    rows = table.slice(sum(other.num_rows for other in before if other is not None), name.num_rows)
    if not rows.select(_PLACE.names).equals(_place(name)):
        raise DamagedError(f"shard {name.text} is not where its merged file should have it")
    return rows.drop_columns(_PLACE.names)


def file_crc32(path: Path) -> int:
    """Of all its bytes."""
    crc32 = 0
    with path.open("rb") as opened:
        while data := opened.read(1 << 20):
            crc32 = zlib.crc32(data, crc32)
    return crc32


def _schema_key(schema: pa.Schema) -> bytes:
    key: bytes = schema.serialize().to_pybytes()  # with its metadata: the run, and the version of the schema
    return key


def _row_groups(shards: Shards) -> Iterator[tuple[tuple[str, ...], pa.Table]]:
    names: list[str] = []
    tables: list[pa.Table] = []
    num_rows = 0
    for name, table in shards:
        names.append(name.text)
        tables.append(_with_place(table, name))
        num_rows += len(table)
        if num_rows >= MIN_GROUP_ROWS:
            yield tuple(names), pa.concat_tables(tables)
            names, tables, num_rows = [], [], 0
    if num_rows:
        yield tuple(names), pa.concat_tables(tables)


def _with_place(table: pa.Table, name: ShardName) -> pa.Table:
    place = _place(name)
    for field, column in zip(place.schema, place.columns, strict=True):
        table = table.append_column(field, column)
    return table


def _place(name: ShardName) -> pa.Table:
    """The columns by which the rows of a shard are known."""
    columns = [pa.array([name.text] * name.num_rows, pa.string()), pa.array(range(name.num_rows), pa.int32())]
    return pa.Table.from_arrays(columns, schema=_PLACE)


def _writer(sink: io.BytesIO, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        sink,
        schema,
        compression="zstd",
        compression_level=3,
        use_dictionary=["shard"],
        write_statistics=["explore_step", "shard"],
        use_byte_stream_split=["rollout_logprobs.list.element"],
        write_page_checksum=True,
    )


def _finish(writer: pq.ParquetWriter, sink: io.BytesIO, groups: Sequence[tuple[str, ...]]) -> tuple[MergedFile, bytes]:
    writer.close()
    data = sink.getvalue()
    # A Parquet file ends with the size of its footer and four letters.
    tail = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    with pq.ParquetFile(pa.BufferReader(data)) as parquet:
        begins = [_begin(parquet.metadata.row_group(number)) for number in range(len(groups))]
    ends = [*begins[1:], tail]
    found = tuple(
        RowGroup(_span(data, begin, end), names) for begin, end, names in zip(begins, ends, groups, strict=True)
    )
    return MergedFile(len(data), zlib.crc32(data), found, _span(data, tail, len(data))), data


def _begin(group: pq.RowGroupMetaData) -> int:
    """Of its first byte."""
    columns = (group.column(number) for number in range(group.num_columns))
    return min(
        column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset for column in columns
    )


def _span(data: bytes, begin: int, end: int) -> Span:
    return Span(begin, end, zlib.crc32(memoryview(data)[begin:end]))
