"""Storage in the memory of one process, for tests and notebooks.

Each process has its own tree under the same URL, and a pickle contains only the URL.
Invariant: one lock guards every tree, so each method is atomic, and all handles of one URL see the same files.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from rftdask.errors import NotFoundError
from rftdask.storage.base import Data, Storage, check_path, temporary_copy

_LOCK = threading.Lock()
_TREES: dict[str, dict[str, bytes]] = {}


class MemoryStorage(Storage):
    """`MemoryStorage("memory://name")`; the tree lives until the process ends."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") if url != "memory://" else url
        with _LOCK:
            self._files = _TREES.setdefault(self.url, {})

    def __reduce__(self) -> tuple[type[MemoryStorage], tuple[str]]:
        return MemoryStorage, (self.url,)

    def put(self, path: str, data: Data) -> None:
        """Store a copy of the bytes, so that a later change of the buffer does not change the file."""
        check_path(path)
        with _LOCK:
            self._files[path] = bytes(data)

    def put_new(self, path: str, data: bytes) -> bool:
        """Check and write under one lock, so exactly one concurrent caller succeeds."""
        check_path(path)
        with _LOCK:
            if path in self._files:
                return False
            self._files[path] = bytes(data)
            return True

    def get(self, path: str) -> bytes:
        check_path(path)
        with _LOCK:
            if path not in self._files:
                raise NotFoundError(f"{self.url}/{path} does not exist")
            return self._files[path]

    def list(self, folder: str = "") -> list[str]:
        """See Storage. Folders exist only as prefixes of file paths."""
        start = check_path(folder) + "/" if folder else ""
        with _LOCK:
            below = [path.removeprefix(start) for path in self._files if path.startswith(start)]
        return sorted({name + slash for name, slash, _ in (path.partition("/") for path in below)})

    def remove(self, path: str) -> None:
        with _LOCK:
            for name in self._below(path):
                del self._files[name]

    def local_copy(self, path: str) -> AbstractContextManager[Path]:
        """Write the files to a temporary folder, which is removed with the context."""
        with _LOCK:
            files = {name: self._files[name] for name in self._below(path)}
        if not files:
            raise NotFoundError(f"{self.url}/{path} does not exist")
        return temporary_copy(path, {name: partial(Path.write_bytes, data=data) for name, data in files.items()})

    def _below(self, path: str) -> tuple[str, ...]:
        """Return the file at `path`, or the files below it. Call with the lock held."""
        check_path(path)
        return tuple(name for name in self._files if name == path or name.startswith(path + "/"))
