"""Storage: a folder tree named by a URL. Everything durable is read and written by its few atomic methods.

Contains the interface (base.py) and its backends: local disks, NFS and Lustre (local.py), the memory of one process
(memory.py), and all protocols of fsspec (fsspec_store.py). Also JSON with a checksum, and a doctor that tests a user's
storage. The folder knows nothing of runs, experiences or checkpoints.
"""

from __future__ import annotations

import re
from pathlib import Path

from rftdask.errors import UserError
from rftdask.storage.base import Storage
from rftdask.storage.local import LocalStorage
from rftdask.storage.memory import MemoryStorage

__all__ = ["Storage", "open_storage"]

_COLLAPSED = re.compile(r"[a-z][a-z0-9]+:/")


def open_storage(url: str | Path) -> Storage:
    """Open the storage at `url`: a path or file:// (local, NFS, Lustre), memory:// (this process), else any fsspec URL.

    Nothing is created or contacted before the first call. Credentials come from the environment, never from the URL.
    Raises: UserError: an unknown protocol, its package is not installed, or the URL names no bucket.
    """
    text = str(url)
    protocol, separator, rest = text.partition("://")
    if not separator:
        if _COLLAPSED.match(text):
            raise UserError(f"{text}: a URL needs two slashes after its colon (a Path drops one: pass a string)")
        return LocalStorage(text)
    if protocol in ("file", "local"):
        return LocalStorage(rest)
    if protocol == "memory":
        return MemoryStorage(text)
    from rftdask.storage.fsspec_store import FsspecStorage  # late: fsspec is slow to import, local runs need none

    return FsspecStorage(text)
