"""Finds the task of a work unit that crashes the workers that run it, if any does, or engines that cannot work at all.

Workers are lost for many reasons, most of which are unrelated to the running tasks: preemption, walltime, a node that
died. So after a loss the unit runs again and is only a suspect. After `MAX_CRASHES` losses in a row under the same
unit, its tasks run one at a time. A task that loses `MAX_CRASHES` workers in a row while it runs without others is set
aside, and does not run in later epochs.

Only units that were running on the lost worker are suspects, unless the worker reported a request to end (preempted, at
its walltime, cancelled). If several units overlapped there, each then runs isolated, so only one can be found at fault.

Invariants: a task is blamed only for losses while no other task ran with it; every other task of the unit completes; a
crash-causing task costs at most 2 * MAX_CRASHES workers. The state is not stored: a restarted explorer finds the task
again.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, replace

from rftdask.buffer.log.shard import MAX_PART_TASKS
from rftdask.data.task_schedule import TaskRef
from rftdask.errors import EngineError, ProcessLostError, RoleError
from rftdask.rollouts.work_units import RolloutTask, UnitKey

MAX_CRASHES = 3
"""Losses in a row under the same rollouts. If workers are preempted every ten minutes, a unit of one minute reaches it
by chance in one of a thousand cases, and one of its tasks afterwards in one of a million."""
MAX_LOSSES = 100
"""Workers that one work unit may lose for any reason before the run ends."""
MAX_IN_A_ROW = 3
"""Tasks that may be set aside without a successful rollout between them. One more means that the tasks are not at
fault."""


@dataclass(frozen=True)
class CrashSuspect:
    """State of one work unit: the tasks left to run, and those to set aside. Immutable, a pure function of events."""

    num_tasks: int
    isolated_tasks: tuple[int, ...] | None = None
    """Slots (positions of tasks in the unit) left to run one at a time, the next one first. None: all run together."""
    num_crashes: int = 0
    """Losses in a row under the tasks that run now."""
    to_set_aside: tuple[int, ...] = ()
    """Slots to set aside now: known before the unit began, or found by the last loss."""

    @property
    def is_whole(self) -> bool:
        return self.isolated_tasks is None

    @property
    def is_isolated(self) -> bool:
        """True if the next tasks are suspects, so that no other unit may run on their worker."""
        return self.num_crashes > 0 or not self.is_whole

    @property
    def is_over(self) -> bool:
        return self.isolated_tasks == ()

    @property
    def next_slots(self) -> tuple[int, ...] | None:
        """Slots to run next: one of them, or None for the whole unit."""
        return None if self.isolated_tasks is None else self.isolated_tasks[:1]

    def lost(self) -> CrashSuspect:
        """State after the loss of a worker that was running it."""
        if self.num_crashes + 1 < MAX_CRASHES:  # may still be chance
            return replace(self, num_crashes=self.num_crashes + 1, to_set_aside=())
        if self.isolated_tasks is None and self.num_tasks > 1:
            # One at a time and not in halves: fewer states, at the cost of a few workers' time in a rare case.
            return CrashSuspect(self.num_tasks, tuple(range(self.num_tasks)))
        culprit, *others = self.isolated_tasks or (0,)
        return CrashSuspect(self.num_tasks, tuple(others), to_set_aside=(culprit,))

    def finished(self) -> CrashSuspect:
        """State after the commit of the tasks that ran."""
        return CrashSuspect(self.num_tasks, () if self.isolated_tasks is None else self.isolated_tasks[1:])


class CrashTracker:
    """Records of one explorer: which tasks workers are running, and the suspects among the units."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of _running and _leaving, which Dask's event thread writes
        self._running: dict[str, set[str]] = {}
        """Keys of running Dask tasks by address of the worker."""
        self._leaving: set[str] = set()
        """Addresses of workers that were requested to end."""
        self._suspects: dict[UnitKey, CrashSuspect] = {}
        self._num_losses: dict[UnitKey, int] = {}
        self._set_aside: set[tuple[bool, int, int]] = set()
        self._num_in_a_row = 0
        self._failed_engines: set[str] = set()
        self._engine_failures: dict[str, set[UnitKey]] = {}
        """Units by the error of their engine, without numbers, since a unit last completed."""

    def began(self, worker: str, key: str) -> None:
        """Record that the worker has begun the Dask task. From any thread, as `leaves`."""
        with self._lock:
            self._running.setdefault(worker, set()).add(key)

    def ended(self, worker: str, key: str) -> None:
        """Record that the Dask task has ended; others may still run on the worker."""
        with self._lock:
            keys = self._running.get(worker, set())
            keys.discard(key)
            if not keys:
                self._running.pop(worker, None)

    def leaves(self, worker: str) -> None:
        """Record that the worker was requested to end."""
        with self._lock:
            self._leaving.add(worker)

    def was_running(self, key: str, on: str) -> bool:
        """True if the worker may have crashed by the Dask task: it reported the task or none, and no request to end."""
        with self._lock:
            return on not in self._leaving and key in self._running.get(on, {key})

    def engine_failed(self, unit: RolloutTask, key: str, error: EngineError | ProcessLostError) -> None:
        """Record why the engine of a unit with the Dask task `key` failed; once if units overlapped in one engine.

        Raises: RoleError: two engines in a row failed for the same reason, so no task is at fault. If their processes
        died, it takes two different units, because a task of one unit may be at fault.
        """
        with self._lock:
            if any(key in self._running.get(worker, ()) for worker in self._leaving):
                return  # failures on a worker that was requested to end are expected
        if error.engine in self._failed_engines:
            return
        if error.engine:
            self._failed_engines.add(error.engine)
        # Another process killed it (out of memory, a batch system), which is not a failure of the engine.
        if isinstance(error, ProcessLostError) and error.was_killed:
            return
        # The same error differs between engines only in numbers: pids, requests and versions.
        units = self._engine_failures.setdefault(re.sub(r"\d+", "#", str(error).partition("\n")[0]), set())
        if units and (isinstance(error, EngineError) or unit.key not in units):
            raise RoleError(
                "engines cannot do this run's work: two failed for the same reason, and no work unit ended between "
                f"them; engine.log has their full output. {error}"
            ) from error
        units.add(unit.key)

    def begin(self, unit: RolloutTask) -> CrashSuspect:
        """Decide how a new unit runs: whole, unless some of its tasks were set aside in an earlier epoch."""
        known = tuple(slot for slot, task in enumerate(unit.tasks) if _identity(unit, task) in self._set_aside)
        # A unit that cannot be split runs whole, and loses its workers again.
        if not known or len(unit.tasks) > MAX_PART_TASKS:
            return CrashSuspect(len(unit.tasks))
        others = tuple(slot for slot in range(len(unit.tasks)) if slot not in known)
        suspect = self._suspects[unit.key] = CrashSuspect(len(unit.tasks), others, to_set_aside=known)
        return suspect

    def lost(self, unit: RolloutTask, was_running: bool, cause: str) -> CrashSuspect:
        """Decide how a unit goes on after the loss of its worker.

        Raises: RoleError: too many losses, or the unit would have to be split and cannot be.
        """
        num_losses = self._num_losses[unit.key] = self._num_losses.get(unit.key, 0) + 1
        suspect = self._suspects.get(unit.key) or CrashSuspect(len(unit.tasks))
        # A loss that is unrelated to the tasks (preempted, lost with the result) is not a crash.
        suspect = suspect.lost() if was_running else replace(suspect, to_set_aside=())
        if num_losses >= MAX_LOSSES:
            raise RoleError(f"work unit {unit.key} lost {num_losses} workers; the last time: {cause}")
        # The name of a shard lists the tasks of a part, which bounds their number.
        if not suspect.is_whole and len(unit.tasks) > MAX_PART_TASKS:
            raise RoleError(
                f"work unit {unit.key} lost {MAX_CRASHES} workers in a row. It has more than {MAX_PART_TASKS} tasks, "
                f"so they cannot run one at a time to find the cause; the last time: {cause}"
            )
        self._remember(unit, suspect)
        return suspect

    def finished(self, unit: RolloutTask, num_rollouts: int) -> CrashSuspect:
        """Decide how a unit goes on after a commit. num_rollouts: 0 if an earlier attempt had committed it."""
        if num_rollouts:  # workers and engines can work, so the tasks set aside before were at fault
            self._num_in_a_row, self._engine_failures = 0, {}
        suspect = (self._suspects.get(unit.key) or CrashSuspect(len(unit.tasks))).finished()
        self._remember(unit, suspect)
        return suspect

    def set_aside(self, unit: RolloutTask, slots: tuple[int, ...]) -> None:
        """Exclude these tasks from later epochs. Raises: RoleError: too many in a row to be the tasks' fault."""
        new = {_identity(unit, unit.tasks[slot]) for slot in slots} - self._set_aside
        self._num_in_a_row += len(new)
        self._set_aside |= new
        if self._num_in_a_row > MAX_IN_A_ROW:
            raise RoleError(
                f"workers are lost whatever they run: {self._num_in_a_row} tasks in a row, the last in work unit "
                f"{unit.key}, each lost {MAX_CRASHES} workers while no other task ran there, and no rollout completed "
                "between them; see engine.log, and what ended the workers (memory, walltime)"
            )

    def _remember(self, unit: RolloutTask, suspect: CrashSuspect) -> None:
        if suspect.is_over:
            self._suspects.pop(unit.key, None)
            self._num_losses.pop(unit.key, None)
        else:
            self._suspects[unit.key] = suspect


def _identity(unit: RolloutTask, task: TaskRef) -> tuple[bool, int, int]:
    # The same for a task in all epochs.
    return unit.is_eval, task.taskset_number, task.index
