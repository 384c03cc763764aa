"""Storage: the few atomic verbs through which everything durable goes.

A storage is a folder tree named by a URL; paths are relative to it, with forward slashes. What a backend must keep:

- `put` and `put_new` are atomic: a reader sees all of the bytes or none, also after a crash or a power loss.
- when a call returns, the bytes survive the loss of the process and, on POSIX, of the machine's power.
- `put_new` has exactly one winner, whatever the number of processes and machines that race.
- `list` never trusts a cache: what was put before the call, by anyone, is in the answer.

What all backends share is here too: the check of paths, the bounded retries of a verb (`Patience`), and calls that are
under way at once (`in_order`). It knows nothing of runs, experiences or checkpoints.
"""

from __future__ import annotations

import logging
import random
import re
import tempfile
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from pathlib import Path
from typing import TypeAlias, TypeVar

from rftdask.errors import DamagedError, UserError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

log = logging.getLogger(__name__)

Data: TypeAlias = bytes | memoryview
"""What can be written: bytes, or memory that nobody changes before the call has returned."""

TMP_PREFIX = ".tmp-"
"""First characters of the name of a write still under way: hidden by `list`, refused in paths."""

_FORBIDDEN = frozenset("*?[]\\") | {chr(code) for code in range(32)}
"""Wildcards (fsspec expands them even in `rm`), the separator of another system, control characters."""


def check_path(path: str) -> str:
    """`path` itself, if it names one place below the root and means the same on every backend.

    Raises: ValueError: absolute, empty, with an empty, "." or ".." segment, a wildcard, a backslash, a control
        character, or a name that `list` would hide.
    """
    for segment in path.split("/"):
        if segment in ("", ".", ".."):
            raise ValueError(f"storage path {path!r} has the segment {segment!r}; give a relative path like 'a/b.json'")
        if segment.startswith(TMP_PREFIX):
            raise ValueError(
                f"storage path {path!r}: names starting with {TMP_PREFIX!r} are kept for unfinished writes"
            )
    if found := _FORBIDDEN.intersection(path):
        raise ValueError(
            f"storage path {path!r} has the characters {sorted(found)}; use letters, digits, '-', '_', '.'"
        )
    return path


_MOST_DIGITS = 15
"""Of a number in a name: far beyond what a run counts, and short of what Python or a file system refuses."""


def numbers_in(names: Iterable[str], prefix: str = "", suffix: str = "") -> list[int]:
    """Return the numbers, ascending, of the names that are a number between `prefix` and `suffix`.

    Other names, and numbers that no run reaches, are somebody else's.
    """
    number = re.compile(re.escape(prefix) + rf"([0-9]{{1,{_MOST_DIGITS}}})" + re.escape(suffix))
    return sorted(int(match[1]) for match in map(number.fullmatch, names) if match)


def next_number(names: Iterable[str], prefix: str = "", suffix: str = "") -> int:
    """One more than the largest of `numbers_in`; 1 where there is none.

    Raises: DamagedError: somebody's file has the largest number there can be, so nothing could follow it.
    """
    last = max(numbers_in(names, prefix, suffix), default=0)
    if len(str(last + 1)) > _MOST_DIGITS:
        raise DamagedError(
            f"{prefix}{last}{suffix} has a number that no run reaches, and none comes after it: remove it"
        )
    return last + 1


