"""Node cache: verified files of a version, shared by all engines of one machine.

One process per machine reads the files from storage, each byte once, and hashes them; the others wait for it. Files of
a local storage stay in place; others are copied below TMPDIR. Each process that serves a version holds a kernel lock
(flock) on it, which ends with the process: the lease. A delta is rebuilt below TMPDIR from the newest base that is
cached here, else from the complete version. Versions in the trainer's memory lie below /dev/shm, written by the
publishing rank (transports/memory.py) or, on other machines, by a transport.

Invariants: every file handed out was verified on this machine since boot and not written since; a locked version is
never removed; an unlocked version is removed by its last user or by the next process that looks.

It knows neither engines nor which versions are needed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from rftdask.errors import DamagedError, NotFoundError, StorageError
from rftdask.storage import Storage
from rftdask.storage.base import Data, in_order
from rftdask.storage.shared_folder import SharedFolder, private_folder, remove_unused
from rftdask.synchronizer import manifest as manifests
from rftdask.synchronizer.manifest import BLOCK_BYTES, FileEntry, block_numbers, block_span, check_block
from rftdask.synchronizer.published import Published, bases_of

if TYPE_CHECKING:
    from rftdask.synchronizer.delta import DeltaFile

_NUM_READS = 4
"""Blocks read and hashed in parallel."""
_VERIFIED = "VERIFIED.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SHARED_MEMORY = "RFTDASK_SHARED_MEMORY"
"""Environment variable for an in-memory folder other than /dev/shm, for containers with a small /dev/shm."""

Transport: TypeAlias = Callable[[Published, str, FileEntry], Callable[[int], Data]]
"""(version, file, entry) -> function from block number to verified block, for a file in another machine's memory.

