"""The experience log, as its writers and readers see it: shards of experiences that are committed and then never
change.

What every backend must keep:

- `commit` is atomic and durable: a reader sees all of a shard or none of it, and what was committed outlives the
  process. A work unit is done exactly when `shards` or `find_all` show a shard of its (explore step, unit), or
  parts that hold all its groups (`done_units`).
- a shard never changes. It moves into quarantine when its content fails its checksum, and into a large file when it
  was compacted, and is then listed and read as before.
- listings trust no cache: what was committed before the call, by anyone, is in the answer.

The log does not know what was trained: the ledger does.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import pyarrow as pa

from rftdask.buffer.log.compaction import Compaction
from rftdask.buffer.log.schema import Experience
from rftdask.buffer.log.shard import Part, ShardName, done_units
from rftdask.errors import NotFoundError, UserError
from rftdask.storage import Storage
from rftdask.storage.checked_json import dump_checked, load_checked

EXPERIENCES = "experiences"
"""Folder of the log that is trained from; the answers of an evaluation are a log of their own."""


class ExperienceLog(ABC):
    """The shards of one run below `folder`. Instances pickle.

    Example:
        log = open_log(storage, config)
        name = log.commit(experiences, explore_step=3, unit=0)
        for name in log.shards(first_step=3): table = log.read(name)
    """

    def __init__(self, folder: str = EXPERIENCES, run: str = "") -> None:
        """run: name of the run, kept with every shard."""
        self.folder = folder
        self.run = run
        self.writer = uuid.uuid4().hex[:12]
        """Random for each incarnation of a process: a restarted worker cannot reuse a name."""

    num_readers: int = 1
    """Calls of `read` that gain from going on at once."""

    @abstractmethod
    def check(self) -> None:
        """Try to reach the log; make nothing. Raises: StorageError."""

    @abstractmethod
    def commit(
        self, experiences: Sequence[Experience], *, explore_step: int, unit: int, part: Part | None = None
    ) -> ShardName:
        """Write the experiences of one work unit, or of a part of it, as one shard; durable when it returns.

        Raises: StorageError.
        """

    @abstractmethod
    def find_all(self, explore_step: int, unit: int) -> list[ShardName]:
        """The committed shards of this work unit, whole or in parts; of `loose_shards` only."""

    @abstractmethod
    def shards(self, first_step: int = 1) -> list[ShardName]:
        """All shards of explore steps >= `first_step`, sorted by step, unit and writer."""

    def loose_shards(self, first_step: int = 1) -> list[ShardName]:
        """The shards that were not compacted: for who looks again and again for what is new, at less cost."""
        return self.shards(first_step)

    def compacted_shards(self, first_step: int = 1, last_step: int | None = None) -> list[ShardName]:
        """The shards that were compacted, up to explore step `last_step`; in no order."""
        return []

    @abstractmethod
    def read(self, name: ShardName, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the rows of a shard, verified whole; of some columns at least, or of all.

        Raises: DamagedError; NotFoundError; StorageError.
        """

    @abstractmethod
    def quarantine(self, name: ShardName, reason: str) -> None:
        """Set a damaged shard aside with the reason; its work unit counts as not done and runs again."""

    def num_quarantined(self) -> int:
        """Shards set aside. One whose original is still listed does not count yet: its unit would look done."""
        return len(self.quarantined())

    @abstractmethod
    def quarantined(self) -> list[ShardName]:
        """The names of the shards that were set aside."""

    @abstractmethod
    def remove(self, names: Sequence[ShardName]) -> None:
        """Remove shards for good, their names written down first."""

    def compact(self, names: Sequence[ShardName], should_stop: Callable[[], bool] = lambda: False) -> Compaction:
        """Move shards into few large files. Nobody may compact this log at the same time.

        Raises: UserError: this log cannot; DamagedError: what was written is not there.
        """
        raise UserError(f"{type(self).__name__} has no small files to merge; only storage_type queue has")

    @abstractmethod
    def removed(self, first_step: int = 1) -> list[ShardName]:
        """Shards of explore steps >= `first_step` that were removed, or are about to be."""

    @abstractmethod
    def seal(self, num_explore_steps: int) -> None:
        """Say that no explore step after `num_explore_steps` will come."""

    @abstractmethod
    def unseal(self) -> None:
        """Take that back: more will come."""

    @abstractmethod
    def sealed_at(self) -> int | None:
        """The last explore step there will be, or None while more may come. Raises: DamagedError."""


# ---- up to where the log is complete
#
# A note beside the log, written now and then by whoever fills it, after the steps were complete, so that nobody lists a
# long log to find its end. Losing it costs time: the log is then listed from its start. Damaged shards that were set
# aside since then are looked up by their names.

COMPLETE = f"{EXPERIENCES}/COMPLETE.json"
NOTE_EVERY = 64
"""Explore steps between two notes: at most so many are listed again, and the note is written seldom."""


def note_complete(storage: Storage, explore_step: int) -> None:
    """Write down that every explore step up to this one is complete in the log."""
    storage.put(COMPLETE, dump_checked({"explore_step": explore_step}))


def noted_complete(storage: Storage) -> int:
    """Read the step of the last note; 0 if there is none, or none that can be read."""
    try:
        return int(load_checked(storage.get(COMPLETE))["explore_step"])
    except (NotFoundError, ValueError, KeyError, TypeError):
        return 0


def first_open_step(storage: Storage, log: ExperienceLog) -> int:
    """Find an explore step before which all are complete. What it costs does not grow with the log."""
    noted = noted_complete(storage)
    if not noted:
        return 1
    first = noted + 1
    for step, unit in {(name.explore_step, name.unit) for name in log.quarantined() if name.explore_step <= noted}:
        # A unit with a shard in quarantine is done all the same if its groups are committed again, loose or compacted.
        loose = log.find_all(step, unit)
        # The listing of compacted shards reads records, so it is asked only where the loose ones do not settle it.
        if not done_units(loose) and (step, unit) not in done_units([*loose, *log.compacted_shards(step, step)]):
            first = min(first, step)
    return first
