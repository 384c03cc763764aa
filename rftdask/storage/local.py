"""Storage in a folder of a POSIX file system: a local disk, NFS, Lustre.

A write is a temporary file in the same folder, fsync, one rename or link, fsync of the folder. Without the first fsync
a power loss can leave the name with torn bytes, without the second one the name can vanish.
Invariant: a visible name always has all its bytes; a killed operation leaves only hidden names behind.
`Posix` makes the calls of the operating system, `LocalStorage` orders them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from rftdask.errors import NotFoundError, StorageError, StorageRefusedError
from rftdask.storage.base import TMP_PREFIX, Data, Patience, Storage, check_path

T = TypeVar("T")

_MAX_TRIES = 5
"""Tries, without a pause, if a folder vanishes during a write: it was removed, or its NFS handle is stale."""

_VANISHED = (errno.ENOENT, errno.ESTALE)

_PAGE_BYTES = 4096
"""Alignment of address, offset and size of a direct write that every disk accepts."""
_DIRECT_BYTES = 64 * 2**20
"""Smallest size of a direct write, past the page cache, and the size of its pieces."""

_TRANSIENT = (
    *(errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ETIMEDOUT, errno.ENOTCONN),
    *(errno.ESHUTDOWN, errno.ECONNREFUSED, errno.ECONNRESET),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
)
"""Errors of network file systems while their server is unreachable."""

_ADVICE = {
    errno.ENOSPC: "free some space and run the same command again to continue, or move the run to a larger disk",
    errno.EDQUOT: "the quota is used up: free some space or request more, then run the same command again to continue",
    errno.EROFS: "the file system is read-only: mount it writable or choose another folder",
    errno.EACCES: "check the owner and the mode of the folder",
    errno.EPERM: "check owner and mode; create-only writes also need hard links, which some file systems lack",
    errno.EOPNOTSUPP: "create-only writes need hard links, which this file system lacks: choose another one",
    errno.ENOTDIR: "something above it is a file: choose another folder or move that file",
    errno.EISDIR: "a folder has that name: choose another name or remove it",
    errno.ENAMETOOLONG: "choose a shorter folder or run name",
    errno.ENODEV: "a FIFO, socket or device has that name: remove it or choose another folder",
    errno.EIO: "the disk or its server reports a fault: see the system log",
}


class Posix:
    """The calls of the operating system. Each raises OSError as the system does; paths are absolute.

    Crash tests replace it: one implementation stops the process between two calls, another simulates a disk that loses
    everything that was not synced.
    """

    # ---- calls that change the disk

    def create(self, path: str) -> int:
        """Create an empty file and return its descriptor. Raises: FileExistsError."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: Data) -> None:
        rest = memoryview(data)
        if len(rest) >= _DIRECT_BYTES:
            rest = rest[_write_direct(descriptor, rest) :]
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    def sync(self, descriptor: int) -> None:
        """Make the bytes written so far survive a power loss, but not the name of the file."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a descriptor; the bytes may still be in the page cache."""
        os.close(descriptor)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def link(self, source: str, target: str) -> None:
        """Give the file a second name. Raises: FileExistsError."""
        os.link(source, target)

    def unlink(self, path: str) -> None:
        """Remove a name. Raises: FileNotFoundError."""
        os.unlink(path)

    def make_folder(self, path: str) -> None:
        """Create one folder; its parent must exist. Raises: FileExistsError."""
        os.mkdir(path)

    def remove_tree(self, path: str) -> None:
        """Remove a file, or a folder with everything below it, in no particular order."""
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)

    def sync_folder(self, path: str) -> int:
        """Make the names in a folder survive a power loss; return its inode."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            inode = os.fstat(descriptor).st_ino
            os.fsync(descriptor)
            return inode
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):  # some network file systems lack this call
                return inode
            raise
        finally:
            os.close(descriptor)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def restrict(self, path: str) -> None:
        """Restrict a file or folder to its owner: mode 0600 or 0700, regardless of the umask."""
        os.chmod(path, 0o700 if os.path.isdir(path) else 0o600)

    # ---- calls that only read

    def is_restricted(self, path: str) -> bool:
        """Return True if the folder exists and only its owner may enter it."""
        with suppress(OSError):
            return not stat.S_IMODE(os.stat(path).st_mode) & 0o077
        return False

    def read(self, path: str, start: int = 0, size: int | None = None) -> bytes:
        """Return `size` bytes of a regular file, or fewer at its end; None: all of them.

        Raises: OSError ENODEV: it is a FIFO, a socket or a device.
        """
        # Without O_NONBLOCK, opening a FIFO would block until there is a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.ENODEV, "it is not a regular file", path)
            file.seek(start)
            return read_whole(file, size)

    def scan(self, path: str) -> list[tuple[str, bool]]:
        """Return (name, is a folder) of everything directly in a folder."""
        with os.scandir(path) as entries:
            return [(entry.name, entry.is_dir()) for entry in entries]

    def is_folder(self, path: str) -> bool:
        """Return True for a folder, or a link to one."""
        return os.path.isdir(path)

    def is_same_file(self, path: str, other: str) -> bool:
        """Return True if both are names of one file; False if one of them does not exist."""
        with suppress(OSError):
            return os.path.samefile(path, other)
        return False


def read_whole(file: io.FileIO, size: int | None = None) -> bytes:
    """Return `size` bytes from an unbuffered file, or fewer at its end; None: all of them.

    Raises: BlockingIOError: the system returned EAGAIN, which Python takes for the end.
    """
    parts: list[bytes] = []
    # A read may return fewer bytes than requested; no bytes mean the end.
    while size is None or sum(map(len, parts)) < size:
        part = file.readall() if size is None else file.read(size - sum(map(len, parts)))
        if part is None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if not part:
            break
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _write_direct(descriptor: int, data: memoryview) -> int:
    """Write all full pages of `data` to a new file, bypassing the page cache; return the number of bytes written.

    Weights are written once and are larger than the cache: copying them into it would occupy a core during training,
    and evict what is read again. Writes nothing if the memory or the file system does not support it.
    """
    if data.readonly or not hasattr(os, "O_DIRECT"):
        return 0
    if ctypes.addressof(ctypes.c_char.from_buffer(data)) % _PAGE_BYTES:
        return 0
    flags, place, end = fcntl.fcntl(descriptor, fcntl.F_GETFL), 0, len(data) - len(data) % _PAGE_BYTES
    with suppress(OSError):  # such as EINVAL; the ordinary write reports any other error
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        while place < end:
            place += os.write(descriptor, data[place : min(place + _DIRECT_BYTES, end)])
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return place


class LocalStorage(Storage):
    """`LocalStorage("/scratch/runs")`; the first write creates the folder."""

    def __init__(self, root: str | Path, posix: Posix | None = None) -> None:
        """posix: calls of the system; crash tests pass their own."""
        self.url = os.path.abspath(os.path.expanduser(root))
        self._posix = posix or Posix()
        # (path, inode) of the folders whose parents this process has made durable.
        self._synced: set[tuple[str, int]] = set()
        self._is_private: bool | None = None
        """True if only the owner may enter the root; new files follow it. None: not checked yet."""

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[str, Posix]]:
        return LocalStorage, (self.url, self._posix)

    def make_private(self) -> None:
        def restrict() -> None:
            self._make_folders(self.url)
            self._posix.restrict(self.url)

        self._call("make_private", self.url, restrict)
        self._is_private = True

    def put(self, path: str, data: Data) -> None:
        """Write a temporary file, fsync, rename it, fsync the folder."""
        self._write("put", path, data)

    def put_new(self, path: str, data: bytes) -> bool:
        """As `put`, with link(2) instead of the rename: the file system picks one winner."""
        return self._write("put_new", path, data)

    def get(self, path: str) -> bytes:
        """See Storage. A file that is replaced meanwhile is read whole: the descriptor keeps the opened one."""
        return self._get(path)

    def get_part(self, path: str, start: int, stop: int) -> bytes:
        """See Storage. Reads no other bytes."""
        return self._get(path, start, max(0, stop - start))

    def _get(self, path: str, *part: int) -> bytes:
        target = self._at(path)

        def read() -> bytes:
            try:
                return self._posix.read(target, *part)
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
                raise NotFoundError(f"{target} does not exist") from error

        return self._call("get", target, read)

    def list(self, folder: str = "") -> list[str]:
        """See Storage. Temporary files of live and dead writers are omitted."""
        target = self._at(folder) if folder else self.url

        def scan() -> list[str]:
            try:
                entries = self._posix.scan(target)
            except (FileNotFoundError, NotADirectoryError):
                return []
            visible = ((name, is_folder) for name, is_folder in entries if not name.startswith(TMP_PREFIX))
            return sorted(f"{name}/" if is_folder else name for name, is_folder in visible)

        return self._call("list", target, scan)

    def remove(self, path: str) -> None:
        """Rename to a hidden name first, so that no reader sees half a folder."""
        target = self._at(path)
        folder = os.path.dirname(target)
        # In the same folder, so that the rename stays within one file system.
        hidden = _tmp_name(folder)
        # A retry must not rename again: another process may have created `target` anew.
        is_hidden = False

        def remove() -> None:
            nonlocal is_hidden
            with suppress(FileNotFoundError, NotADirectoryError):
                if not is_hidden:
                    # Killed after this: the target is gone for every reader, and the hidden rest is removed with the
                    # folder above it.
                    self._posix.rename(target, hidden)
                    is_hidden = True
                # Durable before the first file is removed: otherwise a power loss could restore the old name with a
                # part of its files.
                self._sync_folder(folder)
                self._posix.remove_tree(hidden)

        self._call("remove", target, remove)

    def local_file(self, path: str) -> Path | None:
        return Path(self._at(path))

    @contextmanager
    def local_copy(self, path: str) -> Iterator[Path]:
        """Return the file or folder itself, which must not be changed."""
        target = Path(self._at(path))
        if not target.exists():
            raise NotFoundError(f"{target} does not exist")
        yield target

    def _at(self, path: str) -> str:
        return f"{self.url}/{check_path(path)}"

    def _write(self, verb: str, path: str, data: Data) -> bool:
        """Write a file durably for `verb` "put" or "put_new"; True unless put_new found the file existing."""
        target = self._at(path)
        folder = os.path.dirname(target)
        in_doubt = False  # an earlier try may have created the name although it failed

        def write() -> bool:
            nonlocal in_doubt
            # A new name for each try: the file of a killed try is never reused.
            tmp = _tmp_name(folder)
            try:
                try:
                    descriptor = self._posix.create(tmp)
                except FileNotFoundError:
                    self._make_folders(folder)
                    descriptor = self._posix.create(tmp)
                try:
                    self._restrict(tmp)
                    self._posix.write(descriptor, data)
                    # Before the rename: otherwise a power loss could leave the name with torn bytes.
                    self._posix.sync(descriptor)
                finally:
                    self._posix.close(descriptor)
                # Killed before the next call: only a hidden file. Killed after it: all of the bytes.
                was_in_doubt, in_doubt = in_doubt, True
                if verb == "put":
                    self._posix.rename(tmp, target)
                    created = True
                else:
                    created = self._link(tmp, target) or (was_in_doubt and self._posix.read(target) == data)
            finally:
                with suppress(OSError):
                    # Gone after a rename; a second name of the target after a link.
                    self._posix.unlink(tmp)
            # Now the name survives a power loss, even if put_new lost: False means that the file exists durably.
            self._sync_folder(folder)
            return created

        def write_where_folders_vanish() -> bool:
            for _ in range(_MAX_TRIES - 1):
                try:
                    return write()
                except OSError as error:
                    # The next try creates the folder again; other errors would recur.
                    if error.errno not in _VANISHED:
                        raise
            return write()

        return self._call(verb, target, write_where_folders_vanish)

    def _call(self, verb: str, target: str, operation: Callable[[], T]) -> T:
        def is_transient(error: BaseException) -> bool:
            return isinstance(error, OSError) and error.errno in _TRANSIENT

        # Waits for an unreachable file server; a full disk or a wrong owner needs the user.
        patience = Patience(f"{verb} {target}", is_transient, self._posix.pause)
        try:
            return patience.call(operation)
        except OSError as error:
            advice = _ADVICE.get(error.errno or 0, "check that the file system is mounted and writable")
            tries = f" (tries: {patience.tries})" if patience.tries > 1 else ""
            kind = StorageError if is_transient(error) else StorageRefusedError
            raise kind(f"{verb} {target} failed{tries}: {error.strerror or error}; {advice}") from error

    def _link(self, tmp: str, target: str) -> bool:
        """Link `target` to `tmp`, with one winner even on NFS; True if both are the same file now.

        Unlike with O_EXCL, the target never shows a part of the bytes.
        """
        try:
            self._posix.link(tmp, target)
            return True
        except OSError as error:
            # An NFS client may repeat the call after a lost reply, and get "exists" about its own link.
            if self._posix.is_same_file(tmp, target):
                return True
            if isinstance(error, FileExistsError):
                return False
            raise

    def _make_folders(self, folder: str) -> None:
        """Create folders like `mkdir -p`, and sync the parent of every new one."""
        if self._posix.is_folder(folder):
            return
        parent = os.path.dirname(folder)
        self._make_folders(parent)  # top down: a folder must not be durable before its parent is
        with suppress(FileExistsError):  # another process was faster; if it is a file, the write raises ENOTDIR
            self._posix.make_folder(folder)
            if folder.startswith(f"{self.url}/"):
                self._restrict(folder)
        self._posix.sync_folder(parent)

    def _restrict(self, path: str) -> None:
        """Restrict a new file if the root is restricted, so that no process needs a setting for this."""
        if self._is_private is None:
            self._is_private = self._posix.is_restricted(self.url)
        if self._is_private:
            with suppress(OSError):  # a file system without modes; nobody else can enter the root
                self._posix.restrict(path)

    def _sync_folder(self, folder: str) -> None:
        """Make the names in `folder` durable, and once per folder those of its parents.

        Another process may have created the parents and died before it synced them.
        """
        inode = self._posix.sync_folder(folder)
        # With the inode: a folder that was removed and created again is not durable yet.
        if (folder, inode) in self._synced:
            return
        parent = folder
        while len(parent) > len(self.url):
            parent = os.path.dirname(parent)
            self._posix.sync_folder(parent)
        self._synced.add((folder, inode))


def _tmp_name(folder: str) -> str:
    return f"{folder}/{TMP_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
