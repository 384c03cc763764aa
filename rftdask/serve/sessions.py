"""SessionStore: rewarded sessions on their way into the experience log.

    serve/sessions/<id>.json    a rewarded session; durable when `put` returns
    serve/groups/<index>.json   ids of the sessions in group <index>; create-only, written before the group is committed
    experiences/...             the group as a shard
    serve/done/<id>.json        task, reward and group of a committed session, without its rows
    serve/quarantine/<id>.json  a stored session that cannot be read or become rows, with the reason in <id>.reason.json

Invariants: a session is in the log exactly once, whatever is killed and when. Group <index> has position `index` in the
log, counted over all explore steps. The sessions of a task become a group once there are `algorithm.repeat_times` of
them, or once the oldest has waited `group_age_s`. A session without a task is its own group. Thread-safe.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from rftdask.buffer.log.columns import experiences_to_table
from rftdask.buffer.log.log import ExperienceLog
from rftdask.buffer.log.schema import Experience, Status, Turn
from rftdask.buffer.log.shard import Part
from rftdask.config import Config
from rftdask.errors import NotFoundError, StorageError
from rftdask.storage import Storage
from rftdask.storage.base import numbers_in
from rftdask.storage.checked_json import dump_checked, load_checked

TASKSET = "served"
"""Taskset name recorded for served sessions."""
_SESSIONS, _GROUPS, _DONE, _QUARANTINE = "serve/sessions", "serve/groups", "serve/done", "serve/quarantine"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardedSession:
    id: str
    task: str
    """Sessions of the same task form a group; "": the session is its own group."""
    reward: float
    rows: tuple[Experience, ...]


class SessionStore:
    """The rewarded sessions of one run. Only the process that holds the explorer lease may have one."""

    def __init__(
        self,
        storage: Storage,
        log: ExperienceLog,
        config: Config,
        *,
        group_age_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Finishes the groups that an earlier process began. Raises: StorageError."""
        self._storage, self._log, self._clock = storage, log, clock
        self._lock = threading.Lock()
        """Guards `_waiting`; never held during a write."""
        self._commit_lock = threading.Lock()
        """Held while groups are committed, so that they get consecutive positions."""
        self._error: StorageError | None = None
        """Error of a group that is not committed."""
        self._group_age_s = group_age_s
        self._group_size = config.algorithm.repeat_times
        self._tasks_per_step, self._tasks_per_unit = config.buffer.batch_size, config.tasks_per_unit
        positions = [
            (name.explore_step - 1) * self._tasks_per_step + name.unit * self._tasks_per_unit + slot
            for name in log.shards()
            for slot in (name.part.slots if name.part else range(self._num_tasks(name.unit)))
        ]
        self.num_groups = max(positions, default=-1) + 1
        """Number of groups that have a position."""
        for index in sorted(numbers_in(storage.list(_GROUPS), suffix=".json")):
            self._finish(index, is_committed=index in positions)
            self.num_groups = max(self.num_groups, index + 1)
        self._waiting: dict[str, dict[str, float]] = {}
        """Task -> session -> time at which it began to wait; oldest session first."""
        for name in storage.list(_SESSIONS):
            session = name.removesuffix(".json")
            if (stored := self._read(session)) is not None:
                self._add_waiting(session, stored.task)

    def find(self, session: str) -> dict[str, Any] | None:
        """{"task", "reward", ...} of a stored session, committed or not; None: it was never stored."""
        for folder in (_SESSIONS, _DONE):
            try:
                return load_checked(self._storage.get(f"{folder}/{session}.json"))
            except NotFoundError:
                continue
        return None

    def put(self, rewarded: RewardedSession) -> None:
        """Store a session durably. Raises: StorageError; ValueError, OverflowError: already stored, or invalid rows."""
        experiences_to_table(rewarded.rows)
        # float32 values are written as float64 and read back unchanged.
        rows = msgspec.to_builtins(rewarded.rows, enc_hook=lambda numpy_value: numpy_value.tolist())
        record = dump_checked({"task": rewarded.task, "reward": rewarded.reward, "rows": rows})
        if self.find(rewarded.id) is not None or not self._storage.put_new(_path(rewarded.id), record):
            raise ValueError(f"session {rewarded.id} already has its reward")
        with self._lock:
            self._add_waiting(rewarded.id, rewarded.task)

    def commit_groups(self, *, include_incomplete: bool = False) -> int:
        """Commit every group that is complete or old enough. Returns: their number.

        include_incomplete: also commit sessions that still wait for others of their task.
        Raises: StorageError: the next process that opens the store finishes the group. This one commits no more: every
        later call raises the same error.
        """
        with self._commit_lock:
            if self._error is not None:
                raise self._error
            before = self.num_groups
            try:
                while sessions := self._take_group(include_incomplete):
                    index, self.num_groups = self.num_groups, self.num_groups + 1
                    record = dump_checked({"sessions": sessions})
                    assert self._storage.put_new(f"{_GROUPS}/{index:08d}.json", record), "one process has the lease"
                    self._finish(index, is_committed=False)
            except StorageError as error:
                self._error = error  # later groups would leave position `index` empty
                raise
            return self.num_groups - before

    def _take_group(self, include_incomplete: bool) -> list[str]:
        """Remove and return the waiting sessions of the next group to commit; []: no group is ready."""
        with self._lock:
            for task, waiting in self._waiting.items():
                size = self._group_size if task else 1
                is_ready = len(waiting) >= size or self._clock() - next(iter(waiting.values())) > self._group_age_s
                if not (is_ready or include_incomplete):
                    continue
                sessions = list(waiting)[:size]
                for session in sessions:
                    del waiting[session]
                if not waiting:
                    del self._waiting[task]
                return sessions
        return []

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return sum(map(len, self._waiting.values()))

    @property
    def num_whole_steps(self) -> int:
        """Number of explore steps whose groups are all committed."""
        return self.num_groups // self._tasks_per_step

    def _add_waiting(self, session: str, task: str) -> None:
        self._waiting.setdefault(task, {})[session] = self._clock()

    def _read(self, session: str) -> RewardedSession | None:
        """Read a stored session whose rows can enter the log. None: it cannot be read, and is in quarantine now."""
        try:
            data = self._storage.get(_path(session))
        except NotFoundError:
            if self._storage.exists(f"{_QUARANTINE}/{session}.json"):
                return None
            raise
        record: dict[str, Any] = {}
        try:
            record = load_checked(data)
            rows = tuple(map(_from_json, record["rows"]))
            experiences_to_table(rows)
            return RewardedSession(session, str(record["task"]), float(record["reward"]), rows)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            reason = f"{type(error).__name__}: {error}"
        log.warning("session %s cannot enter the log and is in %s now: %s", session, _QUARANTINE, reason)
        self._storage.put(f"{_QUARANTINE}/{session}.json", data)
        notes = {"session": session, "reason": reason}
        self._storage.put(f"{_QUARANTINE}/{session}.reason.json", json.dumps(notes).encode())
        if {"task", "reward"} <= record.keys():
            done = {"task": record["task"], "reward": record["reward"], "group": None, "rollout": None}
            self._storage.put(f"{_DONE}/{session}.json", dump_checked(done))
        # Removed last: after a kill in between it is put in quarantine again.
        self._storage.remove(_path(session))
        return None

    def _num_tasks(self, unit: int) -> int:
        return min(self._tasks_per_unit, self._tasks_per_step - unit * self._tasks_per_unit)

    def _finish(self, index: int, *, is_committed: bool) -> None:
        """Do the remaining steps for group `index`, whose record exists."""
        record = f"{_GROUPS}/{index:08d}.json"
        sessions: list[str] = load_checked(self._storage.get(record))["sessions"]
        if not is_committed:
            step, place = divmod(index, self._tasks_per_step)
            unit, slot = divmod(place, self._tasks_per_unit)
            stored = [self._read(session) for session in sessions]
            rows = [
                replace(row, taskset=TASKSET, task_index=index, rollout=rollout, explore_step=step + 1)
                for rollout, session in enumerate(stored)
                for row in (() if session is None else session.rows)
            ]
            num_tasks = self._num_tasks(unit)
            part = None if num_tasks == 1 else Part((slot,), num_tasks)
            self._log.commit(rows, explore_step=step + 1, unit=unit, part=part)
        for rollout, session in enumerate(sessions):
            # The rows are in the log now. Task and reward stay, to answer repeated feedback.
            if (record_of := self.find(session)) is not None and "rows" in record_of:
                done = {"task": record_of["task"], "reward": record_of["reward"], "group": index, "rollout": rollout}
                self._storage.put(f"{_DONE}/{session}.json", dump_checked(done))
                self._storage.remove(_path(session))
        self._storage.remove(record)