Blocks are requested in order, from several threads. Raises: NotFoundError: no process holds the file; WaitTimeout."""


class NodeCache:
    """Files of one version on this machine, locked until `close`.

    Example:
        copy = NodeCache(storage, published, timeout_s=1800)
        engine.load_weights(published.version, copy.files)
        copy.close()                # when another version is served
    """

    def __init__(
        self, storage: Storage, published: Published, timeout_s: float, transport: Transport | None = None
    ) -> None:
        """
        Args:
            timeout_s: seconds to wait for another process that reads the version.
            transport: fetches in-memory files that are not on this machine. None: they cannot be fetched.
        Raises: NotFoundError, DamagedError: the version is missing, or does not match its manifest. WaitTimeout:
            another process did not finish reading in time. StorageError: no space on this machine.
        """
        self._open(storage, published)
        remove_unused(self._folder.parent, keep=self._folder)

        def fill() -> None:
            try:
                self._fill(storage, published, timeout_s, transport)
            except OSError as error:
                raise StorageError(
                    f"cannot store weights below {self._folder.parent.parent}: {error.strerror or error}; free some "
                    f"space, or set TMPDIR or {SHARED_MEMORY} to another folder of this machine"
                ) from error

        late = f"another process did not finish reading {published.folder}"
        self._shared.use(self._is_whole, fill, timeout_s, late)

    @classmethod
    def find(cls, storage: Storage, published: Published) -> NodeCache | None:
        """Files that are already verified on this machine, or None. Does not wait."""
        copy = cls.__new__(cls)
        copy._open(storage, published)
        if copy._shared.lock(fcntl.LOCK_SH) and copy._is_whole():
            return copy
        copy.close()
        return None

    def _open(self, storage: Storage, published: Published) -> None:
        self._folder = _root(published.held is not None) / copy_name(storage, published)
        local = {name: storage.local_file(f"{published.folder}/{name}") for name, _ in published.files}
        is_copied = published.delta is not None or published.held is not None
        self._paths = {name: self._folder / name if is_copied or path is None else path for name, path in local.items()}
        self._shared = SharedFolder(self._folder)

    @property
    def files(self) -> list[Path]:
        """Paths in the order of the version's files."""
        return list(self._paths.values())

    def close(self) -> None:
        """Release the lock, and remove the files if no other process uses them. Idempotent."""
        self._shared.remove()

    def _is_whole(self) -> bool:
        # A write to a verified file changes one of the recorded numbers.
        with suppress(OSError, ValueError, NotFoundError):
            return bool(json.loads((self._folder / _VERIFIED).read_bytes()) == self._state())
        return False

    def _state(self) -> list[object]:
        # The boot id as well: after a power loss a file may have its name and size without its bytes.
        boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
        return [boot, *map(_identity, self._paths.values())]

    def _fill(self, storage: Storage, published: Published, timeout_s: float, transport: Transport | None) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700)
        # Recorded before reading, so that a file replaced meanwhile is noticed.
        before = {path: _identity(path) for path in self._paths.values() if not path.is_relative_to(self._folder)}
        with ExitStack() as held:
            blocks: _Blocks = [
                partial(manifests.read_block, storage, f"{published.folder}/{name}", entry)
                for name, entry in published.files
            ]
            if published.held is not None:
                blocks = _in_memory_blocks(storage, published, self._paths, transport, held)
            elif published.delta is not None:
                blocks = _rebuilt_blocks(storage, published, timeout_s, held)
            for (name, entry), block in zip(published.files, blocks, strict=True):
                target, file = self._paths[name], -1
                if not target.is_relative_to(self._folder):  # a file of a local storage, which stays in place
                    _for_each(partial(manifests.verify_block, storage, f"{published.folder}/{name}", entry), entry)
                    continue
                if not target.exists():  # otherwise a link to a file on this machine
                    target.parent.mkdir(parents=True, exist_ok=True)
                    file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

                def take(
                    number: int, block: Callable[[int], Data] = block, file: int = file, target: Path = target
                ) -> None:
                    data, place = memoryview(block(number)), number * BLOCK_BYTES
                    while file >= 0 and data:
                        written = os.pwrite(file, data, place)
                        data, place = data[written:], place + written
                    if published.held is not None:  # from now on other machines may fetch this block here
                        _mark(target, number).touch()

                try:
                    _for_each(take, entry)
                finally:
                    if file >= 0:
                        os.close(file)
        if any(_identity(path) != identity for path, identity in before.items()):
            raise DamagedError(f"{published.folder} changed while it was read")
        # Last: without this file nothing in the folder is trusted.
        (self._folder / _VERIFIED).write_text(json.dumps(self._state()))


def _for_each(work: Callable[[int], object], entry: FileEntry) -> None:
    """Run `work` for the number of each block of a file, several in parallel."""
    for _ in in_order(work, block_numbers(entry), _NUM_READS):
        pass


_Blocks: TypeAlias = list[Callable[[int], Data]]
"""For each file a function that reads a block by its number and verifies it."""


def _in_memory_blocks(
    storage: Storage, published: Published, paths: Mapping[str, Path], transport: Transport | None, held: ExitStack
) -> _Blocks:
    """Return the blocks of files in the memory of ranks. Files of this machine are linked to `paths`.

    Raises: NotFoundError: a file is on another machine and there is no transport.
    """
    blocks: _Blocks = []
    for name, entry in published.files:
        part = NodeCache.find(storage, published.part(name))
        if part is not None:
            held.callback(part.close)
            os.link(part.files[0], paths[name])
            file = os.open(paths[name], os.O_RDONLY | os.O_CLOEXEC)
            held.callback(os.close, file)
            blocks.append(partial(_make_block, f"{published.folder}/{name}", entry, file, ()))
        elif transport is not None:
            blocks.append(transport(published, name, entry))
        else:
            raise NotFoundError(f"no process on this machine holds {published.folder}/{name} in memory")
    return blocks


