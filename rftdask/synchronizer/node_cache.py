"""Node copy: the files of a version, verified, as the engines of one machine map them. One process of the machine reads
them from storage, each byte once, and hashes what it reads; the others wait for it, and read nothing.

Of a storage that is a folder the files stay where they are; those of another are put below TMPDIR. Who serves a version
holds a lock of the kernel on it (flock), which ends with its process however that ends: the lease. A version that is
there as a delta is made below TMPDIR: of the newest one of its bases that is served here, else of the one that is there
as a whole. Files of a version that its trainer holds in memory lie below /dev/shm: there who holds them has put them
(held.py), and on other machines a transport does. Invariants: what is handed out was verified on this machine, since it
was started, and has not been written to since; what somebody holds is not removed; what nobody holds any more goes with
the last one, or with the next one who comes.

It knows neither engines nor which versions are wanted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from rftdask.errors import DamagedError, NotFoundError, StorageError, UserError, WaitTimeout
from rftdask.storage import Storage
from rftdask.storage.base import Data, in_order
from rftdask.synchronizer.manifest import BLOCK_BYTES, FileEntry, block_numbers, check_block, read_block, verify_block
from rftdask.synchronizer.published import Published, bases_of

if TYPE_CHECKING:
    from rftdask.synchronizer.delta import DeltaFile

_NUM_READS = 4
"""Blocks that are read and hashed at once."""
_LOOK_S = 0.02
_VERIFIED = "VERIFIED.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SHARED_MEMORY = "RFTDASK_SHARED_MEMORY"
"""Variable that names a folder in memory other than /dev/shm, such as where a container has little of that."""

Transport: TypeAlias = Callable[[Published, str, FileEntry], Callable[[int], Data]]
"""Of a file that is held elsewhere, what gives a block of it by its number, verified. Numbers are asked in their order,
from several threads. Raises: NotFoundError: nobody there holds it; WaitTimeout."""


class NodeCopy:
    """The files of one version on this machine.

    Example:
        copy = NodeCopy(storage, published, timeout_s=1800)
        engine.load_weights(published.version, copy.files)
        copy.close()                # when another version is served
    """

    def __init__(
        self, storage: Storage, published: Published, timeout_s: float, transport: Transport | None = None
    ) -> None:
        """transport: for files of a held version that are not on this machine; None: there is no way to them.

        Raises: NotFoundError, DamagedError: the version is not there, or not what its manifest says. WaitTimeout:
        another process has not read it in `timeout_s`. StorageError: there is no room for it on this machine.
        """
        self._open(storage, published)
        _sweep(self._folder.parent, self._folder)
        deadline = time.monotonic() + timeout_s
        try:
            while not (self._has(fcntl.LOCK_SH) and self._is_whole()):
                # Alone, and perhaps after another one who was faster, so it looks again. Who is refused holds nothing
                # any more: of several who look at once, one is alone.
                if self._has(fcntl.LOCK_EX):
                    if not self._is_whole():
                        with _telling_room(self._folder.parent.parent):
                            self._fill(storage, published, timeout_s, transport)
                elif time.monotonic() > deadline:
                    raise WaitTimeout(f"another process of this machine has not read {published.folder}")
                else:
                    time.sleep(_LOOK_S)
        except BaseException:
            self.close()
            raise

    @classmethod
    def find(cls, storage: Storage, published: Published) -> NodeCopy | None:
        """The files if they are on this machine already, and verified; else None, at once."""
        copy = cls.__new__(cls)
        copy._open(storage, published)
        if copy._has(fcntl.LOCK_SH) and copy._is_whole():
            return copy
        copy.close()
        return None

    def _open(self, storage: Storage, published: Published) -> None:
        self._folder = _root(published.held is not None) / copy_name(storage, published)
        local = {name: storage.local_file(f"{published.folder}/{name}") for name, _ in published.files}
        here = published.delta is not None or published.held is not None
        self._paths = {name: self._folder / name if here or path is None else path for name, path in local.items()}
        self._lock_file = self._folder.with_suffix(".lock")
        self._held = -1

    @property
    def files(self) -> list[Path]:
        """In the order in which the version names them."""
        return list(self._paths.values())

    def close(self) -> None:
        """Give the files back. Idempotent."""
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)
            _remove_unless_held(self._folder)

    def _has(self, kind: int) -> bool:
        """Whether the lock is held as `kind` now, without waiting; if not, it is not held at all."""
        while True:
            if self._held < 0:
                self._held = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._held, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            # Who removed the version removed this file, too; then the lock is on what nobody will look at.
            if _is_same(self._held, self._lock_file):
                return True
            os.close(self._held)
            self._held = -1

    def _is_whole(self) -> bool:
        # What was verified is still the same files: a write changes one of these numbers.
        with suppress(OSError, ValueError, NotFoundError):
            return bool(json.loads((self._folder / _VERIFIED).read_bytes()) == self._state())
        return False

    def _state(self) -> list[object]:
        # The boot, too: after a loss of power a file may have its name and its size without its bytes.
        boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
        return [boot, *map(_identity, self._paths.values())]

    def _fill(self, storage: Storage, published: Published, timeout_s: float, transport: Transport | None) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700)
        # Taken before the reading: a file that is replaced meanwhile is another than the one that was verified.
        before = {path: _identity(path) for path in self._paths.values() if not path.is_relative_to(self._folder)}
        with ExitStack() as held:
            blocks = _stored_blocks(storage, published)
            if published.held is not None:
                blocks = _held_blocks(storage, published, self._paths, transport, held)
            elif published.delta is not None:
                blocks = _made_blocks(storage, published, timeout_s, held)
            for (name, entry), block in zip(published.files, blocks, strict=True):
                ours, file = self._paths[name], -1
                if not ours.is_relative_to(self._folder):  # a file of a folder, which stays where it is
                    verify = partial(verify_block, storage, f"{published.folder}/{name}", entry)
                    _do(verify, block_numbers(entry))
                    continue
                if not ours.exists():  # else it is a link to what is here
                    ours.parent.mkdir(parents=True, exist_ok=True)
                    file = os.open(ours, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

                def take(
                    number: int, block: Callable[[int], Data] = block, file: int = file, ours: Path = ours
                ) -> None:
                    data, place = memoryview(block(number)), number * BLOCK_BYTES
                    while file >= 0 and data:
                        written = os.pwrite(file, data, place)
                        data, place = data[written:], place + written
                    if published.held is not None:  # from here on another machine may have it from this one
                        _mark(ours, number).touch()

                try:
                    _do(take, block_numbers(entry))
                finally:
                    if file >= 0:
                        os.close(file)
        if any(_identity(path) != found for path, found in before.items()):
            raise DamagedError(f"{published.folder} changed while it was read")
        # Last: without it nothing here is believed.
        (self._folder / _VERIFIED).write_text(json.dumps(self._state()))


def _do(work: Callable[[int], None], numbers: Sequence[int]) -> None:
    """The work for each number, several at once."""
    for _ in in_order(work, numbers, _NUM_READS):
        pass


def _stored_blocks(storage: Storage, published: Published) -> list[Callable[[int], Data]]:
    """For each file what gives a block of it, verified, from storage."""
    return [partial(read_block, storage, f"{published.folder}/{name}", entry) for name, entry in published.files]


def _held_blocks(
    storage: Storage, published: Published, paths: Mapping[str, Path], transport: Transport | None, held: ExitStack
) -> list[Callable[[int], Data]]:
    """The same of a version whose files are in the memory of ranks: those of this machine are linked to `paths`.

    Raises: NotFoundError: one of them is elsewhere, and there is no way to it.
    """
    blocks: list[Callable[[int], Data]] = []
    for name, entry in published.files:
        part = NodeCopy.find(storage, published.part(name))
        if part is not None:
            held.callback(part.close)
            os.link(part.files[0], paths[name])
            file = os.open(paths[name], os.O_RDONLY | os.O_CLOEXEC)
            held.callback(os.close, file)
            blocks.append(partial(_make_block, f"{published.folder}/{name}", entry, file, ()))
        elif transport is not None:
            blocks.append(transport(published, name, entry))
        else:
            raise NotFoundError(f"{published.folder}/{name} is in the memory of no process of this machine")
    return blocks


def _made_blocks(
    storage: Storage, published: Published, timeout_s: float, held: ExitStack
) -> list[Callable[[int], Data]]:
    """The same of a version that is there as a delta, made of another version's, which is held until the stack closes.

    Raises: DamagedError: one of those that it is made of is not there.
    """
    chain = [published]
    """From the newest to the one after the base."""
    base = None
    for link in bases_of(storage, published):
        if link.delta is None:
            base = NodeCopy(storage, link, timeout_s)
        elif (base := NodeCopy.find(storage, link)) is None:
            chain.append(link)
            continue
        break
    assert base is not None  # a version that is a delta has a base, and the last one is there as a whole
    held.callback(base.close)
    deltas = []
    from rftdask.synchronizer.delta import DeltaFile  # late: it needs safetensors, which a light installation lacks

    for link in reversed(chain):
        copy = NodeCopy(storage, link.changes, timeout_s)
        held.callback(copy.close)
        deltas.append([DeltaFile(path) for path in copy.files])
    makers: list[Callable[[int], Data]] = []
    for (name, entry), path, changes in zip(published.files, base.files, zip(*deltas, strict=True), strict=True):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        held.callback(os.close, file)
        makers.append(partial(_make_block, f"{published.folder}/{name}", entry, file, changes))
    return makers


def _make_block(path: str, entry: FileEntry, base: int, deltas: Sequence[DeltaFile], number: int) -> Data:
    """A block of the file at `path`: that of the open file `base`, and what has changed since.

    Raises: DamagedError: it is not what it must be.
    """
    start = number * BLOCK_BYTES
    data = bytearray(min(BLOCK_BYTES, entry.size_bytes - start))
    os.preadv(base, [data], start)
    words = np.frombuffer(data, np.uint16)
    for delta in deltas:
        positions, xors = delta.changes(number)
        words[positions] ^= xors
    check_block(path, memoryview(data), entry, number)
    return memoryview(data)


def copy_name(storage: Storage, published: Published) -> str:
    """The name of a version's folder on every machine."""
    # A version that is written as a whole after it was a delta has other files here.
    kind = "whole" if published.delta is None else "made"
    kind = kind if published.held is None else "held"
    name = f"{storage.url}\n{published.folder}\n{published.content_hash}\n{kind}"
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def held_block(copies: Sequence[str], file: str, number: int) -> bytes | bool:
    """A block of a file that is held on this machine, in one of the copies with these names; True: some process is
    bringing it here; False: it is not here. Who is given it verifies it.

    Raises: ValueError: they are no names of copies.
    """
    is_coming = False
    for copy in copies:
        folder = _root(in_memory=True) / copy
        path = folder / file
        if not re.fullmatch("[0-9a-f]{32}", copy) or not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{copy}/{file} is no file of a version")
        with suppress(FileNotFoundError), path.open("rb") as opened:  # what is open stays, also if it is removed now
            if (folder / _VERIFIED).exists() or _mark(path, number).exists():
                return os.pread(opened.fileno(), BLOCK_BYTES, number * BLOCK_BYTES)
        is_coming = is_coming or _is_filled_now(folder)
    return is_coming