def one_rollout(sessions: Sequence[Sequence[Experience]]) -> list[Experience]:
    """Join the rows of several sessions into one rollout, with rows and calls numbered consecutively."""
    rows, num_calls = list[Experience](), 0
    for session_rows in sessions:
        first_row, first_call = len(rows), num_calls
        for row in session_rows:
            turns = row.turns
            if turns is None and first_row != first_call:  # the call's number no longer equals its row's
                whole = (0, len(row.rollout_logprobs), 0, len(row.response_text), "", row.seed)
                versions = (row.min_policy_version, row.max_policy_version)
                turns = (Turn(row.turn, *whole, *versions, row.env_state, row.turn_reward),)
                row = replace(row, env_state=None, turn_reward=None)
            shifted = None if turns is None else tuple(replace(t, number=t.number + first_call) for t in turns)
            rows.append(replace(row, turn=row.turn + first_row, turns=shifted))
            num_calls += 1 if turns is None else len(turns)
    return rows


def _path(session: str) -> str:
    return f"{_SESSIONS}/{session}.json"


def _from_json(plain: dict[str, Any]) -> Experience:
    turns: Sequence[dict[str, Any]] | None = plain["turns"]
    return Experience(
        **{
            **plain,
            "status": Status(plain["status"]),
            "tokens": np.array(plain["tokens"], np.int32),
            "rollout_logprobs": np.array(plain["rollout_logprobs"], np.float32),
            "loss_mask": None if plain["loss_mask"] is None else np.array(plain["loss_mask"], bool),
            "turns": None if turns is None else tuple(Turn(**turn) for turn in turns),
            "version_starts": plain.get("version_starts") and tuple(map(tuple, plain["version_starts"])),
        }
    )
