"""Storage with a seam for faults: what crash tests put in the place of the real one.

It does not know what a fault is; the hook raises, sleeps, kills the process, or only counts.
Invariant: with a hook that returns, it behaves exactly as the storage inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rftdask.storage.base import Storage

Stage = Literal["before", "after"]
Hook = Callable[[str, str, Stage], None]
"""Called with the verb, the path and the stage. Raising at "after" is the reply lost after the work was done."""


class FaultyStorage(Storage):
    """Every verb of `inner`, with `hook` before and after. Pickles if the hook does.

    Example:
        def die(verb: str, path: str, stage: Stage) -> None:
            if verb == "put_new" and path.startswith("ledger/") and stage == "after":
                os.kill(os.getpid(), signal.SIGKILL)

        store = FaultyStorage(open_storage(url), die)
    """

    def __init__(self, inner: Storage, hook: Hook) -> None:
        self.inner = inner
        self.hook = hook
        self.url = inner.url  # opens the tree without the faults
        self.has_create_only = inner.has_create_only

    def put(self, path: str, data: bytes) -> None:
        self.hook("put", path, "before")
        self.inner.put(path, data)
        self.hook("put", path, "after")

    def put_new(self, path: str, data: bytes) -> bool:
        self.hook("put_new", path, "before")
        created = self.inner.put_new(path, data)
        self.hook("put_new", path, "after")
        return created

    def get(self, path: str) -> bytes:
        self.hook("get", path, "before")
        data = self.inner.get(path)
        self.hook("get", path, "after")
        return data

    def list(self, folder: str = "") -> list[str]:
        self.hook("list", folder, "before")
        names = self.inner.list(folder)
        self.hook("list", folder, "after")
        return names

    def remove(self, path: str) -> None:
        self.hook("remove", path, "before")
        self.inner.remove(path)
        self.hook("remove", path, "after")

    def exists(self, path: str) -> bool:
        self.hook("exists", path, "before")
        found = self.inner.exists(path)
        self.hook("exists", path, "after")
        return found

    @contextmanager
    def local_copy(self, path: str) -> Iterator[Path]:
        self.hook("local_copy", path, "before")
        with self.inner.local_copy(path) as local:
            yield local
        self.hook("local_copy", path, "after")
