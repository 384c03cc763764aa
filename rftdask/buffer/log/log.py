"""The interface of the experience log: shards of experiences that are committed once and then never change.

Every backend must ensure that

- `commit` is atomic and durable: a reader sees all of a shard or none of it, and a committed shard outlives the
  process. A work unit is done exactly when `shards` or `find_all` list a shard of its (explore step, unit), or
  parts that hold all its groups (`done_units`).
- a shard never changes. It moves into quarantine if its content fails its checksum, and into a large file if it is
  compacted; a compacted shard is listed and read as before.
- listings use no cache: everything committed before the call, by any process, is listed.

The log does not know what was trained: the ledger does.
"""

from __future__ import annotations

import uuid
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rftdask.buffer.log.compaction import Compaction
from rftdask.buffer.log.schema import Experience
from rftdask.buffer.log.shard import Part, ShardName, done_units
from rftdask.errors import NotFoundError, UserError
from rftdask.storage import Storage
from rftdask.storage.checked_json import dump_checked, load_checked

if TYPE_CHECKING:
    import pyarrow as pa

EXPERIENCES = "experiences"
"""Folder of the log that is trained from; the rollouts of an evaluation have a log of their own."""


class ExperienceLog(ABC):
    """The shards of one run in `folder`. Instances pickle.

    Example:
        log = open_log(storage, config)
        name = log.commit(experiences, explore_step=3, unit=0)
        for name in log.shards(first_step=3): table = log.read(name)
    """

    def __init__(self, folder: str = EXPERIENCES, run: str = "") -> None:
        """run: name of the run, stored with every shard."""
        self.folder = folder
        self.run = run
        self.writer = uuid.uuid4().hex[:12]
        """Random for each instance, so that a restarted worker cannot reuse a shard name."""

    suffix: str
    """Suffix of the names of its shards."""
    num_readers: int = 1
    """Number of concurrent calls of `read` that are useful."""

    def _name(
        self, experiences: Sequence[Experience], data: bytes, explore_step: int, unit: int, part: Part | None
    ) -> ShardName:
        """Return the name of a new shard. data: its bytes, which are those of a whole unit with the same rows."""
        # 0 for a shard without rows, which still marks its unit as done.
        low = min((e.min_policy_version for e in experiences), default=0)
        high = max((e.max_policy_version for e in experiences), default=0)
        crc32 = zlib.crc32(data)
        return ShardName(explore_step, unit, self.writer, len(experiences), low, high, crc32, self.suffix, part)

    @abstractmethod
    def check(self) -> None:
        """Check that the log can be reached, without creating anything. Raises: StorageError."""

    @abstractmethod
    def commit(
        self, experiences: Sequence[Experience], *, explore_step: int, unit: int, part: Part | None = None
    ) -> ShardName:
        """Write the experiences of one work unit, or of a part of it, as one durable shard. Raises: StorageError."""

    @abstractmethod
    def find_all(self, explore_step: int, unit: int) -> list[ShardName]:
        """Return the loose shards of this work unit, whole or in parts."""

    @abstractmethod
    def shards(self, first_step: int = 1) -> list[ShardName]:
        """Return all shards of explore steps >= `first_step`, sorted by step, unit and writer."""

    def loose_shards(self, first_step: int = 1) -> list[ShardName]:
        """Return the shards that were not compacted. Cheaper than `shards`, for polling."""
        return self.shards(first_step)

    def compacted_shards(self, first_step: int = 1, last_step: int | None = None) -> list[ShardName]:
        """Return the shards that were compacted, up to explore step `last_step`; unordered."""
        return []

    @abstractmethod
    def read(self, name: ShardName, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the rows of a shard, verified as a whole, with at least these columns; None: all columns.

        Raises: DamagedError; NotFoundError; StorageError.
        """

    @abstractmethod
    def quarantine(self, name: ShardName, reason: str) -> None:
        """Quarantine a damaged shard with the reason; its work unit counts as not done and runs again."""

    def num_quarantined(self) -> int:
        """Return the number of quarantined shards, without those still listed in the log (whose unit looks done)."""
        return len(self.quarantined())

    @abstractmethod
    def quarantined(self) -> list[ShardName]:
        """Return the names of the quarantined shards."""

    @abstractmethod
    def remove(self, names: Sequence[ShardName]) -> None:
        """Remove shards permanently, after their names were recorded."""

    def compact(self, names: Sequence[ShardName], should_stop: Callable[[], bool] = lambda: False) -> Compaction:
        """Merge shards into few large files. Only one process may compact a log at a time.

        Raises: UserError: this log cannot be compacted; DamagedError: a written file did not read back whole.
        """
        raise UserError(f"{type(self).__name__} has no small files to merge; only storage_type queue has")

    @abstractmethod
    def removed(self, first_step: int = 1) -> list[ShardName]:
        """Return the shards of explore steps >= `first_step` that were removed, or are about to be."""

    @abstractmethod
    def seal(self, num_explore_steps: int) -> None:
        """Record that no explore step after `num_explore_steps` will come."""

    @abstractmethod
    def unseal(self) -> None:
        """Remove the seal: more steps will come."""

    @abstractmethod
    def sealed_at(self) -> int | None:
        """Return the last explore step that will come; None if the log is not sealed. Raises: DamagedError."""


# ---- the complete prefix of the log
#
# Explorers note from time to time up to which step the log is complete, so that a long log need not be listed to find
# its end. Losing the note costs time: the log is then listed from its start. Shards quarantined since then are looked
# up by their names.

COMPLETE = f"{EXPERIENCES}/COMPLETE.json"
NOTE_EVERY = 64
"""Explore steps between two notes, which is also the most that are listed again."""


def note_complete(storage: Storage, explore_step: int) -> None:
    """Record that every explore step up to this one is complete in the log."""
    storage.put(COMPLETE, dump_checked({"explore_step": explore_step}))


def noted_complete(storage: Storage) -> int:
    """Return the explore step of the last note; 0 if there is no readable note."""
    try:
        return int(load_checked(storage.get(COMPLETE))["explore_step"])
    except (NotFoundError, ValueError, KeyError, TypeError):
        return 0


def first_open_step(storage: Storage, log: ExperienceLog) -> int:
    """Return an explore step before which all steps are complete. The cost does not grow with the log."""
    noted = noted_complete(storage)
    if not noted:
        return 1
    first = noted + 1
    for step, unit in {(name.explore_step, name.unit) for name in log.quarantined() if name.explore_step <= noted}:
        # The unit of a quarantined shard is done if its groups were committed again, loose or compacted. Compacted
        # shards are listed only if necessary, because that reads records.
        loose = log.find_all(step, unit)
        if not done_units(loose) and (step, unit) not in done_units([*loose, *log.compacted_shards(step, step)]):
            first = min(first, step)
    return first
