"""The storage interface: a few atomic methods for everything durable.

A storage is a folder tree named by a URL; paths are relative to it, with forward slashes. Every backend must ensure
that

- `put` and `put_new` are atomic: a reader sees all of the bytes or none, even after a crash or a power loss.
- when a call returns, the bytes survive the loss of the process and, on POSIX, of power.
- `put_new` has exactly one winner, regardless of the number of racing processes and machines.
- `list` uses no cache: everything put before the call, by any process, is listed.

This module also has what the backends share: the check of paths, bounded retries (`Patience`), and concurrent calls
(`in_order`, `in_daemon`). It knows nothing of runs, experiences or checkpoints.
"""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from pathlib import Path
from typing import TypeAlias, TypeVar

from rftdask.errors import DamagedError, UserError
from rftdask.storage.temporary import TemporaryFolder

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

log = logging.getLogger(__name__)

Data: TypeAlias = bytes | memoryview
"""Data to write: bytes, or memory that must not change before the call returns."""

TMP_PREFIX = ".tmp-"
"""Prefix of the names of unfinished writes, which `list` hides and paths must not have."""

_FORBIDDEN = frozenset("*?[]\\") | {chr(code) for code in range(32)}
"""Wildcards (fsspec expands them even in `rm`), the separator of Windows, control characters."""


def check_path(path: str) -> str:
    """Return `path` if it names one place below the root, and the same on every backend.

    Raises: ValueError: absolute, empty, with an empty, "." or ".." segment, a wildcard, a backslash, a control
        character, or a name that `list` would hide.
    """
    for segment in path.split("/"):
        if segment in ("", ".", ".."):
            raise ValueError(f"storage path {path!r} has the segment {segment!r}; give a relative path like 'a/b.json'")
        if segment.startswith(TMP_PREFIX):
            raise ValueError(
                f"storage path {path!r}: names starting with {TMP_PREFIX!r} are reserved for unfinished writes"
            )
    if forbidden := _FORBIDDEN.intersection(path):
        raise ValueError(
            f"storage path {path!r} has the characters {sorted(forbidden)}; use letters, digits, '-', '_', '.'"
        )
    return path


_MAX_DIGITS = 15
"""Digits of a number in a name: more than any run needs, and fewer than Python or a file system refuses."""


def numbers_in(names: Iterable[str], prefix: str = "", suffix: str = "") -> list[int]:
    """Return the numbers, ascending, of the names that consist of `prefix`, a number and `suffix`.

    Other names, and numbers with more than 15 digits, are ignored.
    """
    number = re.compile(re.escape(prefix) + rf"([0-9]{{1,{_MAX_DIGITS}}})" + re.escape(suffix))
    return sorted(int(match[1]) for match in map(number.fullmatch, names) if match)


def next_number(names: Iterable[str], prefix: str = "", suffix: str = "") -> int:
    """Return one more than the largest of `numbers_in`; 1 if there is none.

    Raises: DamagedError: a file has the largest possible number.
    """
    last = max(numbers_in(names, prefix, suffix), default=0)
    if len(str(last + 1)) > _MAX_DIGITS:
        raise DamagedError(f"{prefix}{last}{suffix} has the largest possible number, which no run reaches: remove it")
    return last + 1


