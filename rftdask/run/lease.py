"""Lease of a role on a run: keeps two drivers, two trainers or two explorers of one name apart.

A lease is a numbered create-only file with a heartbeat. Invariant: at most one live holder per role.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from rftdask.config import Config
from rftdask.errors import FencedError, NotFoundError, StorageError
from rftdask.storage import Storage
from rftdask.storage.base import next_number, numbers_in
from rftdask.storage.checked_json import parse_object

DATASET = "dataset"
"""Role of who makes the dataset of a run by its task pipeline, before any other role begins."""


ROLES = ("trainer", "explorer")
"""What a process owns of a run or stage."""


_LEASE = re.compile(r"lease-(trainer|explorer|explorer\..+)-[0-9]+\.json")


_HEARTBEAT_S = 5.0


_STALE_S = 30.0


_WATCH_S = 2.5 * _HEARTBEAT_S
"""A living owner writes at least once in it."""


def roles_of(config: Config) -> tuple[str, ...]:
    """The roles that a stage's process owns while it runs."""
    trains = config.mode in ("both", "train")
    return tuple(role for role, has in zip(ROLES, (trains, config.has_explorer), strict=True) if has)


def lease_role(config: Config, role: str) -> str:
    """The role as its leases name it: that of an explorer beside which others may be has its name."""
    name = config.command_name.partition(".")[2]
    return f"{role}.{name}" if role == "explorer" and name else role


