"""Logs: each role's own file beside the run, and its warnings on the terminal."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

from rftdask.errors import StorageError
from rftdask.storage.base import Storage
from rftdask.storage.safe_text import SafeFormatter

MAX_FILE_BYTES = 20_000_000
NUM_BACKUPS = 3
COPY_EVERY_S = 20.0
_START = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}"
MAX_COPY_BYTES = 4_000_000
"""Bytes of the end of a file that go to remote storage each time it has grown."""


def setup_logging(role: str, level: str | int = "INFO", folder: str | Path | None = None) -> Path | None:
    """Send the package's log records of this process to `<folder>/<role>.log` and its warnings to stderr, too.

    Only the logger "rftdask" is touched; a second call replaces what the first did. A file that has grown to
    `MAX_FILE_BYTES` is set aside, `NUM_BACKUPS` times. Two processes must not share a role name, because the files
    are rotated by one process alone.

    Args: folder: local path, see `LogFolder`; None gives stderr only.
    Returns: path of the file, None without one.
    Raises: ValueError: unknown level.
    """
    logger = logging.getLogger("rftdask")
    # Our own alone: pytest, notebooks and users hang handlers of theirs on the same logger.
    for handler in [handler for handler in logger.handlers if isinstance(handler, _File | _Stderr)]:
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(level)
    terminal = _Stderr(logging.WARNING)
    terminal.setFormatter(SafeFormatter(f"%(levelname)s {role}: %(message)s"))
    logger.addHandler(terminal)
    if folder is None:
        return None
    path = Path(folder) / f"{role}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _File(path, maxBytes=MAX_FILE_BYTES, backupCount=NUM_BACKUPS, encoding="utf-8")
    file.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(name)s [%(process)d]: %(message)s"))
    logger.addHandler(file)
    return path


class LogFolder:
    """Where the processes of this machine log: `<run>/log` itself, or a temporary folder whose files are copied there.

    Example:
        folder = LogFolder(storage)
        setup_logging("driver", folder=folder.path); ...; folder.poll(); ...; folder.close()

    There each start has a folder of its own, log/<UTC time>-<pid>, because nobody can append to a file there.

    A copy that fails is tried again by the next: what a run logs must not end it. The temporary folder stays, since
    messages name files in it.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._is_remote = "://" in storage.url
        self._sizes: dict[str, int] = {}
        self._copied = time.monotonic()
        self.path = Path(tempfile.mkdtemp(prefix="rftdask-log-") if self._is_remote else f"{storage.url}/log")

    def poll(self) -> None:
        """Copy what is new, now and then."""
        if self._is_remote and time.monotonic() - self._copied > COPY_EVERY_S:
            self.close()

    def close(self) -> None:
        """Copy what is new. Can be called again."""
        if not self._is_remote:
            return
        self._copied = time.monotonic()
        for file in sorted(self.path.glob("*.log*")):
            data = file.read_bytes()
            if len(data) == self._sizes.get(file.name):
                continue
            try:
                # The end of it: object storage knows no append, so the file is written again as a whole.
                self._storage.put(f"log/{_START}/{file.name}", data[-MAX_COPY_BYTES:])
            except StorageError as error:
                logging.getLogger(__name__).warning("%s is not copied to the run yet: %s", file, error)
                return
            self._sizes[file.name] = len(data)


class _File(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing where a disk is full: what a run logs must not end it, nor fill the terminal with tracebacks."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):  # for the same reason
            super().close()


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what sys.stderr is now: the progress panel replaces it, to print lines above itself."""

    def __init__(self, level: int) -> None:
        logging.Handler.__init__(self, level)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """What sys.stderr is at the moment of the record."""
        return sys.stderr
