"""Compaction: many small shards of a log merged into few large Parquet files, and the order of writing that loses none.

`<log>/compact/<bucket>-<crc32>.parquet` is a large file and `<bucket>-<crc32>.json` beside it the record that makes it
count: which shards it holds, and checksums. Neither is ever changed or removed. Invariants: a record is written after
its file was read back whole, and a shard goes only after a record that names it. So whoever finds a shard gone finds
its record, and whoever lists shards first and records then misses none; one may stand in both, or in two files.

A row of a large file has two columns more, `shard` and `row`, by which ledger entries name it. A row group holds whole
shards, so the rows of one are read without the others'. Every byte is covered by a checksum: one of each row group, and
one of what follows the last.
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
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rftdask.buffer.log.schema import EXPERTS_COLUMN
from rftdask.buffer.log.shard import ShardName
from rftdask.errors import DamagedError, NotFoundError
from rftdask.storage import Storage
from rftdask.storage.base import in_order
from rftdask.storage.checked_json import dump_checked, load_checked

COMPACT = "compact"
"""Folder of a log with its large files."""
NUM_THREADS = 8
"""Small files of a log that are read or removed at once."""
_RECORD = re.compile(r"(\d{6,})-([0-9a-f]{8})\.json")
MAX_FILE_BYTES = 256 << 20
"""A file ends with the row group that passes this; the merger holds one file in memory."""
MIN_GROUP_ROWS = 1024
"""A row group ends with the shard that passes this."""
_PLACE = pa.schema([pa.field("shard", pa.string(), nullable=False), pa.field("row", pa.int32(), nullable=False)])

Shards = Iterable[tuple[ShardName, pa.Table]]


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
        self._storage = storage
        self._folder = f"{folder}/{COMPACT}"
        self._records: dict[str, MergedFile] = {}  # By their paths without a suffix. They never change.
        self._places: dict[str, tuple[str, int]] = {}  # Of each shard in them, the file and the row group.
        self._lock = threading.Lock()
        """Guards what follows: the last file read from, on object stores a copy that took a while, and the last row
        group, because shards are mostly read in their order.
        """
        self._opened = ExitStack()
        weakref.finalize(self, self._opened.close)  # nothing in the stack refers to this object
        self._open: tuple[str, Path] | None = None
        self._group: tuple[tuple[str, int], pa.Table] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"storage": self._storage, "folder": self._folder.removesuffix(f"/{COMPACT}")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Made anew: locks and open files do not travel, and what the records say is read again.
        self.__init__(**state)  # type: ignore[misc]

    def names(self, first_bucket: str = "", last_bucket: str | None = None) -> set[ShardName]:
        """The names of all shards in the files of these buckets. One listing, and a read for each new record.

        Raises: DamagedError: a record.
        """
        files = self._files(first_bucket, last_bucket).values()
        return {name for file in files for text in file.shards if (name := ShardName.try_parse(text)) is not None}

    def read(self, bucket: str, name: ShardName) -> pa.Table:
        """The rows of a shard. Raises: NotFoundError: no large file has it; DamagedError: the file."""
        if not self.has(bucket, name):
            raise NotFoundError(f"shard {name.text} does not exist in {self._storage.url}")
        with self._lock:
            # Under the lock for the whole read: another thread would close the file under this one.
            place = base, number = self._places[name.text]
            file = self._records[base]
            if self._group is None or self._group[0] != place:
                if self._open is None or self._open[0] != base:
                    self._opened.close()
                    self._open = None  # first: if the copy fails, the one before is gone all the same
                    self._open = (base, self._opened.enter_context(_local_copy(self._storage, f"{base}.parquet")))
                self._group = (place, read_merged(self._open[1], file, number))
            return rows_of(self._group[1], file.groups[number], name)

    def has(self, bucket: str, name: ShardName) -> bool:
        """True if a large file holds the shard. Looks at storage for one that is not known yet."""
        return name.text in self._places or any(name.text in f.shards for f in self._files(bucket, bucket).values())

    def write(self, bucket: str, shards: Shards) -> Compaction:
        """Write large files with these shards; they count when this returns. Raises: DamagedError: storage lost bytes.

        Killed before a record: the file beside it counts for nobody, and the next pass makes it again, to the byte.
        """
        done = Compaction()
        for file, data in merge_shards(shards):
            # The record last, after the file was read back: only then may a shard that it names go.
            base = f"{self._folder}/{bucket}-{file.crc32:08x}"
            self._storage.put(f"{base}.parquet", data)
            self._check(base, file)
            self._storage.put(f"{base}.json", dump_checked({"file": asdict(file)}))
            done += Compaction(num_files=1, file_bytes=len(data))
        return done

    def check(self, bucket: str, names: Collection[ShardName]) -> None:
        """Verify the files with these shards, which are about to go. Raises: DamagedError: one is not whole."""
        texts = {name.text for name in names}
        for base, file in self._files(bucket, bucket).items():
            if not texts.isdisjoint(file.shards):
                self._check(base, file)

    def _check(self, base: str, file: MergedFile) -> None:
        size_bytes = crc32 = 0
        with _local_copy(self._storage, f"{base}.parquet") as path, path.open("rb") as opened:
            while data := opened.read(1 << 20):
                size_bytes, crc32 = size_bytes + len(data), zlib.crc32(data, crc32)
        # Of the bytes as storage gives them back, not of those in memory: this is the last look before shards go.
        if (size_bytes, crc32) != (file.size_bytes, file.crc32):
            raise DamagedError(f"{base}.parquet is not what was written; the shards that are still there stay")

    def _files(self, first_bucket: str, last_bucket: str | None) -> dict[str, MergedFile]:
        """The records on storage, by their paths without a suffix."""
        records = [match for text in self._storage.list(self._folder) if (match := _RECORD.fullmatch(text)) is not None]
        # Bucket numbers have leading zeros, so they compare as text.
        wanted = [m for m in records if m[1] >= first_bucket and (last_bucket is None or m[1] <= last_bucket)]
        bases = [f"{self._folder}/{match[1]}-{match[2]}" for match in wanted]
        # A record never changes, so each is read once by a process.
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
    """Bytes of a file that are checked together."""

    begin: int
    end: int
    crc32: int


@dataclass(frozen=True)
class RowGroup:
    """Whole shards, one after another; their names in the order of the rows."""

    span: Span
    shards: tuple[str, ...]


@dataclass(frozen=True)
class MergedFile:
    """The content of one large file, and the checksums of its bytes."""

    size_bytes: int
    crc32: int
    groups: tuple[RowGroup, ...]
    tail: Span
    """From the end of the last row group to the end of the file: the index of the columns, and the schema."""

    @property
    def shards(self) -> tuple[str, ...]:
        """Names of all the shards that it holds."""
        return tuple(shard for group in self.groups for shard in group.shards)


def merge_shards(shards: Shards) -> Iterator[tuple[MergedFile, bytes]]:
    """Large files with these shards, in their order. The same shards give the same bytes.

    Shards of another schema begin another file. Those without any row, at the end of a file, are in none.
    """
    # By the schema with its metadata: the run, and the version of the schema.
    for _, alike in groupby(shards, key=lambda shard: shard[1].schema.serialize().to_pybytes()):
        sink = io.BytesIO()
        writer: pq.ParquetWriter | None = None
        groups: list[tuple[int, tuple[str, ...]]] = []  # where each row group begins, and its shards
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
            groups.append((sink.tell(), names))  # all before it is written: the writer keeps nothing back
            writer.write_table(table, row_group_size=len(table))
            if sink.tell() >= MAX_FILE_BYTES:
                yield _finish(writer, sink, groups)
                # A file of its own from here on; the one before is complete, and its bytes go to storage at once.
                sink, writer, groups = io.BytesIO(), None, []
        if writer is not None:
            yield _finish(writer, sink, groups)


def _row_groups(shards: Shards) -> Iterator[tuple[tuple[str, ...], pa.Table]]:
    """Whole shards together, with the columns of their places, until there are `MIN_GROUP_ROWS` rows."""
    names: list[str] = []
    tables: list[pa.Table] = []
    num_rows = 0
    for name, table in shards:
        names.append(name.text)
        for field, column in zip(_PLACE, _place(name).columns, strict=True):
            table = table.append_column(field, column)
        tables.append(table)
        num_rows += len(table)
        # Kept small: a row group is the least that is read for one shard.
        if num_rows >= MIN_GROUP_ROWS:
            yield tuple(names), pa.concat_tables(tables)
            names, tables, num_rows = [], [], 0
    # The rest of the bucket, however few.
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

    # A row group ends where the next one begins: nothing else is written between them.
    ends = [*(begin for begin, _ in groups[1:]), end]
    row_groups = tuple(RowGroup(span(begin, end), names) for (begin, names), end in zip(groups, ends, strict=True))
    return MergedFile(len(data), zlib.crc32(data), row_groups, span(end, len(data))), data


def read_merged(path: Path, file: MergedFile, number: int) -> pa.Table:
    """Read row group `number`, verified. Raises: DamagedError."""
    # Before Parquet sees a byte: a footer that was changed may send its reader anywhere.
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
    before = map(ShardName.try_parse, group.shards[: group.shards.index(name.text)])
    # Shards stand in a row group one after another, and each name tells its number of rows.
    rows = table.slice(sum(other.num_rows for other in before if other is not None), name.num_rows)
    if not rows.select(_PLACE.names).equals(_place(name)):
        raise DamagedError(f"shard {name.text} is not where its merged file should have it")
    return rows.drop_columns(_PLACE.names)


def _place(name: ShardName) -> pa.Table:
    """The columns by which the rows of a shard are known."""
    return pa.table([[name.text] * name.num_rows, range(name.num_rows)], _PLACE)