def place() -> str:
    """Names the memory of this machine, to whom everybody on it says the same."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{os.uname().nodename} {boot} {_root(in_memory=True)}"


def _mark(path: Path, number: int) -> Path:
    """There once a block of a file is, while others of it are still missing."""
    return path.with_name(f"{path.name}.{number}")


def _is_filled_now(folder: Path) -> bool:
    with suppress(FileNotFoundError), folder.with_suffix(".lock").open("rb") as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _identity(path: Path) -> list[int]:
    """Numbers of which a write changes one. Raises: NotFoundError: there is no such file."""
    try:
        found = os.stat(path)
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist") from error
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns]


def _root(in_memory: bool) -> Path:
    """A folder of this user alone. Raises: UserError: somebody else made it."""
    memory = os.environ.get(SHARED_MEMORY) or "/dev/shm"
    # Where there is none, as on a Mac, files that nobody flushes serve as well.
    place = memory if in_memory and os.path.isdir(memory) else tempfile.gettempdir()
    folder = Path(place, f"rftdask-weights-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UserError(
            f"{folder} is no folder of yours, so others could change weights in it; set TMPDIR or {SHARED_MEMORY}"
        )
    return folder


def sweep() -> None:
    """Remove what processes of this user have left on this machine that were killed."""
    for in_memory in (False, True):
        _sweep(_root(in_memory))


def _sweep(root: Path, own: Path | None = None) -> None:
    for lock_file in root.glob("*.lock"):
        if own is None or lock_file.stem != own.name:
            _remove_unless_held(lock_file.with_suffix(""))


def _remove_unless_held(folder: Path) -> None:
    lock_file = folder.with_suffix(".lock")
    try:
        held = os.open(lock_file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        with suppress(BlockingIOError):  # somebody serves it
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(held, lock_file):
                shutil.rmtree(folder, ignore_errors=True)
                lock_file.unlink()
    finally:
        os.close(held)


def _is_same(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


@contextmanager
def _telling_room(place: Path) -> Iterator[None]:
    try:
        yield
    except (StorageError, NotFoundError, DamagedError):
        raise
    except OSError as error:
        raise StorageError(
            f"weights cannot be put below {place}: {error.strerror or error}; free some space, or set TMPDIR or "
            f"{SHARED_MEMORY} to another folder of this machine"
        ) from error