class Storage(ABC):
    """A folder tree. Instances pickle (a backend re-opens itself from its URL) and are thread-safe.

    Example:
        store = open_storage("/scratch/runs/project/name")
        store.put("weights/3/model.safetensors", data)
        if not store.put_new("ledger/main/00000004.json", entry):
            raise FencedError(...)
    """

    #: True if `put_new` has one winner among machines. False: it may race, and setups with two writers are refused.
    has_create_only: bool = True

    url: str
    """Absolute URL or path of the root; `open_storage(storage.url)` opens the same tree."""

    def make_private(self) -> None:
        """Restrict the tree, including later files, to its owner; create the root if it is missing.

        Raises: UserError: this storage has no owners.
        """
        raise UserError(f"private: {self.url} is not a local folder; restrict access with the storage service itself")

    @abstractmethod
    def put(self, path: str, data: Data) -> None:
        """Write `data` at `path` atomically and durably, replacing an existing file. Missing folders are created.

        Raises: ValueError: as `check_path`; every method does.
            StorageError: after bounded retries. `path` then has its previous content, or all of `data` if only the
            confirmation was lost; never anything else.
        """

    @abstractmethod
    def put_new(self, path: str, data: bytes) -> bool:
        """Create `path` with `data` unless it exists: True if this call created it, False if it existed.

        If a reply is lost, the call reads the object back to find out whether it created it.
        Raises: StorageError: as `put`.
        """

    @abstractmethod
    def get(self, path: str) -> bytes:
        """Return all bytes at `path`. Raises: NotFoundError; StorageError after bounded retries."""

    def get_part(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes `start` to `stop` (at least one) of the file at `path`, or fewer if it ends before.

        Only for files that no longer change: parts are read by separate calls. Raises: as `get`.
        """
        return self.get(path)[start:stop]

    @abstractmethod
    def list(self, folder: str = "") -> list[str]:
        """Return the names (not paths) directly in `folder`, sorted; folders end with "/". [] if it does not exist.

        The temporary files of unfinished writes are not listed.
        """

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove one file, or a folder with everything below it. A missing path is not an error.

        On POSIX a folder disappears at once, on object stores file by file: first remove the file that makes it valid.
        Raises: StorageError: as `put`.
        """

    def exists(self, path: str) -> bool:
        """Return True if a file is at `path` now."""
        folder, _, name = check_path(path).rpartition("/")
        # By listing, because the `exists` of a client may use a cache.
        return name in self.list(folder)

    def local_file(self, path: str) -> Path | None:
        """Return the path of the file at `path`, existing or not, if the storage is a local folder; else None."""
        return None

    @abstractmethod
    def local_copy(self, path: str) -> AbstractContextManager[Path]:
        """Provide the file or folder at `path` as a local path, for libraries that read local files. Read-only.

        On local storage it is the file itself, elsewhere a temporary copy that lives as long as the context.
        Only for files that no longer change: a folder is copied file by file.
        Raises: NotFoundError.
        """


@contextmanager
def temporary_copy(path: str, files: Mapping[str, Callable[[Path], object]]) -> Iterator[Path]:
    """Implement `Storage.local_copy`. files: path at or below `path` -> function that writes the file; at least one."""
    with TemporaryFolder("copy") as folder:
        top = Path(folder) / path.rpartition("/")[2]
        for name, write in files.items():
            target = Path(f"{top}{name.removeprefix(path)}")
            target.parent.mkdir(parents=True, exist_ok=True)
            write(target)
        yield top


# ---- retries

MAX_TRIES = 17
"""Tries of one call; with the pauses between them 57 s."""
PATIENCE_S = 60.0
"""Seconds after which a call is not retried, even if it had few tries."""
_FIRST_PAUSE_S, _MAX_PAUSE_S, _JITTER_S = 0.1, 5.0, 0.1
_WARN_AFTER_TRIES = 6  # About 3 s; shorter faults are not logged.


class Patience:
    """Bounded retries of one call. Example: Patience("get s3://bucket/a", is_transient).call(read)"""

    def __init__(
        self,
        what: str,
        is_transient: Callable[[BaseException], bool],
        sleep: Callable[[float], None] = time.sleep,
        max_tries: int = MAX_TRIES,
    ) -> None:
        self._what = what
        self._is_transient = is_transient
        self._sleep = sleep
        self._max_tries = max_tries
        self.tries = 0

    def call(self, operation: Callable[[], _Result]) -> _Result:
        """Run the operation, repeatedly if it fails, and return its result. Raises: its last error."""
        began = time.monotonic()
        while True:
            self.tries += 1
            try:
                return operation()
            except Exception as error:  # every client has its own error classes; permanent errors are raised
                # Two bounds: for many quick refusals, and for few calls that each hang until their own timeout.
                is_over = self.tries == self._max_tries or time.monotonic() - began >= PATIENCE_S
                if is_over or not self._is_transient(error):
                    raise
                if self.tries == _WARN_AFTER_TRIES:
                    log.warning("%s fails (%s); retrying for a minute", self._what, error)
            # Jitter, so that many processes that met the same fault do not all retry at the same moment.
            pause_s = min(_FIRST_PAUSE_S * 2 ** (self.tries - 1), _MAX_PAUSE_S)
            self._sleep(pause_s + random.uniform(0, _JITTER_S))


# ---- concurrent calls


def in_daemon(call: Callable[[], _Result], name: str) -> Future[_Result]:
    """Run `call()` in a daemon thread, which keeps no process alive if it never returns. name: of the thread."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # `future.result` raises it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def in_order(call: Callable[[_Item], _Result], items: Sequence[_Item], num_threads: int) -> Iterator[_Result]:
    """Yield `call(item)` in the order of the items. At most `num_threads` results are pending or not yet consumed."""
    # A pool would only be overhead for one call, or for one thread.
    if min(num_threads, len(items)) <= 1:
        yield from map(call, items)
        return
    remaining = iter(items)
    with ThreadPoolExecutor(num_threads) as pool:
        pending = deque(pool.submit(call, item) for item in islice(remaining, num_threads))
        try:
            while pending:
                yield pending.popleft().result()
                # Submit one per result consumed, so that results do not pile up in memory.
                pending.extend(pool.submit(call, item) for item in islice(remaining, 1))
        finally:  # also if the caller stops early
            for future in pending:
                future.cancel()
