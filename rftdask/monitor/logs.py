"""Logs: a file per role in the run folder, and warnings on the terminal."""

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
"""Size of the end of a file that is copied to remote storage whenever the file has grown."""


def setup_logging(role: str, level: str | int = "INFO", folder: str | Path | None = None) -> Path | None:
    """Write the package's log records of this process to `<folder>/<role>.log`, and warnings to stderr as well.

    It only changes the logger "rftdask"; a second call replaces the handlers of the first. Files rotate at
    `MAX_FILE_BYTES`, with `NUM_BACKUPS` backups. Two processes must not share a role name, because a file is rotated
    by one process only.

    Args: folder: local path, see `LogFolder`. None: stderr only. Returns: path of the file. Raises: ValueError: unknown
    level.
    """
    logger = logging.getLogger("rftdask")
    # Only our handlers: pytest, notebooks and users add theirs to the same logger.
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
    """Folder for the logs of this machine: `<run>/log`, or a temporary folder that is copied to a remote run.

    A remote run has a folder per start, log/<UTC time>-<pid>, because remote files cannot be appended to. The next call
    retries a failed copy, because logging must not end a run. The temporary folder is kept: messages name its files.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._is_remote = "://" in storage.url
        self._sizes: dict[str, int] = {}
        self._copied = time.monotonic()
        self.path = Path(tempfile.mkdtemp(prefix="rftdask-log-") if self._is_remote else f"{storage.url}/log")

    def poll(self) -> None:
        """Copy new records if `COPY_EVERY_S` has passed since the last copy."""
        if self._is_remote and time.monotonic() - self._copied > COPY_EVERY_S:
            self.close()

    def close(self) -> None:
        """Copy new records. Can be called repeatedly."""
        if not self._is_remote:
            return
        self._copied = time.monotonic()
        for file in sorted(self.path.glob("*.log*")):
            data = file.read_bytes()
            if len(data) == self._sizes.get(file.name):
                continue
            try:
                # Only the end of the file, since object stores cannot append and each copy rewrites the object.
                self._storage.put(f"log/{_START}/{file.name}", data[-MAX_COPY_BYTES:])
            except StorageError as error:
                logging.getLogger(__name__).warning("%s is not copied to the run yet: %s", file, error)
                return
            self._sizes[file.name] = len(data)


class _File(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore OSError, for example on a full disk, which must not fill the terminal with tracebacks."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):  # as above
            super().close()


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stderr, which the progress panel replaces to print lines above itself."""

    def __init__(self, level: int) -> None:
        logging.Handler.__init__(self, level)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr
