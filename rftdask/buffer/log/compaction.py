"""Compacted: where the shards of a log are that were merged into few large files, and the order of writing that loses
none.

`<log>/compact/<bucket>-<crc32>.parquet` is a large file and `<bucket>-<crc32>.json` beside it the record that makes it
count: which shards it holds, and checksums. Neither is ever changed or removed. Invariants: a record is written after
its file was read back whole, and a shard goes only after a record that names it. So whoever finds a shard gone finds
its record, and whoever lists shards first and records then misses none; one may stand in both, or in two files.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rftdask.buffer.log.merged_file import (
    MergedFile,
    RowGroup,
    Shards,
    Span,
    file_crc32,
    merge_shards,
    read_merged,
    rows_of,
)
from rftdask.buffer.log.prefetch import in_order
from rftdask.buffer.log.shard import ShardName
from rftdask.errors import DamagedError, NotFoundError
from rftdask.storage import Storage
from rftdask.storage.checked_json import dump_checked, load_checked

COMPACT = "compact"
"""Folder of a log with its large files."""
NUM_THREADS = 8
"""Small files of a log that are read or removed at once."""
_RECORD = re.compile(r"(\d{6,})-([0-9a-f]{8})\.json")


@dataclass(frozen=True)
class Compaction:
    """What a pass did."""

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
        self._records: dict[str, MergedFile] = {}
        """By their paths without a suffix. They never change."""
        self._places: dict[str, tuple[str, int]] = {}
        """Of each shard in them, the file and the row group."""
        self._lock = threading.Lock()
        """Of what follows."""
        self._opened = ExitStack()
        weakref.finalize(self, self._opened.close)  # nothing in the stack refers to this object
        self._open: tuple[str, Path] | None = None
        """The last file read from: on object stores a copy that took a while."""
        self._group: tuple[tuple[str, int], pa.Table] | None = None
        """The last row group: shards are mostly read in their order."""

    def __getstate__(self) -> dict[str, Any]:
        return {"storage": self._storage, "folder": self._folder.removesuffix(f"/{COMPACT}")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def names(self, first_bucket: str = "", last_bucket: str | None = None) -> set[ShardName]:
        """Of all shards in the files of these buckets. One listing, and a read for each record not read before.

        Raises: DamagedError: a record.
        """
        files = self._files(first_bucket, last_bucket).values()
        return {name for file in files for text in file.shards if (name := ShardName.try_parse(text)) is not None}

    def read(self, bucket: str, name: ShardName) -> pa.Table:
        """The rows of a shard. Raises: NotFoundError: no large file has it; DamagedError: the file."""
        if not self.has(bucket, name):
            raise NotFoundError(f"shard {name.text} does not exist in {self._storage.url}")
        with self._lock:
            place = base, number = self._places[name.text]
            file = self._records[base]
            if self._group is None or self._group[0] != place:
                self._group = (place, read_merged(self._local(base), file, number))
            return rows_of(self._group[1], file.groups[number], name)

    def has(self, bucket: str, name: ShardName) -> bool:
        """Whether a large file holds the shard. Looks at storage for one that was not known to be."""
        return name.text in self._places or any(name.text in f.shards for f in self._files(bucket, bucket).values())

    def write(self, bucket: str, shards: Shards) -> Compaction:
        """Large files with these shards; they count when this returns. Raises: DamagedError: storage lost bytes."""
        done = Compaction()
        for file, data in merge_shards(shards):
            base = f"{self._folder}/{bucket}-{file.crc32:08x}"
            self._storage.put(f"{base}.parquet", data)
            self._check(base, file)
            self._storage.put(f"{base}.json", dump_checked({"file": asdict(file)}))
            done += Compaction(num_files=1, file_bytes=len(data))
        return done

    def check(self, bucket: str, names: Collection[ShardName]) -> None:
        """That the files with these shards are whole, for the shards are about to go. Raises: DamagedError."""
        texts = {name.text for name in names}
        for base, file in self._files(bucket, bucket).items():
            if not texts.isdisjoint(file.shards):
                self._check(base, file)

    def _check(self, base: str, file: MergedFile) -> None:
        with _local_copy(self._storage, f"{base}.parquet") as path:
            found = (path.stat().st_size, file_crc32(path))
        if found != (file.size_bytes, file.crc32):
            raise DamagedError(f"{base}.parquet is not what was written; the shards that are still there stay")

    def _files(self, first_bucket: str, last_bucket: str | None) -> dict[str, MergedFile]:
        """What the records on storage say, by their paths without a suffix."""
        found = [match for text in self._storage.list(self._folder) if (match := _RECORD.fullmatch(text)) is not None]
        wanted = [m for m in found if m[1] >= first_bucket and (last_bucket is None or m[1] <= last_bucket)]
        bases = [f"{self._folder}/{match[1]}-{match[2]}" for match in wanted]
        new = [base for base in bases if base not in self._records]
        for base, file in zip(new, in_order(self._load, new, NUM_THREADS), strict=True):
            self._records[base] = file
            for number, group in enumerate(file.groups):
                self._places.update((text, (base, number)) for text in group.shards)
        return {base: self._records[base] for base in bases}

    def _load(self, base: str) -> MergedFile:
        path = f"{base}.json"
        try:
            tree = load_checked(self._storage.get(path))["file"]
            groups = tuple(RowGroup(Span(**group["span"]), tuple(group["shards"])) for group in tree["groups"])
            return MergedFile(tree["size_bytes"], tree["crc32"], groups, Span(**tree["tail"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{path} is damaged ({error}); restore it from a backup: it names shards") from error

    def _local(self, base: str) -> Path:
        """The file as a local path, kept until another is asked for. The lock is held."""
        if self._open is None or self._open[0] != base:
            self._opened.close()
            self._open = None
            path = self._opened.enter_context(_local_copy(self._storage, f"{base}.parquet"))
            self._open = (base, path)
        return self._open[1]


@contextmanager
def _local_copy(storage: Storage, path: str) -> Iterator[Path]:
    with ExitStack() as stack:
        try:
            local = stack.enter_context(storage.local_copy(path))
        except NotFoundError as error:
            raise DamagedError(f"{path} is missing; restore it from a backup") from error
        yield local