class Lease:
    """Ownership of one role of a run, renewed by a heartbeat until `release`.

    Example: with Lease(storage, "trainer"): ...
    """

    def __init__(
        self,
        storage: Storage,
        role: str,
        heartbeat_s: float = _HEARTBEAT_S,
        *,
        explore_steps: int | None = None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """explore_steps: of an explorer beside which those of other names may work that make as many; None: none may.
        clock: Unix seconds, of this machine; sleep: how to let an owner's heartbeats pass.

        Raises: FencedError: a living process holds the role, or is an explorer that this one cannot be beside.
        """
        self._storage = storage
        self._clock = clock
        self._sleep = sleep
        self.role = role
        self._explore_steps = explore_steps
        self._heartbeat_s = heartbeat_s
        self._ended = threading.Event()
        self.lost = False
        """True once somebody else took the role over: stop at once."""
        # A number is never used again, so who lost the role sees it by a higher one.
        self.number = next_number(storage.list("control"), f"lease-{role}-", ".json")
        # Only the newest can be held: each lease was taken when the one before it was free.
        if self.number > 1:
            self._check_free(role, self.number - 1)
        if not storage.put_new(lease_path(role, self.number), self._content(released=False)):
            raise FencedError(f"another process has just started as {role} of {storage.url}; this one stops")
        # After its own is written: of two that start at once, and exclude each other, one at least sees the other.
        try:
            for other in _lease_roles(storage) if role.startswith("explorer") else ():
                if other not in ("trainer", role):
                    self._check_free(other, _last_lease(storage, other))
        except FencedError:
            storage.put(lease_path(role, self.number), self._content(released=True))
            raise
        # A thread: the owner may be busy for minutes in one call, and must not lose the role for it.
        self._thread = threading.Thread(target=self._beat, name=f"lease-{role}", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the role back. Idempotent."""
        if not self._ended.is_set():
            self._ended.set()
            # A beat that is under way must not renew what is released below.
            self._thread.join(_HEARTBEAT_S)
            if not self.lost:
                with contextlib.suppress(StorageError):  # the run has ended, and a lease nobody renews is nobody's
                    self._storage.put(lease_path(self.role, self.number), self._content(released=True))

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _content(self, released: bool) -> bytes:
        tree = {**_this_process(self._clock()), "released": released, "explore_steps": self._explore_steps}
        return json.dumps(tree).encode()

    def _check_free(self, role: str, number: int) -> None:
        """Raises: FencedError: a living process has this lease, of this role or of an explorer that excludes it."""
        data = self._read(role, number)
        try:
            holder = _parse_lease(data)
        except ValueError:
            return  # a lease nobody could finish writing is nobody's
        if role != self.role and not _excludes(role, holder, self._explore_steps):
            return
        # Of an owner on this machine nothing can be left without its process, whatever any clock says.
        is_gone = holder["host"] == socket.gethostname() and not _is_running(holder["pid"])
        if holder["released"] or is_gone:
            return
        if not _is_alive(holder, self._clock()):
            # Either it is dead, or a clock jumped, of the other machine or of this one. Who lives writes again.
            self._sleep(_WATCH_S)
            if self._read(role, number) == data:
                return
        raise FencedError(_held(self._storage, role, holder, self.role, self._explore_steps))

    def _read(self, role: str, number: int) -> bytes:
        try:
            return self._storage.get(lease_path(role, number))
        except NotFoundError:
            return b""

    def _beat(self) -> None:
        while not self._ended.wait(self._heartbeat_s):
            try:
                # Looked at before each renewal: an owner that slept for a while must not touch a run that is another's
                # by now.
                if _last_lease(self._storage, self.role) > self.number:
                    # The owner is told at its next look; it stops by itself, since nobody can stop its calls.
                    self.lost = True
                    self._ended.set()
                    return
                self._storage.put(lease_path(self.role, self.number), self._content(released=False))
            except StorageError:
                continue  # the next beat tries again; others wait _STALE_S before they take over


def _excludes(role: str, holder: Mapping[str, Any], explore_steps: int | None) -> bool:
    """Whether the holder of this role is an explorer beside which none can be that makes so many explore steps."""
    return role != "trainer" and (explore_steps is None or holder.get("explore_steps") != explore_steps)


def _held(
    storage: Storage, role: str, holder: Mapping[str, Any], own: str = "", explore_steps: int | None = None
) -> str:
    """Why a process that is to have the role `own` cannot work beside this holder, and what to do."""
    process = f"process {holder['pid']} on {holder['host']}"
    if role == DATASET:
        return f"{storage.url} is being worked on: {process} makes its dataset; wait until it has, or stop it"
    what_to_do = "stop it first (Ctrl-C there ends it with a checkpoint)"
    theirs = holder.get("explore_steps")
    if None not in (theirs, explore_steps):
        if role == own:
            what_to_do += ", or give this one an explorer.name of its own"
        else:
            what_to_do += (
                f", or give both the same buffer.total_steps and total_epochs: it makes {theirs} explore steps, and "
                f"this one {explore_steps}"
            )
    elif role != own and role != "trainer" and own != "trainer":
        what_to_do += "; explorers of one run beside each other are commands of mode explore, with one of mode train"
    return f"{storage.url} is being worked on: {role} is {process}; {what_to_do}"


def lease_holders(storage: Storage) -> dict[str, dict[str, Any]]:
    """Who works on the run now, as `lease_holder` says it, by role: trainer, explorer, explorer.<name>, ..."""
    held = {role: lease_holder(storage, role) for role in _lease_roles(storage)}
    return {role: holder for role, holder in held.items() if holder is not None}


class LeaseWatch:
    """Whether leases are held, as who looks at them again and again sees it: by no clock but its own.

    Example: watch.is_held("explorer.b", 3)
    """

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage = storage
        self._clock = clock
        self._seen: dict[str, tuple[bytes, float]] = {}
        """By path, what a lease said last and when it began to say so."""

    def is_held(self, role: str, number: int) -> bool:
        """True for a lease that was not released, of a living process of this machine, or of another one that renewed
        it lately.
        """
        path = lease_path(role, number)
        try:
            data = self._storage.get(path)
            holder = _parse_lease(data)
        except (NotFoundError, ValueError):
            return False
        if holder["released"]:
            return False
        if holder["host"] == socket.gethostname():
            return _is_running(holder["pid"], holder["started_s"])
        said, since_s = self._seen.get(path, (b"", 0.0))
        if said != data:
            since_s = self._clock()
            self._seen[path] = data, since_s
        return self._clock() - since_s < _STALE_S

    def sees_another(self, role: str) -> bool:
        """Whether another explorer than that of this role holds its lease."""
        roles = (each for each in _lease_roles(self._storage) if each not in ("trainer", role))
        return any(self.is_held(each, _last_lease(self._storage, each)) for each in roles)


def lease_holder(storage: Storage, role: str) -> dict[str, Any] | None:
    """Who works on the role now: {"host", "pid", "time_s", ...}; None if nobody does."""
    # The highest number is the owner's, whatever older leases still say.
    number = _last_lease(storage, role)
    try:
        holder = _parse_lease(storage.get(lease_path(role, number)))
    except (NotFoundError, ValueError):
        return None
    return holder if not holder["released"] and _is_alive(holder, time.time()) else None


def _this_process(now_s: float) -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started_s": _started_s(psutil.Process()),
        "time_s": now_s,
        "released": False,
    }


def _parse_lease(data: bytes) -> dict[str, Any]:
    """Who holds a lease. Raises: ValueError: the file is torn, or somebody else's."""
    holder = parse_object(data)
    wanted = {"host": str, "pid": int, "started_s": float, "time_s": float, "released": bool}
    if not all(type(holder.get(key)) is kind for key, kind in wanted.items()):  # a bool is no number
        raise ValueError(f"a lease says {', '.join(wanted)}, and not {sorted(holder)}")
    if holder["pid"] < 1:
        raise ValueError(f"no process has the number {holder['pid']}")
    return holder


def lease_path(role: str, number: int) -> str:
    """File of a lease, below the run folder."""
    return f"control/lease-{role}-{number}.json"


def _lease_roles(storage: Storage) -> list[str]:
    """The roles that somebody has or had, the trainer's first."""
    found = {match[1] for match in map(_LEASE.fullmatch, storage.list("control")) if match}
    return sorted(found, key=lambda role: (role != "trainer", role))


def _last_lease(storage: Storage, role: str) -> int:
    """Number of the newest lease; 0 if there is none. Other files of the folder are not ours."""
    return max(numbers_in(storage.list("control"), f"lease-{role}-", ".json"), default=0)


def _is_alive(holder: Mapping[str, Any], now_s: float) -> bool:
    """Whether the owner is alive, as far as clocks can tell."""
    if holder["host"] == socket.gethostname():
        return _is_running(holder["pid"], holder["started_s"])
    # In both directions: a clock that is ahead is as wrong as one that is behind.
    return abs(now_s - float(holder["time_s"])) < _STALE_S


def _is_running(pid: int, started_s: float | None = None) -> bool:
    """Whether a process of this machine does anything: one that ended and that nobody asked for (a zombie) does not.

    started_s: its `_started_s`; another process may have its number by now. None: whoever has the number.
    """
    try:
        process = psutil.Process(pid)
        # Whole seconds of the boot time come and go, which another one may have become between its two looks.
        is_it = started_s is None or abs(_started_s(process) - started_s) < 1.5
        return bool(is_it and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _started_s(process: psutil.Process) -> float:
    """Seconds from the start of the machine to that of the process: no clock that is set changes them."""
    return float(process.create_time() - psutil.boot_time())
