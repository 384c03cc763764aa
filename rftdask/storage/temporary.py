"""Temporary folders of one process: removed with it, or by the next process of this user if it was killed.

A process holds a kernel lock on each of its folders, so a folder without a lock has no living owner. Names contain the
host, since locks of other machines are not visible on some network file systems.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import socket
import tempfile
import threading
import zlib
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from rftdask.errors import StorageError

_MAX_ATTEMPTS = 100
"""Folders that other processes may remove before they are locked, each by a rare race."""


class TemporaryFolder:
    """A new folder that only this user may enter.

    Example: with TemporaryFolder("export") as folder: Path(folder, "file").touch()
    """

    def __init__(self, purpose: str, parent: str | Path | None = None) -> None:
        """purpose: a part of its name. parent: None: the system's folder for temporary files."""
        parent = str(parent or tempfile.gettempdir())
        remove_abandoned(parent)
        self.name, self._lock, self._process = "", -1, os.getpid()
        self._guard = threading.Lock()
        # A process that removes abandoned folders may come before the lock.
        for _ in range(_MAX_ATTEMPTS):
            self.name = tempfile.mkdtemp(prefix=f"{_prefix()}{purpose}-", dir=parent)
            with suppress(OSError):  # it was removed already, or the file system has no locks
                self._lock = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(self._lock, fcntl.LOCK_EX)  # waits while another process removes the folder
            if os.path.exists(self.name):
                atexit.register(self.cleanup)
                return
            self.cleanup()
        raise StorageError(f"{_MAX_ATTEMPTS} new folders in {parent} were removed at once; set TMPDIR to another one")

    def __enter__(self) -> str:
        return self.name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Remove the folder. Can be called repeatedly; does nothing in a fork."""
        if os.getpid() != self._process:
            return
        with self._guard:  # two threads may close an engine at once
            lock, self._lock = self._lock, -1
        if lock >= 0:
            atexit.unregister(self.cleanup)
            shutil.rmtree(self.name, ignore_errors=True)
            os.close(lock)


def remove_abandoned(parent: str, *, only_count: bool = False) -> int:
    """Remove the folders of dead processes of this user on this machine. Returns: their number."""
    number = 0
    for folder in Path(parent).glob(f"{_prefix()}*"):
        with suppress(OSError):  # locked by a living process, removed by another one, or not a folder of this user
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(opened).st_uid == os.getuid():
                    number += 1
                    if not only_count:
                        shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(opened)
    return number


def _prefix() -> str:
    # Short, since a socket address has few bytes.
    return f"rftdask-{zlib.crc32(socket.gethostname().encode()) % 2**16:04x}-"
