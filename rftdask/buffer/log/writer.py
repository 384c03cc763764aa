"""Writer: commits the groups of one work unit, together or, if some are done long before the others, in parts.

A group waits at most `max_commit_delay_s` for the other groups. Invariants: this writer commits every group once, and
none that was committed before. A unit whose groups are done at about the same time is one shard, as is one that cannot
be split. The writer knows neither rollouts nor engines. It commits in a thread of its own, so that rollouts continue.
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
        self._oldest_s = 0.0  # Monotonic time when the oldest of them was added.
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, slot: int, experiences: Sequence[Experience]) -> None:
        """Add a whole group; `slot` is the place of its task in the unit. Does not block.

        A slot that is waiting or committed is ignored: its rollouts ran twice.
        """
        with self._changed:
            if slot in self._committed or slot in self._waiting:
                return
            if not self._waiting:
                self._oldest_s = time.monotonic()
            self._waiting[slot] = experiences
            # A unit that is committed as a whole needs no thread.
            if self._thread is None and self._max_commit_delay_s is not None:
                self._thread = threading.Thread(target=self._flush_old_ones, name="unit-writer", daemon=True)
                self._thread.start()
            self._changed.notify()

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
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                where = f"work unit {self._explore_step}/{self._unit}"
                raise WaitTimeout(f"{where}: a commit has hung for {_JOIN_S:.0f} s; check the storage of the run")

    def __exit__(self, *error: object) -> None:
        self.close()

    def _flush_old_ones(self) -> None:
        """Run the thread: commit the waiting groups whenever the oldest has waited `max_commit_delay_s`, until
        `close`."""
        assert self._max_commit_delay_s is not None
        while True:
            with self._changed:
                while not self._closed:
                    due_in_s = threading.TIMEOUT_MAX  # no group is waiting
                    if self._waiting:
                        due_in_s = self._oldest_s + self._max_commit_delay_s - time.monotonic()
                    if due_in_s <= 0:
                        break
                    self._changed.wait(due_in_s)
                if self._closed:
                    return  # `finish` commits the rest
                groups, self._waiting = self._waiting, {}
            # Without the lock, so that `add` does not wait for storage.
            try:
                self._commit(groups)
            except BaseException as error:  # `finish` raises it
                self._error = error
                return

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