class Storage(ABC):
    """One folder tree. Instances pickle (a backend re-opens itself from its URL), and are safe to use from threads.

    Example:
        store = open_storage("/scratch/runs/project/name")
        store.put("weights/3/model.safetensors", data)
        if not store.put_new("ledger/main/00000004.json", entry):
            raise FencedError(...)
    """

    #: True when `put_new` has one winner among machines; False admits a race, and two-writer setups are refused.
    has_create_only: bool = True

    url: str
    """Absolute URL or path of the root; `open_storage(storage.url)` opens the same tree."""

    def make_private(self) -> None:
        """Let only the owner read the tree, what is written later included; the root is made if it is missing.

        Raises: UserError: this storage knows no owners.
        """
        raise UserError(f"private: {self.url} is no folder; who may read it is said by those who keep it")

    @abstractmethod
    def put(self, path: str, data: Data) -> None:
        """Write `data` at `path`, replacing what was there, atomically and durably. Missing folders are made.

        Raises: ValueError: as `check_path`; every method does.
            StorageError: after bounded retries. `path` then holds what it held before, or all of `data` where only
            the confirmation was lost; never anything else.
        """

    @abstractmethod
    def put_new(self, path: str, data: bytes) -> bool:
        """Create `path` with `data` only if nothing is there: True if this call created it, False if it existed.

        A lost reply (the object is ours although the call seemed to fail) is resolved by reading back.
        Raises: StorageError: as `put`.
        """

    @abstractmethod
    def get(self, path: str) -> bytes:
        """All bytes at `path`. Raises: NotFoundError; StorageError after bounded retries."""

    def get_part(self, path: str, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop`, at least one, of what is at `path`, fewer where it ends; others are spared.

        Only for what no longer changes: parts are read by calls of their own. Raises: as `get`.
        """
        return self.get(path)[start:stop]

    @abstractmethod
    def list(self, folder: str = "") -> list[str]:
        """Names (not paths) directly in `folder`, sorted; folders end with "/". A missing folder is empty.

        Names of writes still under way (temporary files) are never shown.
        """

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove one file, or a folder with all below it. Removing what is not there is no error.

        On POSIX a folder goes at once; on object stores file by file, so first remove the file that makes it valid.
        Raises: StorageError: as `put`.
        """

    def exists(self, path: str) -> bool:
        """True if a file is at `path` now."""
        folder, _, name = check_path(path).rpartition("/")
        # By the listing, which trusts no cache; the `exists` of clients may.
        return name in self.list(folder)

    def local_file(self, path: str) -> Path | None:
        """Where the file at `path` is, or would be, if the storage is a folder that this machine has; else None."""
        return None

    @abstractmethod
    def local_copy(self, path: str) -> AbstractContextManager[Path]:
        """The file or folder at `path` as a local path, for libraries that read local files; do not write to it.

        On local storage it is the file itself; elsewhere a temporary copy that lives as long as the context.
        Only for what no longer changes: a folder is copied file by file.
        Raises: NotFoundError.
        """


@contextmanager
def temporary_copy(path: str, files: Mapping[str, Callable[[Path], object]]) -> Iterator[Path]:
    """`Storage.local_copy` of the files at or below `path`, each of which a function writes; one at least.

    It lives as long as the context.
    """
    with tempfile.TemporaryDirectory(prefix="rftdask-") as folder:
        top = Path(folder) / path.rpartition("/")[2]
        for name, write in files.items():
            target = Path(f"{top}{name.removeprefix(path)}")
            target.parent.mkdir(parents=True, exist_ok=True)
            write(target)
        yield top


# ---- how a verb is tried again

MAX_TRIES = 17
"""With the pauses between them, 57 s."""
PATIENCE_S = 60.0
"""After which nothing is tried again, however few the tries were that took so long."""
_FIRST_PAUSE_S, _MAX_PAUSE_S, _JITTER_S = 0.1, 5.0, 0.1
_TOLD_AFTER_TRIES = 6  # Some 3 s: what takes no longer is not worth a word.


class Patience:
    """For one call of a verb.

    Example: Patience("get s3://bucket/a", is_transient).call(read)
    """

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
        """Run the operation, which may be repeated, and return its result. Raises: its last error."""
        began = time.monotonic()
        while True:
            self.tries += 1
            try:
                return operation()
            except Exception as error:  # every client has its own tree; what cannot pass rises again
                # Both bounds: many quick refusals, or few calls that each hang to a timeout of their own.
                is_over = self.tries == self._max_tries or time.monotonic() - began >= PATIENCE_S
                if is_over or not self._is_transient(error):
                    raise
                if self.tries == _TOLD_AFTER_TRIES:
                    log.warning("%s fails (%s), and is tried again for a minute", self._what, error)
            # With some chance in it: many that met the same fault do not all come back at the same moment.
            pause_s = min(_FIRST_PAUSE_S * 2 ** (self.tries - 1), _MAX_PAUSE_S)
            self._sleep(pause_s + random.uniform(0, _JITTER_S))


# ---- several calls at once


def in_order(call: Callable[[_Item], _Result], items: Sequence[_Item], num_threads: int) -> Iterator[_Result]:
    """`call` of each item, in their order. At most `num_threads` results are under way or wait to be taken."""
    # One call, or one at a time: a pool would be nothing but overhead.
    if min(num_threads, len(items)) <= 1:
        yield from map(call, items)
        return
    left = iter(items)
    with ThreadPoolExecutor(num_threads) as pool:
        ahead = deque(pool.submit(call, item) for item in islice(left, num_threads))
        try:
            while ahead:
                yield ahead.popleft().result()
                # One in for each one taken: results do not pile up in memory before a slow caller.
                ahead.extend(pool.submit(call, item) for item in islice(left, 1))
        finally:  # also of a caller that takes no more
            for future in ahead:
                future.cancel()
