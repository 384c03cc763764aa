"""From a URL to the storage behind it. Knows the names of backends, nothing of how they work.

Invariant: local and memory storage never import fsspec, so that the common case starts fast and needs no extra.
"""

from __future__ import annotations

import re
from pathlib import Path

from rftdask.errors import UserError
from rftdask.storage.base import Storage
from rftdask.storage.local import LocalStorage
from rftdask.storage.memory import MemoryStorage

_COLLAPSED = re.compile(r"[a-z][a-z0-9]+:/")


def open_storage(url: str | Path) -> Storage:
    """The storage at `url`: a path or file:// (local, NFS, Lustre), memory:// (this process), else any fsspec URL.

    Nothing is created or contacted before the first call. Credentials come from the environment, never the URL.
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
    from rftdask.storage.fsspec_store import FsspecStorage  # fsspec is slow to import and only needed here

    return FsspecStorage(text)
