"""Writer: commits the groups of one rollout batch, together or, if some are done long before the others, in parts.

A group waits at most `flush_age_s` for its siblings. Invariants: every group is committed once by this writer, and none
that was committed before; a batch whose groups are done at about the same time is one shard, as is one that may not be
parted. The writer knows neither rollouts nor engines. It commits in a thread of its own, so that the rollouts go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from types import TracebackType

from rftdask.buffer.log.log import ExperienceLog
from rftdask.buffer.log.schema import Experience
from rftdask.buffer.log.shard import MAX_PART_TASKS, Part, ShardName
from rftdask.errors import WaitTimeout

_JOIN_S = 600.0
"""For a commit under way to end; storage gives up long before, after its bounded retries."""


class BatchWriter:
    """Writes one rollout batch.

    Example:
        with BatchWriter(log, explore_step=3, batch=0, num_tasks=8, flush_age_s=0.25) as writer:
            for slot, experiences in finished_groups:
                writer.add(slot, experiences)
            names = writer.finish()
    """

    def __init__(
        self,
        log: ExperienceLog,
        *,
        explore_step: int,
        batch: int,
        num_tasks: int,
        flush_age_s: float | None,
        committed: Collection[int] = (),
    ) -> None:
        """num_tasks: of the whole batch; flush_age_s: None commits all at once; committed: slots in the log already."""
        self._log = log
        self._explore_step, self._batch, self._num_tasks = explore_step, batch, num_tasks
        self._flush_age_s = flush_age_s if log.takes_parts and num_tasks <= MAX_PART_TASKS else None
        self._committed = set(committed)
        self._names: list[ShardName] = []
        self._waiting: dict[int, Sequence[Experience]] = {}
        self._oldest_s = 0.0
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, slot: int, experiences: Sequence[Experience]) -> None:
        """Take a whole group; `slot` is the place of its task in the batch. Does not block."""
        with self._changed:
            if slot in self._committed or slot in self._waiting:
                return
            if not self._waiting:
                self._oldest_s = time.monotonic()
            self._waiting[slot] = experiences
            if self._thread is None and self._flush_age_s is not None:
                self._thread = threading.Thread(target=self._flush_old_ones, name="batch-writer", daemon=True)
                self._thread.start()
            self._changed.notify()

    def finish(self) -> list[ShardName]:
        """Commit what waits; the shards that this writer committed. Raises: StorageError: one of them failed."""
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
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                where = f"rollout batch {self._explore_step}/{self._batch}"
                raise WaitTimeout(f"{where}: a commit has hung for {_JOIN_S:.0f} s; check the storage of the run")

    def __enter__(self) -> BatchWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _flush_old_ones(self) -> None:
        assert self._flush_age_s is not None
        while True:
            with self._changed:
                while not self._closed and (wait_s := self._due_in_s(self._flush_age_s)) > 0:
                    self._changed.wait(wait_s)
                if self._closed:
                    return
                groups, self._waiting = self._waiting, {}
            try:
                self._commit(groups)
            except BaseException as error:  # handed to `finish`, which is where somebody listens
                self._error = error
                return

    def _due_in_s(self, flush_age_s: float) -> float:
        """Seconds until what waits is old enough."""
        return self._oldest_s + flush_age_s - time.monotonic() if self._waiting else threading.TIMEOUT_MAX

    def _commit(self, groups: dict[int, Sequence[Experience]]) -> None:
        slots = tuple(sorted(groups))
        whole = len(slots) == self._num_tasks
        name = self._log.commit(
            [experience for slot in slots for experience in groups[slot]],
            explore_step=self._explore_step,
            batch=self._batch,
            part=None if whole else Part(slots, self._num_tasks),
        )
        self._committed.update(slots)
        self._names.append(name)
