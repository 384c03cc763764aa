"""The experience log as files: immutable shards in small buckets. A commit is one atomic put: a listed name is
committed.

`FileLog` finds and quarantines shards. Its subclasses have shards of one format: Parquet, or JSON lines.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rftdask.buffer.log.compaction import NUM_THREADS, CompactedShards, Compaction
from rftdask.buffer.log.log import EXPERIENCES, ExperienceLog
from rftdask.buffer.log.schema import Experience
from rftdask.buffer.log.shard import Part, ShardName
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

    num_readers = NUM_THREADS
    _codec = ""

    def __init__(self, storage: Storage, folder: str = EXPERIENCES, run: str = "") -> None:
        super().__init__(folder, run)
        self._storage = storage
        self._gone: set[str] = set()  # Quarantined shards whose originals are gone.
        self._parsed: dict[str, dict[str, ShardName | None]] = {}
        """Parsed names of recently listed buckets: a waiting trainer polls, and parsing costs more than listing."""

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
        from rftdask.buffer.log.columns import FORMATS  # late: loads pyarrow, which a listing of shards does not need

        data = FORMATS[self.suffix][0](experiences, self.run, self._codec)
        name = self._name(experiences, data, explore_step, unit, part)
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
        from rftdask.buffer.log.columns import FORMATS  # late: as above

        return FORMATS[self.suffix][1](name, self._storage.get(self.path(name)), columns)

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
            from rftdask.buffer.log.columns import with_added_columns  # late: as above

            rows = with_added_columns(self._compacted.read(self._bucket(name.explore_step), name))
            return rows if columns is None else rows.select(columns)

    def quarantine(self, name: ShardName, reason: str) -> None:
        """See FileLog. Raises: DamagedError: the shard was compacted: other shards share its file."""
        if self._compacted.has(self._bucket(name.explore_step), name):
            raise DamagedError(f"{reason}; it was compacted and cannot run again: restore the file from a backup")
        super().quarantine(name, reason)

    def compact(self, names: Sequence[ShardName], should_stop: Callable[[], bool] = lambda: False) -> Compaction:
        """Compact bucket by bucket; a shard is removed only after its merged file was read back whole."""
        from rftdask.buffer.log.columns import decode_parquet  # late: as above

        sizes: dict[ShardName, int] = {}

        def read(name: ShardName) -> pa.Table | None:
            try:
                data = self._storage.get(self.path(name))
                sizes[name] = len(data)
                return decode_parquet(name, data)
            except (DamagedError, NotFoundError, DataError):
                return None  # this shard is not compacted

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


class JsonlLog(FileLog):
    """Shards as files of JSON lines, readable by people."""

    suffix = "jsonl"
