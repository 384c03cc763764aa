"""Suspects: what the explorer remembers of lost workers, and what follows for the rollout batches that they had.

A batch that only waited on a lost worker is no suspect, whoever lost it; the workers say what they begin. Nor is any
batch of a worker that said it was told to end: preempted, at its walltime, cancelled. Else the one that was running is,
and `blame.Trial` says how it runs again. A task found to be poisonous does not run in later epochs. This module
knows no Dask, and nothing in it is needed to go on after a restart, which would find out anew.
"""

from __future__ import annotations

import threading

from rftdask.buffer.log.shard import MAX_PART_TASKS
from rftdask.data.task_schedule import TaskRef
from rftdask.errors import RoleError
from rftdask.explorer.bisection import STRIKES, Trial
from rftdask.explorer.worker_task import RolloutSpec

MAX_LOSSES = 100
"""Of workers under one rollout batch, for whatever reason."""
MAX_IN_A_ROW = 3
"""Poisonous tasks without a rollout between them that ended well; one more is not the fault of a task."""


class Suspects:
    """One explorer's memory.

    Example:
        suspects.began("tcp://10.0.0.7:4711", "rollouts-3-0-1")      # from any thread
        if suspects.was_running("rollouts-3-0-1", on="tcp://10.0.0.7:4711"):
            again = suspects.lost(spec)
    """

    def __init__(self, takes_parts: bool) -> None:
        """takes_parts: whether the log can hold some groups of a batch without the others."""
        self._takes_parts = takes_parts
        self._lock = threading.Lock()
        self._running: dict[str, str] = {}
        self._leaving: set[str] = set()
        self._trials: dict[tuple[str, int, int], Trial] = {}
        self._losses: dict[tuple[str, int, int], int] = {}
        self._poisonous: set[tuple[bool, int, int]] = set()
        self._in_a_row = 0

    def began(self, worker: str, key: str) -> None:
        with self._lock:
            self._running[worker] = key

    def ended(self, worker: str, key: str) -> None:
        """The task has ended; the worker may have begun another one since."""
        with self._lock:
            if self._running.get(worker) == key:
                del self._running[worker]

    def leaves(self, worker: str) -> None:
        """The worker was told to end. From any thread."""
        with self._lock:
            self._leaving.add(worker)

    def was_running(self, key: str, on: str) -> bool:
        """Whether the worker may have been lost to the task: that was under way, as the worker said, or it did not come
        to say anything, and it did not leave for another reason.
        """
        with self._lock:
            return on not in self._leaving and self._running.get(on, key) == key

    def lost(self, spec: RolloutSpec, was_running: bool, cause: str) -> Trial:
        """A worker that had the batch was lost. Raises: RoleError: too often; or nobody could run it in parts."""
        losses = self._losses[spec.key] = self._losses.get(spec.key, 0) + 1
        trial = self._trials.get(spec.key) or Trial.of(len(spec.tasks))
        trial = trial.lost() if was_running else trial
        if losses >= MAX_LOSSES:
            raise RoleError(f"{losses} workers were lost that had rollout batch {spec.key}; the last time: {cause}")
        if not trial.is_whole and len(spec.tasks) > 1 and not self._can_part(spec):
            raise RoleError(
                f"rollout batch {spec.key} lost {STRIKES} workers in a row, and this experience log cannot keep a part "
                f"of it without the others, to find the task; the last time: {cause}"
            )
        self._trials[spec.key] = trial
        return trial

    def finished(self, spec: RolloutSpec, num_rollouts: int) -> Trial:
        """The batch, or the piece of it that runs, is committed."""
        if num_rollouts:
            self._in_a_row = 0
        trial = self._trials.get(spec.key) or Trial.of(len(spec.tasks))
        trial = trial.finished()
        if trial.pieces:
            self._trials[spec.key] = trial
        else:
            self._trials.pop(spec.key, None)
            self._losses.pop(spec.key, None)
        return trial

    def set_aside(self, spec: RolloutSpec, slots: tuple[int, ...]) -> None:
        """These tasks were found to be poisonous. Raises: RoleError: it cannot be the tasks."""
        new = {_identity(spec, spec.tasks[slot]) for slot in slots} - self._poisonous
        self._in_a_row += len(new)
        self._poisonous |= new
        if self._in_a_row > MAX_IN_A_ROW:
            raise RoleError(
                f"workers are lost whatever they run: {self._in_a_row} tasks in a row, the last in rollout batch "
                f"{spec.key}, each lost {STRIKES} workers while nothing ran beside it, and no rollout ended well "
                "between them; see engine.log, and what ended the workers (memory, walltime)"
            )

    def begin(self, spec: RolloutSpec) -> Trial:
        """How a new batch runs: whole, unless tasks of it are known to be poisonous."""
        known = tuple(slot for slot, task in enumerate(spec.tasks) if _identity(spec, task) in self._poisonous)
        if not known or not self._can_part(spec):
            return Trial.of(len(spec.tasks))
        rest = tuple(slot for slot in range(len(spec.tasks)) if slot not in known)
        trial = self._trials[spec.key] = Trial((rest,) if rest else (), len(spec.tasks), poisonous=known)
        return trial

    def _can_part(self, spec: RolloutSpec) -> bool:
        return len(spec.tasks) == 1 or (self._takes_parts and len(spec.tasks) <= MAX_PART_TASKS)


def _identity(spec: RolloutSpec, task: TaskRef) -> tuple[bool, int, int]:
    """Of a task in all its epochs."""
    return spec.is_eval, task.taskset_number, task.index
