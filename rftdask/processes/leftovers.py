"""Semaphores of multiprocessing that killed processes have left in /dev/shm."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

_FOLDER = Path("/dev/shm")
_MIN_AGE_S = 3600.0
"""Younger semaphores are kept, because a process maps a new one a moment after it was created."""


def abandoned_semaphores(folder: Path = _FOLDER, min_age_s: float = _MIN_AGE_S) -> list[Path]:
    """Return the semaphores of this user that no process maps."""
    old = dict[int, Path]()
    for path in folder.glob("sem.mp-*"):
        with suppress(OSError):  # removed meanwhile
            status = path.stat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > min_age_s:
                old[status.st_ino] = path
    for maps in Path("/proc").glob("[0-9]*/maps") if old else ():
        with suppress(OSError):  # a process of another user, or one that has ended
            for line in maps.read_text().splitlines():
                # By number, because libc creates a semaphore under another name, which is the one shown here.
                if "/sem." in line:
                    old.pop(int(line.split()[4]), None)
    return list(old.values())


def remove_abandoned_semaphores(folder: Path = _FOLDER, min_age_s: float = _MIN_AGE_S) -> None:
    """Remove them. multiprocessing never removes those of a process that was killed together with its tracker."""
    for path in abandoned_semaphores(folder, min_age_s):
        path.unlink(missing_ok=True)