def _rebuilt_blocks(storage: Storage, published: Published, timeout_s: float, held: ExitStack) -> _Blocks:
    """Return the blocks of a delta. Its base stays locked until the stack closes.

    Raises: DamagedError: a base is missing or was replaced.
    """
    chain = [published]  # from the newest version to the one after the base
    base = None
    for link in bases_of(storage, published):
        if link.delta is None:
            base = NodeCache(storage, link, timeout_s)
        elif (base := NodeCache.find(storage, link)) is None:
            chain.append(link)
            continue
        break
    assert base is not None  # the chain of bases ends with a complete version
    held.callback(base.close)
    deltas = []
    from rftdask.synchronizer.delta import DeltaFile  # late: needs safetensors, which a light installation lacks

    for link in reversed(chain):
        copy = NodeCache(storage, link.changes, timeout_s)
        held.callback(copy.close)
        deltas.append([DeltaFile(path) for path in copy.files])
    makers: _Blocks = []
    for (name, entry), path, changes in zip(published.files, base.files, zip(*deltas, strict=True), strict=True):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        held.callback(os.close, file)
        makers.append(partial(_make_block, f"{published.folder}/{name}", entry, file, changes))
    return makers


def _make_block(path: str, entry: FileEntry, base: int, deltas: Sequence[DeltaFile], number: int) -> Data:
    """Rebuild a block of the file at `path` from the open file `base` and its deltas.

    Raises: DamagedError: the result does not match `entry`.
    """
    start, stop = block_span(entry, number)
    data = bytearray(stop - start)
    os.preadv(base, [data], start)
    words = np.frombuffer(data, np.uint16)
    for delta in deltas:
        positions, xors = delta.changes(number)
        words[positions] ^= xors
    check_block(path, memoryview(data), entry, number)
    return memoryview(data)


def copy_name(storage: Storage, published: Published) -> str:
    """Name of a version's cache folder, the same on every machine."""
    # Part of the name, since a delta that is later written completely has other files.
    kind = "whole" if published.delta is None else "made"
    kind = kind if published.held is None else "held"
    name = f"{storage.url}\n{published.folder}\n{published.content_hash}\n{kind}"
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def held_block(copies: Sequence[str], file: str, number: int) -> bytes | bool:
    """Unverified block of an in-memory file from one of the cache folders named `copies`.

    Returns: True if a process of this machine is fetching it; False if it is not on this machine.
    Raises: ValueError: not names of cache folders.
    """
    is_coming = False
    for copy in copies:
        folder = _root(in_memory=True) / copy
        path = folder / file
        if not re.fullmatch("[0-9a-f]{32}", copy) or not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{copy}/{file} is not a file of a version")
        with suppress(FileNotFoundError), path.open("rb") as opened:  # an open file stays readable if it is removed
            if (folder / _VERIFIED).exists() or _mark(path, number).exists():
                return os.pread(opened.fileno(), BLOCK_BYTES, number * BLOCK_BYTES)
        is_coming = is_coming or _is_filled_now(folder)
    return is_coming


def place() -> str:
    """Name of this machine's memory, the same in all its processes."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{os.uname().nodename} {boot} {_root(in_memory=True)}"


def _mark(path: Path, number: int) -> Path:
    """Path of the file that marks a block as written, while other blocks are missing."""
    return path.with_name(f"{path.name}.{number}")


def _is_filled_now(folder: Path) -> bool:
    with suppress(FileNotFoundError), folder.with_suffix(".lock").open("rb") as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _identity(path: Path) -> list[int]:
    """Numbers of a file, one of which changes on a write. Raises: NotFoundError."""
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist") from error
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]


def _root(in_memory: bool) -> Path:
    """Cache folder of this user. Raises: UserError: it belongs to another user."""
    memory = os.environ.get(SHARED_MEMORY) or "/dev/shm"
    # Without /dev/shm, as on macOS, plain temporary files are used.
    place = memory if in_memory and os.path.isdir(memory) else tempfile.gettempdir()
    return private_folder(Path(place, f"rftdask-weights-{os.getuid()}"), f"set TMPDIR or {SHARED_MEMORY}")


def sweep() -> None:
    """Remove files left on this machine by killed processes of this user."""
    for in_memory in (False, True):
        remove_unused(_root(in_memory))
