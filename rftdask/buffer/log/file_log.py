"""The experience log as files: immutable shards in small buckets. A commit is one atomic put: a listed name is
committed.

`FileLog` finds and quarantines shards; its subclasses define the format of a shard: Parquet, or JSON lines. pyarrow and
the schema are imported late, because a listing of shards does not need them.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from rftdask.buffer.log.compaction import NUM_THREADS, CompactedShards, Compaction
from rftdask.buffer.log.log import EXPERIENCES, ExperienceLog
from rftdask.buffer.log.schema import ADDED_COLUMNS, SCHEMA_VERSION, Experience
from rftdask.buffer.log.shard import (
    Part,
    ShardName,
    check_bytes,
    check_version,
    decode_shard,
    encode_shard,
    shard_name,
    with_added_columns,
)
from rftdask.errors import DamagedError, DataError, NotFoundError
from rftdask.storage import Storage
from rftdask.storage.base import in_order
from rftdask.storage.checked_json import dump_checked, load_checked

if TYPE_CHECKING:
    import pyarrow as pa

STEPS_PER_BUCKET = 64
"""Limits a bucket to some hundreds of shards, so that the cost of listing one does not grow."""

_SEALED = "SEALED.json"
_MAX_PARSED = 8  # Buckets whose names are kept parsed.
_REMOVED = "removed"  # Folder with one file a bucket that names the shards retention removed.


class FileLog(ExperienceLog):
    """A log whose shards are files of one format."""

    suffix: str
    """Suffix of the names of its shards."""
    num_readers = NUM_THREADS

    def __init__(self, storage: Storage, folder: str = EXPERIENCES, run: str = "") -> None:
        super().__init__(folder, run)
        self._storage = storage
        self._gone: set[str] = set()  # Quarantined shards whose originals are gone.
        self._parsed: dict[str, dict[str, ShardName | None]] = {}
        """Parsed names of recently listed buckets: a waiting trainer polls, and parsing costs more than listing."""

    @abstractmethod
    def _encode(self, experiences: Sequence[Experience], explore_step: int, unit: int) -> tuple[ShardName, bytes]:
        """Return the name and the bytes of a shard."""

    @abstractmethod
    def _decode(self, name: ShardName, data: bytes, columns: Sequence[str] | None) -> pa.Table:
        """Return the verified rows, with at least these columns. Raises: DamagedError; DataError: another schema."""

    def path(self, name: ShardName) -> str:
        """Return the path of a loose shard, relative to the run folder."""
        return f"{self.folder}/{self._bucket(name.explore_step)}/{name.text}"

    def check(self) -> None:
        """Make one listing; a missing folder is an empty log."""
        self._storage.list(self.folder)

    def commit(
        self, experiences: Sequence[Experience], *, explore_step: int, unit: int, part: Part | None = None
    ) -> ShardName:
        """Make one `put`, which shows the whole file or nothing. No second record can be lost, or be wrong."""
        name, data = self._encode(experiences, explore_step, unit)
        # Only the name has the part: the bytes are those of a whole unit with the same rows.
        name = replace(name, part=part)
        self._storage.put(self.path(name), data)
        return name

    def find_all(self, explore_step: int, unit: int) -> list[ShardName]:
        names = self._names_in(self._bucket(explore_step))
        return [n for n in names if (n.explore_step, n.unit) == (explore_step, unit)]

    def shards(self, first_step: int = 1) -> list[ShardName]:
        """List the folder, and each bucket from that of `first_step` on."""
        first = self._bucket(first_step)
        folders = (folder.rstrip("/") for folder in self._storage.list(self.folder))
        buckets = [bucket for bucket in folders if bucket.isdigit() and bucket >= first]
        return _sorted(n for bucket in buckets for n in self._names_in(bucket) if n.explore_step >= first_step)

    def read(self, name: ShardName, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the whole file, because its checksum covers all of it; `columns` only saves decoding."""
        return self._decode(name, self._storage.get(self.path(name)), columns)

    def quarantine(self, name: ShardName, reason: str) -> None:
        """Move the shard to `quarantine/`, with the reason in a second file."""
        # Copy, write the reason, remove the original: after a kill in between the shard is still listed, and is
        # quarantined again. Its unit runs again only when the original is gone.
        base = f"{self.folder}/quarantine/{name.text}"
        try:
            self._storage.put(base, self._storage.get(self.path(name)))
        except NotFoundError:
            return  # another process quarantined it
        self._storage.put(base + ".reason.json", json.dumps({"shard": name.text, "reason": reason}).encode())
        self._storage.remove(self.path(name))

    def num_quarantined(self) -> int:
        """Return the number of quarantined shards whose originals are gone."""
        # Called every few seconds: one listing, and one check per shard until its original is gone.
        for name in self.quarantined():
            if name.text not in self._gone and not self._storage.exists(self.path(name)):
                self._gone.add(name.text)
        return len(self._gone)

    def quarantined(self) -> list[ShardName]:
        """List `quarantine/`; the names of the reason files are not shard names."""
        return self._names_in("quarantine")

    def remove(self, names: Sequence[ShardName]) -> None:
        """Remove the files; `removed/<bucket>.json` keeps the names, which contain the numbers of rows."""
        # The names are recorded before the first shard is removed, so that counts still add up after a kill.
        buckets: dict[str, set[str]] = defaultdict(set)
        for name in names:
            buckets[self._bucket(name.explore_step)].add(name.text)
        for bucket, texts in sorted(buckets.items()):
            record = f"{self.folder}/{_REMOVED}/{bucket}.json"
            # A repeated pass finds the names recorded, and does not write the record again.
            known = {name.text for name in self._read_removed(record)}
            if not texts <= known:
                self._storage.put(record, dump_checked({"shards": sorted(texts | known)}))
        for name in names:
            self._storage.remove(self.path(name))

    def removed(self, first_step: int = 1) -> list[ShardName]:
        """Return the recorded names, including shards whose files still exist after a kill."""
        folder = f"{self.folder}/{_REMOVED}"
        first = self._bucket(first_step)
        buckets = [n for n in self._storage.list(folder) if n.removesuffix(".json").isdigit()]
        names = (n for b in buckets if b.removesuffix(".json") >= first for n in self._read_removed(f"{folder}/{b}"))
        return sorted(n for n in names if n.explore_step >= first_step)

    def _read_removed(self, record: str) -> list[ShardName]:
        try:
            texts = load_checked(self._storage.get(record))["shards"]
        except NotFoundError:
            return []
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{record} is damaged ({error}); restore it from a backup: it counts rows") from error
        return [name for text in texts if (name := ShardName.try_parse(text)) is not None]

    def seal(self, num_explore_steps: int) -> None:
        self._storage.put(f"{self.folder}/{_SEALED}", dump_checked({"num_explore_steps": num_explore_steps}))

    def unseal(self) -> None:
        self._storage.remove(f"{self.folder}/{_SEALED}")

    def sealed_at(self) -> int | None:
        try:
            data = self._storage.get(f"{self.folder}/{_SEALED}")
        except NotFoundError:
            return None
        try:
            return int(load_checked(data)["num_explore_steps"])
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{self.folder}/{_SEALED} is damaged ({data[:40]!r}); remove it to go on") from error

    def _names_in(self, folder: str) -> list[ShardName]:
        before = self._parsed.get(folder, {})
        texts = self._storage.list(f"{self.folder}/{folder}")
        parsed = {text: before[text] if text in before else ShardName.try_parse(text) for text in texts}
        # Drop all at once: a run moves from bucket to bucket, so most of them are no longer needed.
        if len(self._parsed) >= _MAX_PARSED:
            self._parsed.clear()
        self._parsed[folder] = parsed
        return [n for n in parsed.values() if n is not None and n.suffix == self.suffix]

    @staticmethod
    def _bucket(explore_step: int) -> str:
        return f"{explore_step // STEPS_PER_BUCKET:06d}"


