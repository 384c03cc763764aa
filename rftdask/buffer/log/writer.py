"""Writer: commits the groups of one work unit, together or, if some are done long before the others, in parts.

A group waits at most `max_commit_delay_s` for its siblings. Invariants: every group is committed once by this writer,
and none that was committed before; a unit whose groups are done at about the same time is one shard, as is one that
may not be parted. The writer knows neither rollouts nor engines. It commits in a thread of its own, so that the
rollouts go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

from rftdask.buffer.log.log import ExperienceLog
from rftdask.buffer.log.schema import Experience
from rftdask.buffer.log.shard import MAX_PART_TASKS, Part, ShardName
from rftdask.errors import WaitTimeout

_JOIN_S = 600.0  # For a commit under way to end; storage gives up long before, after its bounded retries.


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
            max_commit_delay_s: seconds that a finished group waits for its siblings; None commits all at once.
            committed: slots that are in the log already, by an earlier attempt at this unit.
        """
        self._log = log
        self._explore_step, self._unit, self._num_tasks = explore_step, unit, num_tasks
        # A part lists its tasks in its name, which can only be so long; larger units are one shard.
        self._max_commit_delay_s = max_commit_delay_s if num_tasks <= MAX_PART_TASKS else None
        self._committed = set(committed)
        self._names: list[ShardName] = []
        self._waiting: dict[int, Sequence[Experience]] = {}  # Groups that are finished and not committed, by slot.
        self._oldest_s = 0.0  # When the first of them came, by the monotonic clock.
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, slot: int, experiences: Sequence[Experience]) -> None:
        """Take a whole group; `slot` is the place of its task in the unit. Does not block, and commits nothing itself.

        A slot that is waiting or committed is ignored: its rollouts ran twice.
        """
        with self._changed:
            if slot in self._committed or slot in self._waiting:
                return
            # The age is that of the oldest: a unit whose groups trickle in is still committed in time.
            if not self._waiting:
                self._oldest_s = time.monotonic()
            self._waiting[slot] = experiences
            # Started by the first group: a unit that is committed as a whole needs no thread.
            if self._thread is None and self._max_commit_delay_s is not None:
                self._thread = threading.Thread(target=self._flush_old_ones, name="unit-writer", daemon=True)
                self._thread.start()
            self._changed.notify()

    def finish(self) -> list[ShardName]:
        """Commit what waits and return the names of all shards of this writer; they are durable.

        Raises: StorageError: one of them failed; what was committed before stays, and the unit runs again.
        """
        self.close()
        if self._error is not None:
            raise self._error
        if self._waiting:
            self._commit(self._waiting)
            self._waiting = {}
        return list(self._names)

    def close(self) -> None:
        """Commit nothing more by age; what waits is dropped, unless `finish` takes it. Idempotent.

        Raises: WaitTimeout: a commit hangs.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            # A commit that is under way ends by itself or by the storage's own deadline.
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                where = f"work unit {self._explore_step}/{self._unit}"
                raise WaitTimeout(f"{where}: a commit has hung for {_JOIN_S:.0f} s; check the storage of the run")

    def __exit__(self, *error: object) -> None:
        self.close()

    def _flush_old_ones(self) -> None:
        """The thread: commits what waits whenever its oldest group has waited `max_commit_delay_s`, until `close`."""
        assert self._max_commit_delay_s is not None
        while True:
            with self._changed:
                while not self._closed:
                    due_in_s = threading.TIMEOUT_MAX  # until there is a group that can grow old
                    if self._waiting:
                        due_in_s = self._oldest_s + self._max_commit_delay_s - time.monotonic()
                    if due_in_s <= 0:
                        break
                    self._changed.wait(due_in_s)
                if self._closed:
                    return  # what waits is the last shard's, which `finish` commits
                groups, self._waiting = self._waiting, {}
            # Without the lock: groups that finish meanwhile wait for the next shard, and nobody waits for storage.
            try:
                self._commit(groups)
            except BaseException as error:  # handed to `finish`, which is where somebody listens
                self._error = error
                return

    def _commit(self, groups: dict[int, Sequence[Experience]]) -> None:
        slots = tuple(sorted(groups))
        # No part in the name then: the name of a unit that came whole does not tell of parts at all.
        whole = len(slots) == self._num_tasks
        name = self._log.commit(
            [experience for slot in slots for experience in groups[slot]],
            explore_step=self._explore_step,
            unit=self._unit,
            part=None if whole else Part(slots, self._num_tasks),
        )
        self._committed.update(slots)
        # Only after the commit: what `finish` returns is durable.
        self._names.append(name)
