"""Lease of a role on a run: a numbered create-only file with a heartbeat. Invariant: at most one live holder per role.

Two trainers, two explorers of one name, or two drivers of one command never work on the same run.
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
"""Role of the process that runs the task pipeline, before any other role begins."""
ROLES = ("trainer", "explorer")
_LEASE = re.compile(r"lease-(trainer|explorer|explorer\..+)-[0-9]+\.json")
_HEARTBEAT_S = 5.0
_STALE_S = 30.0
_WATCH_S = 2.5 * _HEARTBEAT_S
"""A living holder renews its lease at least once in this time."""


def roles_of(config: Config) -> tuple[str, ...]:
    """Roles of the process that runs a stage."""
    trains = config.mode in ("both", "train")
    return tuple(role for role, has in zip(ROLES, (trains, config.has_explorer), strict=True) if has)


def lease_role(config: Config, role: str) -> str:
    """Name of the role in leases: "explorer.<name>" for an explorer with a name."""
    name = config.command_name.partition(".")[2]
    return f"{role}.{name}" if role == "explorer" and name else role


def driver_role(config: Config) -> str:
    """Role of the process that starts the cluster of this command and manages its jobs, for all stages of the run."""
    return f"driver.{config.command_name}"


class Lease(contextlib.AbstractContextManager["Lease"]):
    """A held lease, renewed by a heartbeat until `release`. Example: with Lease(storage, "trainer"): ..."""

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
        """explore_steps: number of explore steps; explorers of other names with the same number may run as well. None:
        none may. clock: Unix seconds. sleep: waits for a heartbeat of the holder.

        Raises: FencedError: a living process holds the role, or is an explorer that excludes this one.
        """
        self._storage, self.role, self._explore_steps = storage, role, explore_steps
        self._heartbeat_s, self._clock, self._sleep = heartbeat_s, clock, sleep
        self._ended = threading.Event()
        self.lost = False
        """True once another process has taken over the role: stop at once."""
        # Numbers are never used again, so a holder sees by a higher one that it lost the role.
        self.number = next_number(storage.list("control"), f"lease-{role}-", ".json")
        # Each lease was taken when the one before was free, so only the newest can be held.
        if self.number > 1:
            self._check_free(role, self.number - 1)
        if not storage.put_new(lease_path(role, self.number), self._content(released=False)):
            raise FencedError(f"another process has just started as {role} of {storage.url}; this one stops")
        # After the own lease exists, so that of two excluding explorers at least one sees the other.
        try:
            for other in _lease_roles(storage) if role.startswith("explorer") else ():
                if other not in ("trainer", role):
                    self._check_free(other, _last_lease(storage, other))
        except FencedError:
            storage.put(lease_path(role, self.number), self._content(released=True))
            raise
        # A thread, because the holder may be busy for minutes in one call.
        self._thread = threading.Thread(target=self._beat, name=f"lease-{role}", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give up the role. Idempotent."""
        if not self._ended.is_set():
            self._ended.set()
            # A heartbeat in progress must not undo the release.
            self._thread.join(_HEARTBEAT_S)
            if not self.lost:
                with contextlib.suppress(StorageError):  # the run has ended, and the lease expires
                    self._storage.put(lease_path(self.role, self.number), self._content(released=True))

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _content(self, released: bool) -> bytes:
        tree = {**this_process(self._clock()), "released": released, "explore_steps": self._explore_steps}
        return json.dumps(tree).encode()

    def _check_free(self, role: str, number: int) -> None:
        """Raises: FencedError: a living process holds this lease, and excludes this one."""
        data = self._read(role, number)
        try:
            holder = parse_lease(data)
        except ValueError:
            return  # its holder died while writing it
        if role != self.role and not excludes(role, holder, self._explore_steps):
            return
        # On this machine the process decides, not the clock.
        if holder["released"] or (holder["host"] == socket.gethostname() and not _is_running(holder["pid"])):
            return
        if not is_alive(holder, self._clock()):
            # The holder is dead, or a clock jumped. A living one renews its lease.
            self._sleep(_WATCH_S)
            if self._read(role, number) == data:
                return
        raise FencedError(conflict(self._storage, role, holder, self.role, self._explore_steps))

    def _read(self, role: str, number: int) -> bytes:
        try:
            return self._storage.get(lease_path(role, number))
        except NotFoundError:
            return b""

    def _beat(self) -> None:
        while not self._ended.wait(self._heartbeat_s):
            try:
                # Checked before each renewal, because a suspended holder may have lost the role meanwhile.
                if _last_lease(self._storage, self.role) > self.number:
                    self.lost = True
                    self._ended.set()
                    return
                self._storage.put(lease_path(self.role, self.number), self._content(released=False))
            except StorageError:
                continue  # the next heartbeat tries again; the lease expires only after _STALE_S


def excludes(role: str, holder: Mapping[str, Any], explore_steps: int | None) -> bool:
    """True if the holder is an explorer that excludes other explorers with `explore_steps`."""
    return role != "trainer" and (explore_steps is None or holder.get("explore_steps") != explore_steps)


def conflict(
    storage: Storage, role: str, holder: Mapping[str, Any], new_role: str = "", explore_steps: int | None = None
) -> str:
    """Error text: the holder of `role` excludes a new process with `new_role`, and the remedy."""
    process = f"process {holder['pid']} on {holder['host']}"
    if role == DATASET:
        return f"{storage.url} is in use: {process} makes its dataset; wait for it, or stop it"
    remedy = "stop it first (Ctrl-C ends it with a checkpoint)"
    held_steps = holder.get("explore_steps")
    if None not in (held_steps, explore_steps):
        if role == new_role:
            remedy += ", or give this command another explorer.name"
        else:
            remedy += (
                f", or give both the same buffer.total_steps and total_epochs: it makes {held_steps} explore steps, "
                f"and this command {explore_steps}"
            )
    elif role != new_role and role != "trainer" and new_role != "trainer":
        remedy += "; several explorers of one run need commands of mode explore, with one of mode train"
    held_role = "its driver" if role.startswith("driver.") else role
    return f"{storage.url} is in use: {held_role} is {process}; {remedy}"


def lease_holders(storage: Storage) -> dict[str, dict[str, Any]]:
    """`lease_holder` of each held role: trainer, explorer, explorer.<name>, ..."""
    holders = {role: lease_holder(storage, role) for role in _lease_roles(storage)}
    return {role: holder for role, holder in holders.items() if holder is not None}


class LeaseWatch:
    """Repeated checks of leases, which use only the clock of this machine."""

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage, self._clock = storage, clock
        self._seen: dict[str, tuple[bytes, float]] = {}
        """Newest content of each lease by path, and the time of its first sight."""

    def is_held(self, role: str, number: int) -> bool:
        """True if the lease is not released, and its process runs on this machine or renewed it recently."""
        path = lease_path(role, number)
        try:
            data = self._storage.get(path)
            holder = parse_lease(data)
        except (NotFoundError, ValueError):
            return False
        if holder["released"]:
            return False
        if holder["host"] == socket.gethostname():
            return _is_running(holder["pid"], holder["started_s"])
        newest, since_s = self._seen.get(path, (b"", 0.0))
        if newest != data:
            since_s = self._clock()
            self._seen[path] = data, since_s
        return self._clock() - since_s < _STALE_S

    def sees_another(self, role: str) -> bool:
        """True if an explorer other than `role` holds a lease."""
        others = (other for other in _lease_roles(self._storage) if other not in ("trainer", role))
        return any(self.is_held(other, _last_lease(self._storage, other)) for other in others)


def lease_holder(storage: Storage, role: str) -> dict[str, Any] | None:
    """Holder of the role now: {"host", "pid", "time_s", ...}. None: the role is free."""
    number = _last_lease(storage, role)
    try:
        holder = parse_lease(storage.get(lease_path(role, number)))
    except (NotFoundError, ValueError):
        return None
    return holder if not holder["released"] and is_alive(holder, time.time()) else None


def this_process(now_s: float) -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started_s": _started_s(psutil.Process()),
        "time_s": now_s,
        "released": False,
    }


def parse_lease(data: bytes) -> dict[str, Any]:
    """Parse the content of a lease. Raises: ValueError: not a lease."""
    holder = parse_object(data)
    types = {"host": str, "pid": int, "started_s": float, "time_s": float, "released": bool}
    if not all(type(holder.get(key)) is kind for key, kind in types.items()):  # isinstance takes a bool for an int
        raise ValueError(f"a lease has {', '.join(types)}, not {sorted(holder)}")
    if holder["pid"] < 1:
        raise ValueError(f"{holder['pid']} is not a process id")
    return holder


def lease_path(role: str, number: int) -> str:
    return f"control/lease-{role}-{number}.json"


def _lease_roles(storage: Storage) -> list[str]:
    """Roles with a lease, held or not; the trainer first."""
    roles = {match[1] for match in map(_LEASE.fullmatch, storage.list("control")) if match}
    return sorted(roles, key=lambda role: (role != "trainer", role))


def _last_lease(storage: Storage, role: str) -> int:
    """Number of the newest lease of a role; 0: none."""
    return max(numbers_in(storage.list("control"), f"lease-{role}-", ".json"), default=0)


def is_alive(holder: Mapping[str, Any], now_s: float) -> bool:
    """True if the holder is alive, as far as clocks show."""
    if holder["host"] == socket.gethostname():
        return _is_running(holder["pid"], holder["started_s"])
    # Clocks may be ahead or behind.
    return abs(now_s - float(holder["time_s"])) < _STALE_S


def _is_running(pid: int, started_s: float | None = None) -> bool:
    """True if a process of this machine runs and is not a zombie.

    started_s: its `_started_s`, since another process may have the same id later. None: any process with this id.
    """
    try:
        process = psutil.Process(pid)
        # The boot time that the kernel reports varies by a second.
        is_same = started_s is None or abs(_started_s(process) - started_s) < 1.5
        return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _started_s(process: psutil.Process) -> float:
    """Seconds from the start of the machine to that of the process, which do not change when the clock is set."""
    return float(process.create_time() - psutil.boot_time())
