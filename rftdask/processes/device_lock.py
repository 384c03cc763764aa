"""Locks of devices that a trainer rank and engines share: exclusive for a rank, shared among engines.

Each device has two lock files, a gate and the lock itself, on which processes hold kernel locks (flock). The kernel
releases them when a process ends, also by kill -9, so no state needs repair.

- A rank takes the gate exclusively, then waits for the lock. It keeps both until it releases the device.
- An engine passes the gate, which it cannot while a rank has it, takes the lock in shared mode, and releases the gate.
  It keeps the lock until a rank has the gate and the engine has nothing to do.

So a waiting rank comes before further engines. Deadlock is impossible: an engine takes the locks of all its devices or
none, and a rank has one device.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path

from rftdask.errors import WaitTimeout

DEVICES_VARIABLE = "RFTDASK_DEVICE_LOCKS"
"""Environment variable of a process, and of its children, that shares devices: "<folder>:<name>,<name>"."""
_POLL_INTERVAL_S = 0.02


def shared_devices(folder: str | Path, names: Sequence[str | int]) -> dict[str, str]:
    """Environment of a process that shares these devices; `folder` is the same for all of them."""
    return {DEVICES_VARIABLE: f"{folder}:{','.join(map(str, names))}"} if names else {}


class DeviceLock:
    """The lock of this process on its devices: `acquire`, load weights, compute, free the memory, `release`."""

    def __init__(self, folder: str | Path, names: Sequence[str | int], *, exclusive: bool) -> None:
        """exclusive: True for a rank, False for an engine."""
        self.held = False
        self._exclusive, self._names = exclusive, tuple(str(name).replace("/", "-") for name in names)
        self._files = {
            # Not inherited by programs that it starts: a lock lasts as long as any process has its file open.
            file: os.open(Path(folder, file), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            for name in self._names
            for file in (f"gate-{name}", f"lock-{name}")
        }

    @classmethod
    def from_environment(cls, *, exclusive: bool) -> DeviceLock | None:
        """The lock that DEVICES_VARIABLE describes, not held. None: this process shares no device."""
        folder, _, names = os.environ.get(DEVICES_VARIABLE, "").rpartition(":")
        return cls(folder, names.split(","), exclusive=exclusive) if folder else None

    def try_acquire(self, *, skip_gate: bool = False) -> bool:
        """Acquire without waiting; False: not possible now. A rank keeps the gate, so no further engine passes.

        skip_gate: do not wait for a rank at the gate, since an engine of this worker holds the device until this one
        has it as well.
        """
        if self.held:
            return True
        kind = fcntl.LOCK_EX if self._exclusive else fcntl.LOCK_SH
        for name in self._names:
            has_lock = (skip_gate or self._lock(f"gate-{name}", kind)) and self._lock(f"lock-{name}", kind)
            if not self._exclusive:
                self._unlock(f"gate-{name}")
                if not has_lock:
                    self.release()  # all devices or none
            if not has_lock:
                return False
        self.held = True
        return True

    def acquire(self, timeout_s: float, *, skip_gate: bool = False) -> None:
        """Wait for the devices. Raises: WaitTimeout."""
        deadline = time.monotonic() + timeout_s
        while not self.try_acquire(skip_gate=skip_gate):
            if time.monotonic() > deadline:
                raise self.timeout(timeout_s)
            time.sleep(_POLL_INTERVAL_S)

    def timeout(self, timeout_s: float) -> WaitTimeout:
        holder = "an engine" if self._exclusive else "a trainer rank"
        return WaitTimeout(
            f"{holder} did not release the shared device {', '.join(self._names)} for {timeout_s:.0f} s; raise "
            "synchronizer.sync_timeout if it may hold the device for so long"
        )

    @property
    def is_wanted(self) -> bool:
        """True while a rank waits, so an idle engine should release the device."""
        return not all([self._lock(f"gate-{n}", fcntl.LOCK_SH) and self._unlock(f"gate-{n}") for n in self._names])

    def release(self) -> None:
        """Release the devices, whose memory must be free. Idempotent."""
        for file in self._files:
            self._unlock(file)
        self.held = False

    def _lock(self, file: str, kind: int) -> bool:
        try:
            fcntl.flock(self._files[file], kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _unlock(self, file: str) -> bool:
        fcntl.flock(self._files[file], fcntl.LOCK_UN)
        return True
