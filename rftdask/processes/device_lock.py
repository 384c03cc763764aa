"""Turns: which of the processes that share a device has it now. A rank has its device alone, engines have it together.

Each device has two files, a door and a room, and who holds what is told by locks of the kernel (flock), which end with
their process however it ends: there is no state to mend after kill -9.

- A rank locks the door, then waits until the room is empty. It keeps both until it leaves.
- An engine passes the door, which it cannot while a rank has it, enters the room, and leaves the door open. It stays
  until a rank is at the door and it has nothing to do.

So whoever waits for its turn is next, and a rank and an engine are never in one room. Nobody waits in a circle: an
engine of several devices enters all of their rooms or none, and a rank has one device.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path

from rftdask.errors import WaitTimeout

VARIABLE = "RFTDASK_TURNS"
"""Environment variable of a process that shares devices: "<folder>:<name>,<name>"; of its children, too."""
_LOOK_S = 0.02


def shared_devices(folder: str | Path, names: Sequence[str | int]) -> dict[str, str]:
    """The environment of a process that takes turns on these devices; folder: of all who share them."""
    return {VARIABLE: f"{folder}:{','.join(map(str, names))}"} if names else {}


class DeviceTurn:
    """The turn of this process on its devices.

    Example:
        turn = DeviceTurn.of_this_process(alone=True)     # None: it shares no device
        turn.wait(3600)
        ...                                         # its weights are on the device
        turn.leave()
    """

    def __init__(self, folder: str | Path, names: Sequence[str | int], *, alone: bool) -> None:
        """alone: True for a rank; False for an engine, of which several may have a turn together."""
        self.held = False
        """Whether it is this process's turn."""
        self._alone, self._names = alone, tuple(str(name).replace("/", "-") for name in names)
        self._files = {
            # Closed in programs that it starts: a lock lasts as long as anybody has its file open.
            file: os.open(Path(folder, file), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            for name in self._names
            for file in (f"door-{name}", f"room-{name}")
        }

    @classmethod
    def of_this_process(cls, *, alone: bool) -> DeviceTurn | None:
        """As its environment says, not taken yet; None: it shares no device."""
        folder, _, names = os.environ.get(VARIABLE, "").rpartition(":")
        return cls(folder, names.split(","), alone=alone) if folder else None

    def try_take(self, *, beside: bool = False) -> bool:
        """Take the turn if it can be had now. A rank that cannot stands at the door, and no further engine passes it.

        beside: another engine of the same worker may have the turn, and waits for this one; so no door stops it.
        """
        if self.held:
            return True
        kind = fcntl.LOCK_EX if self._alone else fcntl.LOCK_SH
        for name in self._names:
            entered = (beside or self._lock(f"door-{name}", kind)) and self._lock(f"room-{name}", kind)
            # An engine only passes the door; a rank stands in it until it leaves.
            if not self._alone:
                self._unlock(f"door-{name}")
                if not entered:
                    self.leave()  # of several rooms all or none
            if not entered:
                return False
        self.held = True
        return True

    def wait(self, timeout_s: float, *, beside: bool = False) -> None:
        """Take the turn. Raises: WaitTimeout: it did not come."""
        deadline = time.monotonic() + timeout_s
        while not self.try_take(beside=beside):
            if time.monotonic() > deadline:
                raise self.timeout(timeout_s)
            time.sleep(_LOOK_S)

    def timeout(self, timeout_s: float) -> WaitTimeout:
        """The error of one who has waited for so long."""
        other = "an engine" if self._alone else "a trainer rank"
        return WaitTimeout(
            f"device {', '.join(self._names)} is shared by turns, and {other} did not leave it for {timeout_s:.0f} s; "
            "raise synchronizer.sync_timeout if its turn may take so long"
        )

    @property
    def is_wanted(self) -> bool:
        """Whether a rank waits at a door: who has nothing to do is to leave."""
        return not all([self._lock(f"door-{n}", fcntl.LOCK_SH) and self._unlock(f"door-{n}") for n in self._names])

    def leave(self) -> None:
        """End the turn; what was on the devices must have gone. Idempotent."""
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
