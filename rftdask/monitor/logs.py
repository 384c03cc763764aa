"""Logs: each role's own file beside the run, and its warnings on the terminal."""

from __future__ import annotations

import logging
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

MAX_FILE_BYTES = 20_000_000
NUM_BACKUPS = 3


def setup_logging(role: str, level: str | int = "INFO", folder: str | Path | None = None) -> Path | None:
    """Send the package's log records of this process to `<folder>/<role>.log` and its warnings to stderr, too.

    Only the logger "rftdask" is touched; a second call replaces what the first did. A file that has grown to
    `MAX_FILE_BYTES` is set aside, `NUM_BACKUPS` times. Two processes must not share a role name, because the files
    are rotated by one process alone.

    Args: folder: local path of `<run>/log`; None, for a run that is not on a local file system, gives stderr only.
    Returns: path of the file, None without one.
    Raises: ValueError: unknown level.
    """
    logger = logging.getLogger("rftdask")
    for handler in [handler for handler in logger.handlers if isinstance(handler, _File | _Stderr)]:
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(level)
    terminal = _Stderr(logging.WARNING)
    terminal.setFormatter(logging.Formatter(f"%(levelname)s {role}: %(message)s"))
    logger.addHandler(terminal)
    if folder is None:
        return None
    path = Path(folder) / f"{role}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _File(path, maxBytes=MAX_FILE_BYTES, backupCount=NUM_BACKUPS, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s [%(process)d]: %(message)s"))
    logger.addHandler(file)
    return path


class _File(RotatingFileHandler):
    pass


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what sys.stderr is now: the progress panel replaces it, to print lines above itself."""

    def __init__(self, level: int) -> None:
        logging.Handler.__init__(self, level)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr
