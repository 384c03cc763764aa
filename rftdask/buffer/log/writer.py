"""Writer: commits the groups of one work unit, together or, if some are done long before the others, in parts.

A group waits at most `max_commit_delay_s` for the other groups. Invariants: this writer commits every group once, and
none that was committed before. A unit whose groups are done at about the same time is one shard, as is one that cannot
be split. The writer knows neither rollouts nor engines. It commits in threads of its own, so that rollouts continue.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

from rftdask.buffer.log.log import ExperienceLog
from rftdask.buffer.log.schema import Experience
from rftdask.buffer.log.shard import MAX_PART_TASKS, Part, ShardName
from rftdask.errors import WaitTimeout

_JOIN_S = 600.0
"""Seconds to wait for a running commit. Storage gives up long before, after its bounded retries."""


class UnitWriter(AbstractContextManager["UnitWriter"]):
    """Writes one work unit.

    Example:
        with UnitWriter(log, explore_step=3, unit=0, num_tasks=8, max_commit_delay_s=0.25) as writer:
            for slot, experiences in finished_groups:
                writer.add(slot, experiences)
            names = writer.finish()
    """

    def __init__(
        self,
        log: ExperienceLog,
        *,
        explore_step: int,
        unit: int,
        num_tasks: int,
        max_commit_delay_s: float | None,
        committed: Collection[int] = (),
    ) -> None:
        """
        Args:
            num_tasks: tasks of the whole unit.
            max_commit_delay_s: seconds that a finished group waits for the others; None commits all at once.
            committed: slots that an earlier attempt at this unit has committed.
        """
        self._log = log
        self._explore_step, self._unit, self._num_tasks = explore_step, unit, num_tasks
        # The name of a part lists its tasks, which limits their number.
        self._max_commit_delay_s = max_commit_delay_s if num_tasks <= MAX_PART_TASKS else None
        self._committed = set(committed)
        self._names: list[ShardName] = []
        self._waiting: dict[int, Sequence[Experience]] = {}  # Groups that are finished and not committed, by slot.
        self._timer: threading.Timer | None = None  # Commits the waiting groups.
        self._lock = threading.Lock()  # Guards the waiting groups.
        self._committing = threading.Lock()  # Held during a commit.
        self._error: BaseException | None = None
        self._closed = False

    def add(self, slot: int, experiences: Sequence[Experience]) -> None:
        """Add a whole group; `slot` is the place of its task in the unit. Does not block.

        A slot that is waiting or committed is ignored: its rollouts ran twice.
        """
        with self._lock:
            if slot in self._committed or slot in self._waiting:
                return
            # A unit that is committed as a whole needs no thread.
            if not self._waiting and self._max_commit_delay_s is not None:
                self._timer = threading.Timer(self._max_commit_delay_s, self._flush)
                self._timer.daemon = True
                self._timer.start()
            self._waiting[slot] = experiences

    def finish(self) -> list[ShardName]:
        """Commit the waiting groups and return the names of all shards of this writer, which are durable.

        Raises: StorageError: a commit failed. Earlier commits stay, and the unit runs again.
        """
        self.close()
        if self._error is not None:
            raise self._error
        if self._waiting:
            self._commit(self._waiting)
            self._waiting = {}
        return list(self._names)

    def close(self) -> None:
        """Stop committing by age; waiting groups are dropped, unless `finish` commits them. Idempotent.

        Raises: WaitTimeout: a commit hangs.
        """
        self._closed = True  # also if a commit hangs, since the unit then runs again
        if self._timer is not None:
            self._timer.cancel()
        if not self._committing.acquire(timeout=_JOIN_S):
            where = f"work unit {self._explore_step}/{self._unit}"
            raise WaitTimeout(f"{where}: a commit has hung for {_JOIN_S:.0f} s; check the storage of the run")
        self._committing.release()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _flush(self) -> None:
        """Commit the groups that are waiting, unless `finish` does or an earlier commit failed."""
        with self._committing:
            if self._closed or self._error is not None:
                return
            # Without this lock during the commit, so that `add` does not wait for storage.
            with self._lock:
                groups, self._waiting = self._waiting, {}
            try:
                self._commit(groups)
            except BaseException as error:  # `finish` raises it
                self._error = error

    def _commit(self, groups: dict[int, Sequence[Experience]]) -> None:
        slots = tuple(sorted(groups))
        name = self._log.commit(
            [experience for slot in slots for experience in groups[slot]],
            explore_step=self._explore_step,
            unit=self._unit,
            part=None if len(slots) == self._num_tasks else Part(slots, self._num_tasks),
        )
        self._committed.update(slots)
        self._names.append(name)
