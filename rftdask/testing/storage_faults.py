"""Fault injection: wrappers of a storage, and of the system calls below local storage, that call a hook.

The hook raises, sleeps, kills the process or counts. Invariant: with a hook that returns, a wrapper behaves exactly
like the wrapped object.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rftdask.storage.base import TMP_PREFIX, Data, Storage
from rftdask.storage.local import Posix

Stage = Literal["before", "after"]
Hook = Callable[[str, str, Stage], None]
"""Called with (verb, path, stage). Raising at "after" simulates a lost reply."""
Step = Callable[[str, str], None]
"""Called with (system call, path) before the call."""

_TMP_NAME = re.compile(re.escape(TMP_PREFIX) + r"[^/]*")


class PlaceCounter:
    """Records the places that a run passes, and calls `act` at one of them. Safe to use from threads.

    A place is an operation, its path and its count, such as "before get ledger/main/00000001.json (2)". Names are used
    instead of running numbers because threads that read ahead pass places in any order. Names omit `root` and the
    random part of temporary files.

    Example:
        counted = PlaceCounter(folder)
        run(FaultyStorage(LocalStorage(folder), counted.at_verb))
        dying = PlaceCounter(other, counted.places[17], kill_myself)
    """

    def __init__(self, root: str | Path = "", place: str = "", act: Callable[[], None] = lambda: None) -> None:
        """root: prefix to strip from paths of system calls. place: place at which `act` is called once; "": nowhere."""
        self.places: list[str] = []
        self.has_acted = False
        self._root = str(root)
        self._place = place
        self._act = act
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def at_verb(self, verb: str, path: str, stage: Stage) -> None:
        """Hook for FaultyStorage."""
        self._pass(f"{stage} {verb} {path}")

    def at_call(self, call: str, path: str) -> None:
        """Step for SteppedPosix."""
        inside = path.removeprefix(self._root).strip("/") if self._root else path
        self._pass(f"before {call} {_TMP_NAME.sub(TMP_PREFIX + '*', inside)}")

    def _pass(self, operation: str) -> None:
        with self._lock:
            self._counts[operation] += 1
            place = f"{operation} ({self._counts[operation]})"
            self.places.append(place)
            # Decided under the lock, so that only one of two threads at the same operation acts.
            acts_here = place == self._place
            self.has_acted |= acts_here
        if acts_here:
            self._act()  # without the lock, since `act` may pass other places


class FaultyStorage(Storage):
    """Storage that calls `hook` before and after every verb of `inner`. Pickles if the hook does.

    Example:
        def die(verb: str, path: str, stage: Stage) -> None:
            if verb == "put_new" and path.startswith("ledger/") and stage == "after":
                os.kill(os.getpid(), signal.SIGKILL)

        store = FaultyStorage(open_storage(url), die)
    """

    def __init__(self, inner: Storage, hook: Hook) -> None:
        self.inner = inner
        self.hook = hook
        self.url = inner.url  # opens the folder without the faults
        self.has_create_only = inner.has_create_only

    @staticmethod
    def _faulty(name: str, verb: str = "") -> Callable[..., Any]:
        """Return the method `name`, which calls the hook with `verb` (default: the name)."""

        def call(self: FaultyStorage, path: str = "", *args: Any) -> Any:
            self.hook(verb or name, path, "before")
            result = getattr(self.inner, name)(path, *args)
            self.hook(verb or name, path, "after")  # skipped if the verb raised, since nothing was done
            return result

        return call

    put, put_new, remove = _faulty("put"), _faulty("put_new"), _faulty("remove")
    get, get_part = _faulty("get"), _faulty("get_part", "get")
    list, exists = _faulty("list"), _faulty("exists")

    def local_file(self, path: str) -> Path | None:
        return self.inner.local_file(path)

    @contextmanager
    def local_copy(self, path: str) -> Iterator[Path]:
        self.hook("local_copy", path, "before")
        with self.inner.local_copy(path) as local:
            yield local
        self.hook("local_copy", path, "after")


class SteppedPosix(Posix):
    """Real system calls, with `step` before each one that changes the disk and in the middle of every write.

    Example: store = LocalStorage(folder, SteppedPosix(lambda call, path: print(call, path)))
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self._paths: dict[int, str] = {}

    def create(self, path: str) -> int:
        """Create a file after a step. The path is kept for calls that get only the descriptor."""
        self.step("create", path)
        descriptor = super().create(path)
        self._paths[descriptor] = path
        return descriptor

    def write(self, descriptor: int, data: Data) -> None:
        """Write in two halves with a step before each, so that a kill in between leaves a torn file."""
        half = len(data) // 2
        self.step("write", self._paths[descriptor])
        super().write(descriptor, data[:half])
        self.step("write the rest", self._paths[descriptor])
        super().write(descriptor, data[half:])

    def sync(self, descriptor: int) -> None:
        self.step("sync", self._paths[descriptor])
        super().sync(descriptor)

    @staticmethod
    def _stepped(call: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(self: SteppedPosix, *paths: str) -> Any:
            self.step(call.__name__.replace("_", " "), paths[-1])  # of two paths, the one that is created
            return call(self, *paths)

        return stepped

    rename, link, unlink = _stepped(Posix.rename), _stepped(Posix.link), _stepped(Posix.unlink)
    make_folder, remove_tree = _stepped(Posix.make_folder), _stepped(Posix.remove_tree)
    sync_folder = _stepped(Posix.sync_folder)
