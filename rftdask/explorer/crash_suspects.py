"""Poison: which task of a work unit ends the workers that run it, if any does; or that engines cannot work at all.

A worker is lost for many reasons, most of which say nothing of what it ran: preemption, walltime, a node that died. So
a loss is no more than a suspicion, and the unit simply runs again. A unit that was running at `STRIKES` losses in a row
is taken apart: its tasks run one at a time. A task is poisonous when it, alone, was running at `STRIKES` losses in a
row. It is set aside, and does not run in later epochs.

A unit that only waited on a lost worker is not suspected, whoever ended the worker; the workers report what they begin.
Nor is any unit of a worker that reported it was told to end: preempted, at its walltime, cancelled. Of several that
overlapped on a lost worker all are suspected once; from then on each runs alone, so only one can be found guilty.

Invariants: a task is blamed only for losses while nothing ran beside it; every other task of the unit ends well; one
poisonous task costs at most 2 * STRIKES workers. This module knows no Dask, and nothing in it is needed to go on after
a restart, which would find out anew.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, replace

from rftdask.buffer.log.shard import MAX_PART_TASKS
from rftdask.data.task_schedule import TaskRef
from rftdask.errors import EngineError, ProcessLostError, RoleError
from rftdask.rollouts.work_units import RolloutTask, UnitKey

STRIKES = 3
"""Losses in a row with the same rollouts under way. Workers that are preempted every ten minutes lose a unit of a
minute so often by chance in one of a thousand cases, and then a task of it alone in one of a million."""
MAX_LOSSES = 100
"""Workers that one work unit may lose, for whatever reason, before the run ends."""
MAX_IN_A_ROW = 3
"""Poisonous tasks without a rollout between them that ended well; one more is not the fault of a task."""


@dataclass(frozen=True)
class Trial:
    """State of one work unit: what of it is still to run, and what was just found out. A pure rule of losses.

    Example: tasks 0 to 2, of which 1 is poisonous, at STRIKES = 3
        trial = Trial(num_tasks=3)               # whole
        trial = trial.lost().lost().lost()       # singles (0, 1, 2)
        trial = trial.finished()                 # singles (1, 2)
        trial = trial.lost().lost().lost()       # singles (2,), poisonous (1,)
        trial = trial.finished()                 # singles (): over
    """

    num_tasks: int
    singles: tuple[int, ...] | None = None
    """Slots (places of tasks in the unit) still to run, one at a time, the first next; None: all of them together."""
    strikes: int = 0
    """Losses in a row of what runs now."""
    poisonous: tuple[int, ...] = ()
    """Slots to set aside now: known before the unit began, or found out by the last loss."""

    @property
    def is_whole(self) -> bool:
        """True while all tasks run together."""
        return self.singles is None

    @property
    def runs_alone(self) -> bool:
        """True if nothing may run beside what runs next: it is suspected."""
        return self.strikes > 0 or not self.is_whole

    @property
    def is_over(self) -> bool:
        """True when nothing is left to run."""
        return self.singles == ()

    @property
    def next_slots(self) -> tuple[int, ...] | None:
        """Slots to run next: one of them, or None for the whole unit."""
        return None if self.singles is None else self.singles[:1]

    def lost(self) -> Trial:
        """The state after a worker was lost that was running what runs now."""
        if self.strikes + 1 < STRIKES:  # not yet more than bad luck
            return replace(self, strikes=self.strikes + 1, poisonous=())
        if self.singles is None and self.num_tasks > 1:
            # One at a time, and not in halves: fewer states, for a few workers' time whenever a task is poisonous.
            return Trial(self.num_tasks, tuple(range(self.num_tasks)))
        # It ran alone in its worker, so nothing else can have ended it.
        alone, *others = self.singles or (0,)
        return Trial(self.num_tasks, tuple(others), poisonous=(alone,))

    def finished(self) -> Trial:
        """The state after what ran was committed."""
        return Trial(self.num_tasks, () if self.singles is None else self.singles[1:])


class PoisonTracker:
    """Memory of one explorer: lost workers, and the units they were running.

    Example:
        tracker.began("tcp://10.0.0.7:4711", "rollouts-3-0-1")      # from any thread
        if tracker.was_running("rollouts-3-0-1", on="tcp://10.0.0.7:4711"):
            trial = tracker.lost(unit, was_running=True, cause="...")
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of _running and _leaving, which Dask's event thread writes
        self._running: dict[str, set[str]] = {}
        """Keys of the Dask tasks that a worker began and that have not ended, by the worker's address."""
        self._leaving: set[str] = set()
        self._trials: dict[UnitKey, Trial] = {}
        self._num_losses: dict[UnitKey, int] = {}
        self._poisonous: set[tuple[bool, int, int]] = set()
        self._num_in_a_row = 0
        self._failed_engines: set[str] = set()
        self._engine_failures: dict[str, set[UnitKey]] = {}
        """Why engines failed since a unit last ended well, numbers left out, and the units that had them."""

    def began(self, worker: str, key: str) -> None:
        """Note that the worker has begun the Dask task."""
        with self._lock:
            self._running.setdefault(worker, set()).add(key)

    def ended(self, worker: str, key: str) -> None:
        """Note that the Dask task has ended; others may be under way beside it."""
        with self._lock:
            keys = self._running.get(worker, set())
            keys.discard(key)
            if not keys:
                self._running.pop(worker, None)

    def leaves(self, worker: str) -> None:
        """Note that the worker was told to end."""
        with self._lock:
            self._leaving.add(worker)

    def was_running(self, key: str, on: str) -> bool:
        """True if the Dask task may have ended the worker: it was under way there, or the worker did not come to report
        anything; and the worker was not told to end.
        """
        with self._lock:
            return on not in self._leaving and key in self._running.get(on, {key})

    def engine_failed(self, unit: RolloutTask, key: str, error: EngineError | ProcessLostError) -> None:
        """Note why the engine failed that had the Dask task `key` of a unit.

        Raises: RoleError: two engines in a row failed for the same reason, so it is no task's: they cannot work. Of
        engines that ended by themselves in their work the units must differ: of one, a task may be to blame. Units
        that overlapped in one engine tell of it once.
        """
        with self._lock:
            if any(key in self._running.get(worker, ()) for worker in self._leaving):
                return  # its worker was told to end: what fails there says nothing
        if error.engine in self._failed_engines:
            return
        if error.engine:
            self._failed_engines.add(error.engine)
        # Somebody else ended it (the kernel for want of memory, a batch system): nothing is known of the engine.
        if isinstance(error, ProcessLostError) and error.was_killed:
            return
        # Two engines differ in their pids, and in the numbers of requests and versions.
        units = self._engine_failures.setdefault(re.sub(r"\d+", "#", str(error).partition("\n")[0]), set())
        if units and (isinstance(error, EngineError) or unit.key not in units):
            raise RoleError(
                "engines cannot do this run's work: two failed for the same reason, and no work unit ended between "
                f"them; engine.log has all they said. {error}"
            ) from error
        units.add(unit.key)

    def begin(self, unit: RolloutTask) -> Trial:
        """Decide how a new unit runs: whole, unless tasks of it are known to be poisonous."""
        # Known from another epoch: it would end a worker again before it is set aside.
        poisonous = tuple(slot for slot, task in enumerate(unit.tasks) if _identity(unit, task) in self._poisonous)
        # One that cannot be parted runs whole, and loses its workers again.
        if not poisonous or not self._can_be_parted(unit):
            return Trial(len(unit.tasks))
        others = tuple(slot for slot in range(len(unit.tasks)) if slot not in poisonous)
        trial = self._trials[unit.key] = Trial(len(unit.tasks), others, poisonous=poisonous)
        return trial

    def lost(self, unit: RolloutTask, was_running: bool, cause: str) -> Trial:
        """Decide how a unit goes on whose worker was lost.

        Raises: RoleError: that happened too often, or the unit would have to run in parts and cannot.
        """
        num_losses = self._num_losses[unit.key] = self._num_losses.get(unit.key, 0) + 1
        # The losses of a unit are counted for two ends: in a row they part it, and in all they end the run.
        trial = self._trials.get(unit.key) or Trial(len(unit.tasks))
        # A loss that says nothing of the tasks (preempted, lost with the result) is no strike.
        trial = trial.lost() if was_running else replace(trial, poisonous=())
        if num_losses >= MAX_LOSSES:
            raise RoleError(f"{num_losses} workers were lost that had work unit {unit.key}; the last time: {cause}")
        if not trial.is_whole and not self._can_be_parted(unit):
            raise RoleError(
                f"work unit {unit.key} lost {STRIKES} workers in a row, and this experience log cannot keep a part "
                f"of it without the others, to find the task; the last time: {cause}"
            )
        self._remember(unit, trial)
        return trial

    def finished(self, unit: RolloutTask, num_rollouts: int) -> Trial:
        """Decide how a unit goes on, part of which is committed. num_rollouts: 0 if it had been committed before."""
        if num_rollouts:  # workers and engines can end something well, so it was the tasks
            self._num_in_a_row, self._engine_failures = 0, {}
        trial = (self._trials.get(unit.key) or Trial(len(unit.tasks))).finished()
        self._remember(unit, trial)
        return trial

    def set_aside(self, unit: RolloutTask, slots: tuple[int, ...]) -> None:
        """Remember these tasks as poisonous. Raises: RoleError: so many in a row that it cannot be the tasks."""
        new = {_identity(unit, unit.tasks[slot]) for slot in slots} - self._poisonous
        # Tasks of different units in a row point to the machine, not to the tasks.
        self._num_in_a_row += len(new)
        self._poisonous |= new
        if self._num_in_a_row > MAX_IN_A_ROW:
            raise RoleError(
                f"workers are lost whatever they run: {self._num_in_a_row} tasks in a row, the last in work unit "
                f"{unit.key}, each lost {STRIKES} workers while nothing ran beside it, and no rollout ended well "
                "between them; see engine.log, and what ended the workers (memory, walltime)"
            )

    def _remember(self, unit: RolloutTask, trial: Trial) -> None:
        if trial.is_over:
            self._trials.pop(unit.key, None)
            self._num_losses.pop(unit.key, None)
        else:
            self._trials[unit.key] = trial

    def _can_be_parted(self, unit: RolloutTask) -> bool:
        # The name of a shard says which tasks it holds, and has room for so many.
        return len(unit.tasks) <= MAX_PART_TASKS


def _identity(unit: RolloutTask, task: TaskRef) -> tuple[bool, int, int]:
    # The same for a task in all its epochs.
    return unit.is_eval, task.taskset_number, task.index
