"""SessionBank: rewarded sessions on their way into the experience log.

    serve/sessions/<id>.json    rewarded; durable when `put` returns
    serve/groups/<index>.json   which sessions are group <index>: written before the group is committed, create-only
    experiences/...             the group, a shard
    serve/done/<id>.json        what became of a session, in place of its rows

Invariants: a session is in the log once, whatever is killed when; group <index> has place `index` in the order of the
log, explore step after explore step. The sessions of a task are a group once there are as many as the algorithm
compares, or when the oldest of them has waited long enough; a session of no task is a group by itself. Used from any
thread.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from rftdask.buffer.log.log import ExperienceLog
from rftdask.buffer.log.schema import Experience, Status, Turn
from rftdask.buffer.log.shard import Part
from rftdask.config import Config
from rftdask.errors import NotFoundError
from rftdask.storage import Storage
from rftdask.storage.base import numbers_in
from rftdask.storage.checked_json import dump_checked, load_checked

TASKSET = "served"
"""Name of the taskset that served sessions are told to come from."""
_SESSIONS, _GROUPS, _DONE = "serve/sessions", "serve/groups", "serve/done"


@dataclass(frozen=True)
class Rewarded:
    """A session with its reward."""

    id: str
    task: str
    """Sessions of one task are compared with each other; "": with none."""
    reward: float
    rows: tuple[Experience, ...]


class SessionBank:
    """The sessions of one run. One process at a time has one: who holds the lease of the explorer.

    Example:
        bank = SessionBank(storage, log, config, group_age_s=600)
        bank.put(Rewarded("a1", "task 7", 1.0, rows))
        bank.commit_groups()
    """

    def __init__(
        self,
        storage: Storage,
        log: ExperienceLog,
        config: Config,
        *,
        group_age_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes up what an earlier process left. Raises: StorageError, DamagedError."""
        self._storage, self._log, self._clock = storage, log, clock
        self._lock = threading.Lock()
        """Guards what is below; held over no write."""
        self._committing = threading.Lock()
        """Held by who commits groups, which are given their places one after another."""
        self._group_age_s = group_age_s
        self._group_size = config.algorithm.repeat_times
        self._tasks_per_step, self._tasks_per_unit = config.buffer.batch_size, config.tasks_per_unit
        places = [
            (name.explore_step - 1) * self._tasks_per_step + name.unit * self._tasks_per_unit + slot
            for name in log.shards()
            for slot in (name.part.slots if name.part else range(self._tasks_of(name.unit)))
        ]
        self.num_groups = max(places, default=-1) + 1
        """Groups that were given a place."""
        for index in sorted(numbers_in(storage.list(_GROUPS), suffix=".json")):
            self._finish(index, committed=index in places)
            self.num_groups = max(self.num_groups, index + 1)
        self._waiting: dict[str, dict[str, float]] = {}
        """Task -> session -> since when it waits, the oldest first."""
        for name in storage.list(_SESSIONS):
            session = name.removesuffix(".json")
            self._waits(session, str(self._read(session)["task"]))

    def find(self, session: str) -> dict[str, Any] | None:
        """{"task", "reward"} of a session that was put, whatever became of it; None: it was not."""
        for folder in (_SESSIONS, _DONE):
            try:
                return load_checked(self._storage.get(f"{folder}/{session}.json"))
            except NotFoundError:
                continue
        return None

    def put(self, rewarded: Rewarded) -> None:
        """Write a session down: durable when this returns. Raises: StorageError; ValueError: it was put before."""
        told = dump_checked(
            {"task": rewarded.task, "reward": rewarded.reward, "rows": list(map(_to_json, rewarded.rows))}
        )
        if self.find(rewarded.id) is not None or not self._storage.put_new(_path(rewarded.id), told):
            raise ValueError(f"session {rewarded.id} has its reward already")
        with self._lock:
            self._waits(rewarded.id, rewarded.task)

    def commit_groups(self, *, waits: bool = True) -> int:
        """Commit every group that is complete or old enough; how many. Raises: StorageError: it is made good by who
        takes up what this process left.

        waits: False: those that wait for others of their task, too.
        """
        with self._committing:
            before = self.num_groups
            while sessions := self._take_group(waits):
                index, self.num_groups = self.num_groups, self.num_groups + 1
                record = dump_checked({"sessions": sessions})
                assert self._storage.put_new(f"{_GROUPS}/{index:08d}.json", record), "one process has the lease"
                self._finish(index, committed=False)
            return self.num_groups - before

    def _take_group(self, waits: bool) -> list[str]:
        """The sessions of a group that is to be committed, which wait no longer; []: there is none."""
        with self._lock:
            for task, since in self._waiting.items():
                size = self._group_size if task else 1
                if waits and len(since) < size and self._clock() - next(iter(since.values())) <= self._group_age_s:
                    continue
                sessions = list(since)[:size]
                for session in sessions:
                    del since[session]
                if not since:
                    del self._waiting[task]
                return sessions
        return []

    @property
    def num_waiting(self) -> int:
        """Sessions that wait for others of their task."""
        with self._lock:
            return sum(map(len, self._waiting.values()))

    @property
    def num_whole_steps(self) -> int:
        """Explore steps all of whose groups are committed."""
        return self.num_groups // self._tasks_per_step

    def _waits(self, session: str, task: str) -> None:
        self._waiting.setdefault(task, {})[session] = self._clock()

    def _tasks_of(self, unit: int) -> int:
        return min(self._tasks_per_unit, self._tasks_per_step - unit * self._tasks_per_unit)

    def _read(self, session: str) -> dict[str, Any]:
        return load_checked(self._storage.get(_path(session)))

    def _finish(self, index: int, *, committed: bool) -> None:
        """Do what is left to do for group `index`, whose record is there."""
        record = f"{_GROUPS}/{index:08d}.json"
        sessions: list[str] = load_checked(self._storage.get(record))["sessions"]
        if not committed:
            step, slot = divmod(index, self._tasks_per_step)
            unit, place = divmod(slot, self._tasks_per_unit)
            rows = [
                replace(_from_json(row), taskset=TASKSET, task_index=index, rollout=rollout, explore_step=step + 1)
                for rollout, session in enumerate(sessions)
                for row in self._read(session)["rows"]
            ]
            num_tasks = self._tasks_of(unit)
            part = None if num_tasks == 1 else Part((place,), num_tasks)
            self._log.commit(rows, explore_step=step + 1, unit=unit, part=part)
        for rollout, session in enumerate(sessions):
            # Rows are dropped once they are in the log; what is told of the session stays, for who asks again.
            if (told := self.find(session)) is not None and "rows" in told:
                done = {"task": told["task"], "reward": told["reward"], "group": index, "rollout": rollout}
                self._storage.put(f"{_DONE}/{session}.json", dump_checked(done))
                self._storage.remove(_path(session))
        self._storage.remove(record)


def one_rollout(sessions: Sequence[Sequence[Experience]]) -> list[Experience]:
    """The rows of several sessions as those of one rollout: its rows and its calls are numbered through."""
    rows, num_calls = list[Experience](), 0
    for of_session in sessions:
        first_row, first_call = len(rows), num_calls
        for row in of_session:
            turns = row.turns
            if turns is None and first_row != first_call:  # a call whose number is no longer that of its row
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


def _to_json(row: Experience) -> dict[str, Any]:
    # Floats as the float64 that they are: read back, they are the same float32.
    plain = {each.name: getattr(row, each.name) for each in fields(row)}
    plain |= {name: np.asarray(plain[name]).tolist() for name in ("tokens", "rollout_logprobs")}
    plain["loss_mask"] = None if row.loss_mask is None else np.asarray(row.loss_mask).tolist()
    plain["turns"] = None if row.turns is None else [vars(turn) for turn in row.turns]
    plain["metrics"] = dict(row.metrics)
    plain["status"] = str(row.status)
    # As `load_checked` will see it, so that the checksum is of what is read.
    loaded: dict[str, Any] = json.loads(json.dumps(plain))
    return loaded


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
