"""Compaction: merges many small shards of a log into few large Parquet files, in a write order that loses none.

`<log>/compact/<bucket>-<crc32>.parquet` is a large file, and `<bucket>-<crc32>.json` the record that makes it valid,
with the names of its shards and checksums. Neither is ever changed or removed. Invariants: a record is written after
its file was read back whole, and a shard is removed only after a record names it. So a reader that finds a shard gone
finds its record, and a reader that lists shards first and records second misses none; a shard may be in both, or in
two files.

Rows of a large file have two additional columns, `shard` and `row`, by which ledger entries name them. A row group
holds whole shards, so one shard is read without the other row groups. Checksums cover every byte: one per row group,
and one for the rest of the file.
pyarrow is imported late, because a reader that only lists shards does not need it.
"""

from __future__ import annotations

import io
import re
import threading
import weakref
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rftdask.buffer.log.schema import EXPERTS_COLUMN
from rftdask.buffer.log.shard import ShardName
from rftdask.errors import DamagedError, NotFoundError
from rftdask.storage import Storage
from rftdask.storage.base import in_order
from rftdask.storage.checked_json import dump_checked, load_checked

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

COMPACT = "compact"
"""Folder of the large files of a log."""
NUM_THREADS = 8
"""Number of small files of a log that are read or removed concurrently."""
_RECORD = re.compile(r"(\d{6,})-([0-9a-f]{8})\.json")
MAX_FILE_BYTES = 256 << 20
"""A file ends with the row group that exceeds this size; the merger holds one file in memory."""
MIN_GROUP_ROWS = 1024
"""A row group ends with the shard that reaches this number of rows."""

Shards: TypeAlias = "Iterable[tuple[ShardName, pa.Table]]"


