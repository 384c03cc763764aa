"""Folders of this machine that one process fills and several use, guarded by kernel locks on `<folder>.lock`.

Invariants: a lock ends with its process; a folder in use is never removed; an unused one is removed with its lock file.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rftdask.errors import DamagedError, UserError, WaitTimeout

_POLL_INTERVAL_S = 0.02
_MAX_REFUSALS = 250
"""Tries in a row, in 5 s, to fill a folder that others use although it is not whole."""


def private_folder(folder: Path, advice: str) -> Path:
    """Create a folder that only this user may enter. Raises: UserError, with `advice`: another user has made it."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    # On a shared disk anybody may have created a folder or a link of this name.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UserError(f"{folder} belongs to another user, or is a link; {advice}")
    return folder


class SharedFolder:
    """One folder, and this process's lock on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_file, self._lock = path.with_suffix(".lock"), -1

    def use(self, is_whole: Callable[[], bool], fill: Callable[[], object], timeout_s: float, late: str) -> None:
        """Use the folder until `close` or `remove`; if it is not whole, `fill` it or wait for a process that does.

        Raises:
            WaitTimeout: with the text `late`; another process takes longer than `timeout_s` seconds.
            DamagedError: the folder is no longer whole while others, maybe in this process, use it.
        """
        deadline, num_refusals = time.monotonic() + timeout_s, 0
        try:
            while not ((is_shared := self.lock(fcntl.LOCK_SH)) and is_whole()):
                # With the exclusive lock it checks again, since another process may have finished meanwhile. A refused
                # process holds no lock at all, so one of several competing processes gets the exclusive lock.
                if self.lock(fcntl.LOCK_EX):
                    if not is_whole():
                        fill()
                    continue
                # A process that fills refuses the shared lock as well. Users do not, and may keep theirs for hours.
                num_refusals = num_refusals + 1 if is_shared else 0
                if num_refusals > _MAX_REFUSALS:
                    raise DamagedError(f"{self.path}: files changed while others use them; they cannot be read again")
                if time.monotonic() > deadline:
                    raise WaitTimeout(f"waited {timeout_s:.0f} s: {late}")
                time.sleep(_POLL_INTERVAL_S)
        except BaseException:
            self.remove()
            raise

    def lock(self, kind: int) -> bool:
        """Try to take the lock as `kind` without waiting. False: this process has no lock at all."""
        while True:
            if self._lock < 0:
                self._lock = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            with suppress(FileNotFoundError):
                # A process that removes a folder also unlinks its lock file. Then this lock is useless: try again.
                if os.path.samestat(os.fstat(self._lock), self._lock_file.stat()):
                    return True
            self.close()

    def close(self) -> None:
        """Release the lock. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def remove(self) -> None:
        """Release the lock, and remove the folder if no other process uses it. Idempotent."""
        was_locked = self._lock >= 0
        self.close()  # a new descriptor below, since a fork may share this one with a process that uses the folder
        with suppress(FileNotFoundError):  # the folder above it was removed
            if was_locked and self.lock(fcntl.LOCK_EX):
                shutil.rmtree(self.path, ignore_errors=True)
                self._lock_file.unlink()
        self.close()


def remove_unused(root: Path, keep: Path | None = None) -> None:
    """Remove the folders in `root` that no process uses, except `keep`."""
    for lock_file in root.glob("*.lock"):
        if keep is None or lock_file.stem != keep.name:
            folder = SharedFolder(lock_file.with_suffix(""))
            folder.lock(fcntl.LOCK_EX)
            folder.remove()