def _sorted(names: Iterable[ShardName]) -> list[ShardName]:
    # Faster than the comparison of the dataclass: a waiting trainer sorts hundreds of names in each poll.
    return sorted(names, key=lambda n: (n.explore_step, n.unit, n.writer, n.text))


class ParquetLog(FileLog):
    """Shards as Parquet files, readable by DuckDB, pandas and Dask; they can be compacted. The default."""

    suffix = "parquet"

    def __init__(self, storage: Storage, folder: str = EXPERIENCES, run: str = "") -> None:
        super().__init__(storage, folder, run)
        self._compacted = CompactedShards(storage, folder)
        # Over a network, size matters more than the speed of decoding; on a local disk it is the other way round.
        self._codec = "zstd" if "://" in storage.url and not storage.url.startswith("memory") else "lz4"

    def _encode(self, experiences: Sequence[Experience], explore_step: int, unit: int) -> tuple[ShardName, bytes]:
        return encode_shard(
            experiences, explore_step=explore_step, unit=unit, writer=self.writer, run=self.run, codec=self._codec
        )

    def _decode(self, name: ShardName, data: bytes, columns: Sequence[str] | None) -> pa.Table:
        return decode_shard(name, data, columns)

    def shards(self, first_step: int = 1) -> list[ShardName]:
        """Return loose and compacted shards, each once, ordered by step and unit."""
        loose = self.loose_shards(first_step)  # first: shards that a pass moves meanwhile are then in its record
        moved = self.compacted_shards(first_step)
        return _sorted({*loose, *moved}) if moved else loose

    def loose_shards(self, first_step: int = 1) -> list[ShardName]:
        """Return the shards in files of their own, some of which a running pass may have merged already."""
        return super().shards(first_step)

    def compacted_shards(self, first_step: int = 1, last_step: int | None = None) -> list[ShardName]:
        """Read the records of the merged files; both bounds are inclusive."""
        names = self._compacted.names(self._bucket(first_step), None if last_step is None else self._bucket(last_step))
        return [n for n in names if first_step <= n.explore_step and (last_step is None or n.explore_step <= last_step)]

    def read(self, name: ShardName, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the shard's own file, or the merged file if it has none."""
        try:
            return super().read(name, columns)
        except NotFoundError:
            from rftdask.buffer.log.columns import SCHEMA

            rows = self._compacted.read(self._bucket(name.explore_step), name)
            rows = with_added_columns(rows, SCHEMA.names)
            return rows if columns is None else rows.select(columns)

    def quarantine(self, name: ShardName, reason: str) -> None:
        """See FileLog. Raises: DamagedError: the shard was compacted: other shards share its file."""
        if self._compacted.has(self._bucket(name.explore_step), name):
            raise DamagedError(f"{reason}; it was compacted and cannot run again: restore the file from a backup")
        super().quarantine(name, reason)

    def compact(self, names: Sequence[ShardName], should_stop: Callable[[], bool] = lambda: False) -> Compaction:
        """Compact bucket by bucket; a shard is removed only after its merged file was read back whole."""
        sizes: dict[ShardName, int] = {}

        def read(name: ShardName) -> pa.Table | None:
            try:
                data = self._storage.get(self.path(name))
                table = self._decode(name, data, None)
            except (DamagedError, NotFoundError, DataError):
                return None  # this shard is not compacted
            sizes[name] = len(data)
            return table

        done = Compaction()
        for bucket, group in groupby(_sorted(names), key=lambda name: self._bucket(name.explore_step)):
            if should_stop():
                break
            shards = list(group)
            # Shards that a previous pass merged but did not remove are only removed, after another check of the file.
            merged = self._compacted.names(bucket, bucket)
            small = [name for name in shards if name not in merged]
            # A single shard gains nothing; it waits for a later pass.
            if len(small) > 1:
                # Threads read ahead while files are written: the merger holds one file, not the bucket.
                tables = zip(small, in_order(read, small, NUM_THREADS), strict=True)
                done += self._compacted.write(bucket, ((name, table) for name, table in tables if table is not None))
            # These files were last verified by an earlier process.
            self._compacted.check(bucket, merged.intersection(shards))
            # Remove only shards that a record on storage names. Killed here: the next pass removes the rest.
            gone = self._compacted.names(bucket, bucket).intersection(shards)
            for _ in in_order(self._storage.remove, [self.path(name) for name in _sorted(gone)], NUM_THREADS):
                pass
            num_bytes = sum(sizes.get(name, 0) for name in gone)
            done += Compaction(len(gone), sum(name.num_rows for name in gone), num_bytes)
        return done


# ---- JSON lines


class JsonlLog(FileLog):
    """Shards as files of JSON lines, readable by people: one experience per line, with every field, nothing rounded.

    A line is {"schema": "1.0", "run": ..., "uid": ..., ...} with the fields of `SCHEMA`. A number is the shortest text
    of the same float32, so a line reads back as exactly the same experience. Files are several times larger than
    Parquet, and slower to read.
    """

    suffix = "jsonl"

    def _encode(self, experiences: Sequence[Experience], explore_step: int, unit: int) -> tuple[ShardName, bytes]:
        from rftdask.buffer.log.columns import experiences_to_table

        data = to_lines(experiences_to_table(experiences), {"schema": SCHEMA_VERSION, "run": self.run})
        name = shard_name(
            experiences, data, explore_step=explore_step, unit=unit, writer=self.writer, suffix=self.suffix
        )
        return name, data

    def _decode(self, name: ShardName, data: bytes, columns: Sequence[str] | None) -> pa.Table:
        return from_lines(name, data)


def to_lines(table: pa.Table, head: Mapping[str, str] | None = None) -> bytes:
    """Encode a table of `SCHEMA` as JSON lines, each beginning with `head`; the same rows give the same bytes.

    Null values of `ADDED_COLUMNS` are omitted, so such a row has the same bytes as in earlier schema versions.
    """

    import pyarrow as pa

    from rftdask.buffer.log.columns import SCHEMA

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


def from_lines(name: ShardName, data: bytes) -> pa.Table:
    """Decode and verify the rows. Raises: DamagedError: they do not match the name; DataError: another schema."""
    import pyarrow as pa

    from rftdask.buffer.log.columns import SCHEMA

    check_bytes(name, data)
    try:
        # The last element follows the last newline, and is empty.
        rows = [json.loads(line) for line in data.decode().split("\n")[:-1]]
        versions = {str(row["schema"]) for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"shard {name.text}: its checksum fits, but it is not JSON lines: {error!r}") from error
    check_version(name, versions)
    # Older shards lack ADDED_COLUMNS; newer ones may have more fields, which are ignored below.
    missing = {field for row in rows for field in SCHEMA.names if field not in row} - set(ADDED_COLUMNS)
    if missing or len(rows) != name.num_rows:
        raise DamagedError(f"shard {name.text}: {len(rows)} rows, fields missing: {sorted(missing) or 'none'}")
    try:
        return pa.Table.from_pylist([{**row, "metrics": list(row["metrics"].items())} for row in rows], SCHEMA)
    except (pa.ArrowException, ValueError, TypeError, AttributeError) as error:
        raise DamagedError(f"shard {name.text}: its checksum fits, but its fields do not: {error}") from error