@dataclass(frozen=True)
class Compaction:
    """Counts of a compaction pass."""

    num_shards: int = 0
    num_rows: int = 0
    shard_bytes: int = 0
    num_files: int = 0
    file_bytes: int = 0

    def __add__(self, other: Compaction) -> Compaction:
        return Compaction(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


class CompactedShards:
    """The large files of one log. Safe to use from threads; instances pickle.

    Example:
        compacted.write("000003", [(name, table), ...])
        compacted.names("000003"); compacted.read("000003", name)
    """

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage, self._log_folder = storage, folder
        self._folder = f"{folder}/{COMPACT}"
        self._records: dict[str, MergedFile] = {}  # By path without suffix. Records never change.
        self._places: dict[str, tuple[str, int]] = {}  # Shard -> file and row group.
        self._lock = threading.Lock()
        """Guards the cache of the last file (a local copy if storage is remote) and the last row group: shards are
        mostly read in order."""
        self._opened = ExitStack()
        weakref.finalize(self, self._opened.close)  # nothing in the stack refers to this object
        self._open: tuple[str, Path] | None = None
        self._group: tuple[tuple[str, int], pa.Table] | None = None

    def __reduce__(self) -> tuple[type[CompactedShards], tuple[Storage, str]]:
        return CompactedShards, (self._storage, self._log_folder)

    def names(self, first_bucket: str = "", last_bucket: str | None = None) -> set[ShardName]:
        """Return the names of all shards in the files of these buckets, by one listing and one read per new record.

        Raises: DamagedError: a record is damaged.
        """
        files = self._files(first_bucket, last_bucket).values()
        return {name for file in files for text in file.shards if (name := ShardName.try_parse(text)) is not None}

    def read(self, bucket: str, name: ShardName) -> pa.Table:
        """Read the rows of a shard. Raises: NotFoundError: no large file has it; DamagedError: the file is damaged."""
        if not self.has(bucket, name):
            raise NotFoundError(f"shard {name.text} does not exist in {self._storage.url}")
        with self._lock:
            # Locked for the whole read: another thread would close the file.
            place = base, number = self._places[name.text]
            file = self._records[base]
            if self._group is None or self._group[0] != place:
                if self._open is None or self._open[0] != base:
                    self._opened.close()
                    self._open = None  # before the copy, which may fail: the previous file is closed
                    self._open = (base, self._opened.enter_context(_local_copy(self._storage, f"{base}.parquet")))
                self._group = (place, read_merged(self._open[1], file, number))
            return rows_of(self._group[1], file.groups[number], name)

    def has(self, bucket: str, name: ShardName) -> bool:
        """Return True if a large file holds the shard. Lists storage if it is not known yet."""
        return name.text in self._places or any(name.text in f.shards for f in self._files(bucket, bucket).values())

    def write(self, bucket: str, shards: Shards) -> Compaction:
        """Write large files with these shards; valid when this returns. Raises: DamagedError: storage lost bytes.

        Killed before a record is written: the file is ignored, and the next pass writes it again, byte by byte.
        """
        done = Compaction()
        for file, data in merge_shards(shards):
            # The record is written last, after the file was read back: then its shards may be removed.
            base = f"{self._folder}/{bucket}-{file.crc32:08x}"
            self._storage.put(f"{base}.parquet", data)
            self._check(base, file)
            self._storage.put(f"{base}.json", dump_checked({"file": asdict(file)}))
            done += Compaction(num_files=1, file_bytes=len(data))
        return done

    def check(self, bucket: str, names: Collection[ShardName]) -> None:
        """Verify the files with these shards before the shards are removed. Raises: DamagedError."""
        texts = {name.text for name in names}
        for base, file in self._files(bucket, bucket).items():
            if not texts.isdisjoint(file.shards):
                self._check(base, file)

    def _check(self, base: str, file: MergedFile) -> None:
        size_bytes = crc32 = 0
        with _local_copy(self._storage, f"{base}.parquet") as path, path.open("rb") as opened:
            while data := opened.read(1 << 20):
                size_bytes, crc32 = size_bytes + len(data), zlib.crc32(data, crc32)
        # The bytes that storage returns, not those in memory: this is the last check before shards are removed.
        if (size_bytes, crc32) != (file.size_bytes, file.crc32):
            raise DamagedError(f"{base}.parquet is not what was written; its remaining shards were kept")

    def _files(self, first_bucket: str, last_bucket: str | None) -> dict[str, MergedFile]:
        """Return the records on storage, by path without suffix."""
        records = [match for text in self._storage.list(self._folder) if (match := _RECORD.fullmatch(text)) is not None]
        # Bucket numbers have leading zeros, so they compare as text.
        wanted = [m for m in records if m[1] >= first_bucket and (last_bucket is None or m[1] <= last_bucket)]
        bases = [f"{self._folder}/{match[1]}-{match[2]}" for match in wanted]
        new = [base for base in bases if base not in self._records]

        def load(base: str) -> MergedFile:
            path = f"{base}.json"
            try:
                tree = load_checked(self._storage.get(path))["file"]
                groups = tuple(RowGroup(Span(**group["span"]), tuple(group["shards"])) for group in tree["groups"])
                return MergedFile(tree["size_bytes"], tree["crc32"], groups, Span(**tree["tail"]))
            except (ValueError, KeyError, TypeError) as error:
                raise DamagedError(f"{path} is damaged ({error}); restore it from a backup: it names shards") from error

        for base, file in zip(new, in_order(load, new, NUM_THREADS), strict=True):
            self._records[base] = file
            for number, group in enumerate(file.groups):
                self._places.update((text, (base, number)) for text in group.shards)
        return {base: self._records[base] for base in bases}


@contextmanager
def _local_copy(storage: Storage, path: str) -> Iterator[Path]:
    try:
        with storage.local_copy(path) as local:
            yield local
    except NotFoundError as error:
        raise DamagedError(f"{path} is missing; restore it from a backup") from error


# ---- one large file


@dataclass(frozen=True)
class Span:
    """A range of bytes of a file with its checksum."""

    begin: int
    end: int
    crc32: int


@dataclass(frozen=True)
class RowGroup:
    """Whole shards, one after another; names in the order of the rows."""

    span: Span
    shards: tuple[str, ...]


@dataclass(frozen=True)
class MergedFile:
    """The content of one large file, and the checksums of its bytes."""

    size_bytes: int
    crc32: int
    groups: tuple[RowGroup, ...]
    tail: Span
    """The end of the file, after the last row group: the index of the columns, and the schema."""

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(shard for group in self.groups for shard in group.shards)


def merge_shards(shards: Shards) -> Iterator[tuple[MergedFile, bytes]]:
    """Yield large files with these shards, in their order. The same shards give the same bytes.

    Shards of another schema begin another file. Shards without rows at the end of a file are omitted.
    """
    import pyarrow.parquet as pq

    # The schema includes its metadata: the run, and the version of the schema.
    for _, alike in groupby(shards, key=lambda shard: shard[1].schema.serialize().to_pybytes()):
        sink = io.BytesIO()
        writer: pq.ParquetWriter | None = None
        groups: list[tuple[int, tuple[str, ...]]] = []  # begin of each row group, and its shards
        for names, table in _row_groups(alike):
            writer = writer or pq.ParquetWriter(
                sink,
                table.schema,
                compression="zstd",
                compression_level=3,
                use_dictionary=["shard", EXPERTS_COLUMN],
                write_statistics=["explore_step", "shard"],
                use_byte_stream_split=["rollout_logprobs.list.element"],
                write_page_checksum=True,
            )
            groups.append((sink.tell(), names))  # the writer buffers nothing, so this is the begin
            writer.write_table(table, row_group_size=len(table))
            if sink.tell() >= MAX_FILE_BYTES:
                yield _finish(writer, sink, groups)
                sink, writer, groups = io.BytesIO(), None, []
        if writer is not None:
            yield _finish(writer, sink, groups)


def _row_groups(shards: Shards) -> Iterator[tuple[tuple[str, ...], pa.Table]]:
    """Yield row groups of whole shards, with the columns `shard` and `row`, of `MIN_GROUP_ROWS` or more rows."""
    import pyarrow as pa

    names: list[str] = []
    tables: list[pa.Table] = []
    num_rows = 0
    for name, table in shards:
        names.append(name.text)
        place = _place(name)
        for field, column in zip(place.schema, place.columns, strict=True):
            table = table.append_column(field, column)
        tables.append(table)
        num_rows += len(table)
        # Small, because reading one shard reads a whole row group.
        if num_rows >= MIN_GROUP_ROWS:
            yield tuple(names), pa.concat_tables(tables)
            names, tables, num_rows = [], [], 0
    if num_rows:
        yield tuple(names), pa.concat_tables(tables)


def _finish(
    writer: pq.ParquetWriter, sink: io.BytesIO, groups: Sequence[tuple[int, tuple[str, ...]]]
) -> tuple[MergedFile, bytes]:
    end = sink.tell()
    writer.close()
    data = sink.getvalue()

    def span(begin: int, end: int) -> Span:
        return Span(begin, end, zlib.crc32(memoryview(data)[begin:end]))

    # A row group ends where the next one begins.
    ends = [*(begin for begin, _ in groups[1:]), end]
    row_groups = tuple(RowGroup(span(begin, end), names) for (begin, names), end in zip(groups, ends, strict=True))
    return MergedFile(len(data), zlib.crc32(data), row_groups, span(end, len(data))), data


def read_merged(path: Path, file: MergedFile, number: int) -> pa.Table:
    """Read row group `number`, verified. Raises: DamagedError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Before Parquet parses anything: a damaged footer may point anywhere.
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
    """Return the rows of one shard from a row group of a merged file.

    Raises: DamagedError: the rows at its position belong to another shard.
    """
    before = map(ShardName.try_parse, group.shards[: group.shards.index(name.text)])
    # Shards follow one another in a row group, and their names contain the numbers of rows.
    rows = table.slice(sum(other.num_rows for other in before if other is not None), name.num_rows)
    place = _place(name)
    if not rows.select(place.column_names).equals(place):
        raise DamagedError(f"shard {name.text} is not at its place in its merged file; restore the file from a backup")
    return rows.drop_columns(place.column_names)


def _place(name: ShardName) -> pa.Table:
    import pyarrow as pa

    columns = [pa.field("shard", pa.string(), nullable=False), pa.field("row", pa.int32(), nullable=False)]
    return pa.table([[name.text] * name.num_rows, range(name.num_rows)], pa.schema(columns))
