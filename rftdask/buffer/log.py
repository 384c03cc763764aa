"""The experience log: immutable shards in small buckets. Committing is one atomic put; a name in the listing is the
commit.

Invariants: a shard never changes and never moves, except into quarantine when its bytes fail their checksum; a rollout
batch is done exactly when a listing shows a shard of its (explore step, batch). The log does not know what was trained:
the ledger does.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence

import pyarrow as pa

from rftdask.buffer.experience import Experience
from rftdask.buffer.shard import ShardName, decode_shard, encode_shard
from rftdask.errors import DamagedError, NotFoundError
from rftdask.storage import Storage

STEPS_PER_BUCKET = 64
"""Keeps a bucket to some hundreds of shards, so that one listing stays flat in cost."""

_SEALED = "SEALED.json"


class ExperienceLog:
    """The shards of one run below `folder`.

    Example:
        log = ExperienceLog(storage)
        name = log.commit(experiences, explore_step=3, batch=0)
        for name in log.shards(first_step=3): table = log.read(name)
    """

    def __init__(self, storage: Storage, folder: str = "experiences", run: str = "") -> None:
        self._storage = storage
        self._run = run
        self._codec = "zstd" if "://" in storage.url and not storage.url.startswith("memory") else "lz4"
        self.folder = folder
        self.writer = uuid.uuid4().hex[:12]
        """Random for each incarnation of a process: a restarted worker cannot reuse a name."""

    def path(self, name: ShardName) -> str:
        return f"{self.folder}/{self._bucket(name.explore_step)}/{name.text}"

    def commit(self, experiences: Sequence[Experience], *, explore_step: int, batch: int) -> ShardName:
        """Write the experiences of one rollout batch as one shard; durable when it returns. Raises: StorageError."""
        name, data = encode_shard(
            experiences, explore_step=explore_step, batch=batch, writer=self.writer, run=self._run, codec=self._codec
        )
        self._storage.put(self.path(name), data)
        return name

    def find(self, explore_step: int, batch: int) -> ShardName | None:
        """A committed shard of this rollout batch, if there is one."""
        names = self._in_bucket(self._bucket(explore_step))
        return next((n for n in names if (n.explore_step, n.batch) == (explore_step, batch)), None)

    def shards(self, first_step: int = 1) -> list[ShardName]:
        """All shards of explore steps >= `first_step`, sorted by step, batch and writer."""
        first = self._bucket(first_step)
        buckets = [b for b in self._buckets() if b >= first]
        return sorted(n for b in buckets for n in self._in_bucket(b) if n.explore_step >= first_step)

    def read(self, name: ShardName) -> pa.Table:
        """The rows of a shard. Raises: DamagedError; NotFoundError; StorageError."""
        return decode_shard(name, self._storage.get(self.path(name)))

    def quarantine(self, name: ShardName, reason: str) -> None:
        """Set a damaged shard aside with the reason; its rollout batch counts as not done and runs again."""
        base = f"{self.folder}/quarantine/{name.text}"
        try:
            self._storage.put(base, self._storage.get(self.path(name)))
        except NotFoundError:
            return  # somebody else set it aside
        self._storage.put(base + ".reason.json", json.dumps({"shard": name.text, "reason": reason}).encode())
        self._storage.remove(self.path(name))

    def num_quarantined(self) -> int:
        """Shards set aside. One whose original is still listed does not count yet: its batch would look done."""
        names = (ShardName.try_parse(n) for n in self._storage.list(f"{self.folder}/quarantine"))
        return sum(n is not None and not self._storage.exists(self.path(n)) for n in names)

    def seal(self, num_explore_steps: int) -> None:
        """Say that no explore step after `num_explore_steps` will come."""
        self._storage.put(f"{self.folder}/{_SEALED}", json.dumps({"num_explore_steps": num_explore_steps}).encode())

    def unseal(self) -> None:
        self._storage.remove(f"{self.folder}/{_SEALED}")

    def sealed_at(self) -> int | None:
        """The last explore step there will be, or None while more may come. Raises: DamagedError."""
        try:
            data = self._storage.get(f"{self.folder}/{_SEALED}")
        except NotFoundError:
            return None
        try:
            return int(json.loads(data)["num_explore_steps"])
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{self.folder}/{_SEALED} is damaged ({data[:40]!r}); remove it to go on") from error

    def _buckets(self) -> Iterable[str]:
        return (n.rstrip("/") for n in self._storage.list(self.folder) if n.rstrip("/").isdigit())

    def _in_bucket(self, bucket: str) -> list[ShardName]:
        names = (ShardName.try_parse(n) for n in self._storage.list(f"{self.folder}/{bucket}"))
        return [n for n in names if n is not None]

    @staticmethod
    def _bucket(explore_step: int) -> str:
        return f"{explore_step // STEPS_PER_BUCKET:06d}"
