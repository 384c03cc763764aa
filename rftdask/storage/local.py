"""Storage in a folder of a POSIX file system: a local disk, NFS, Lustre.

It knows nothing of fsspec. A write is a temporary file in the same folder, fsync, one rename or link, fsync of the
folder: without the first fsync a power loss can leave the name with torn bytes, without the second the name can vanish.
Invariant: a visible name always has all its bytes; what an operation leaves behind when killed has a hidden name.
`Posix` has the calls of the operating system and knows no order; `LocalStorage` has the order.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
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
"""Tries, without a pause, when a folder vanishes under a write: collected by somebody, or its NFS handle is stale."""

_VANISHED = (errno.ENOENT, errno.ESTALE)

_PAGE_BYTES = 4096
"""Of which the address, the place and the size of a write past the cache have to be multiples on any disk."""
_DIRECT_BYTES = 64 * 2**20
"""From which a write goes past the cache, and its pieces."""

_TRANSIENT = (
    *(errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ETIMEDOUT, errno.ENOTCONN),
    *(errno.ESHUTDOWN, errno.ECONNREFUSED, errno.ECONNRESET),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
)
"""What file systems over a network say while their server is away; it may be back soon."""

_ADVICE = {
    errno.ENOSPC: "free some space, and the same command goes on; or move the run to a larger disk",
    errno.EDQUOT: "the quota is used up: free some space or ask for more, and the same command goes on",
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
    """The real calls. Each raises OSError as the system does; paths are absolute.

    The seam at which crash tests stand: one implementation stops the process between two calls, another is a disk that
    forgets what was not synced.
    """

    # ---- what changes the disk

    def create(self, path: str) -> int:
        """Descriptor of a new, empty file."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: Data) -> None:
        """Write all of the bytes; the system may take them in pieces."""
        rest = memoryview(data)
        if len(rest) >= _DIRECT_BYTES:
            rest = rest[_write_direct(descriptor, rest) :]
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    def sync(self, descriptor: int) -> None:
        """Make the bytes written so far survive a power loss; says nothing of the name."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a descriptor; the bytes may still be in the cache of the system."""
        os.close(descriptor)

    def rename(self, source: str, target: str) -> None:
        """Give the file or folder at `source` the name `target`, in place of a file that has it."""
        os.replace(source, target)

    def link(self, source: str, target: str) -> None:
        """Give the file a second name. Raises: FileExistsError: the name is taken."""
        os.link(source, target)

    def unlink(self, path: str) -> None:
        """Take a name away; raises FileNotFoundError if there is none."""
        os.unlink(path)

    def make_folder(self, path: str) -> None:
        """Make one folder, whose parent must be there. Raises: FileExistsError."""
        os.mkdir(path)

    def remove_tree(self, path: str) -> None:
        """Remove a file, or a folder with all below it, in no order."""
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)

    def sync_folder(self, path: str) -> int:
        """Make the names in a folder survive a power loss; returns its inode."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            inode = os.fstat(descriptor).st_ino
            os.fsync(descriptor)
            return inode
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):  # some network file systems have no such call
                return inode
            raise
        finally:
            os.close(descriptor)

    def pause(self, seconds: float) -> None:
        """Let it pass, before what failed is tried again."""
        time.sleep(seconds)

    def restrict(self, path: str) -> None:
        """Leave a file or folder to its owner: mode 0600 or 0700, whatever the umask."""
        os.chmod(path, 0o700 if os.path.isdir(path) else 0o600)

    # ---- what only looks

    def is_restricted(self, path: str) -> bool:
        """Whether a folder is there that only its owner may enter."""
        with suppress(OSError):
            return not stat.S_IMODE(os.stat(path).st_mode) & 0o077
        return False

    def read(self, path: str) -> bytes:
        """All the bytes of a regular file. Raises: OSError ENODEV: it is a FIFO, a socket or a device."""
        return self._read(path, 0, None)

    def read_part(self, path: str, start: int, size: int) -> bytes:
        """Some bytes of it, fewer where it ends. Raises: as `read`."""
        return self._read(path, start, size)

    def _read(self, path: str, start: int, size: int | None) -> bytes:
        # Without O_NONBLOCK the opening of a FIFO would wait for somebody to write to it.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.ENODEV, "it is no regular file", path)
            if size is None:
                return file.readall()
            file.seek(start)
            parts = [file.read(size)]
            # The system may give fewer bytes than asked for; none is the end.
            while parts[-1] and sum(map(len, parts)) < size:
                parts.append(file.read(size - sum(map(len, parts))))
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def scan(self, path: str) -> list[tuple[str, bool]]:
        """(name, whether it is a folder) of everything directly in a folder."""
        with os.scandir(path) as entries:
            return [(entry.name, entry.is_dir()) for entry in entries]

    def is_folder(self, path: str) -> bool:
        """True if it is a folder, or a link to one."""
        return os.path.isdir(path)

    def is_same_file(self, path: str, other: str) -> bool:
        """True if both are names of one file; False if one of them is none."""
        with suppress(OSError):
            return os.path.samefile(path, other)
        return False


def _write_direct(descriptor: int, data: memoryview) -> int:
    """Write to a new file past the cache of the system what of `data` lies in whole pages; how many bytes that were.

    Weights are written once and are larger than caches: copied into it they take a core that trains meanwhile, and the
    place of what is read again. Where memory or file system do not allow it nothing is written.
    """
    if data.readonly or not hasattr(os, "O_DIRECT"):
        return 0
    if ctypes.addressof(ctypes.c_char.from_buffer(data)) % _PAGE_BYTES:
        return 0
    flags, place, end = fcntl.fcntl(descriptor, fcntl.F_GETFL), 0, len(data) - len(data) % _PAGE_BYTES
    with suppress(OSError):  # such as EINVAL; what else is wrong, the ordinary write meets again, and tells
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        while place < end:
            place += os.write(descriptor, data[place : min(place + _DIRECT_BYTES, end)])
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return place


class LocalStorage(Storage):
    """`LocalStorage("/scratch/runs")`; the folder is made by the first write."""

    def __init__(self, root: str | Path, posix: Posix | None = None) -> None:
        """`posix`: the system's calls; crash tests give their own."""
        self.url = os.path.abspath(os.path.expanduser(root))
        self._posix = posix or Posix()
        # Folders, by path and inode, whose parents this process has made durable.
        self._synced: set[tuple[str, int]] = set()
        self._is_private: bool | None = None
        """Whether only the owner may enter the root, which all below it follows; None: not looked yet."""

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[str, Posix]]:
        return LocalStorage, (self.url, self._posix)

    def make_private(self) -> None:
        def restrict() -> None:
            self._make_folders(self.url)
            self._posix.restrict(self.url)

        self._call("make_private", self.url, restrict)
        self._is_private = True

    def put(self, path: str, data: Data) -> None:
        """A temporary file, fsync, rename, fsync of the folder: durable when it returns."""
        self._write("put", path, data)

    def put_new(self, path: str, data: bytes) -> bool:
        """As `put`, with link(2) in place of the rename: the file system itself picks one winner."""
        return self._write("put_new", path, data)

    def get(self, path: str) -> bytes:
        """A file that is replaced meanwhile is read whole: the descriptor keeps the one that was opened."""
        return self._get(path, self._posix.read)

    def get_part(self, path: str, start: int, stop: int) -> bytes:
        """See Storage; no other byte is read."""
        return self._get(path, lambda target: self._posix.read_part(target, start, max(0, stop - start)))

    def _get(self, path: str, call: Callable[[str], bytes]) -> bytes:
        target = self._at(path)

        def read() -> bytes:
            try:
                return call(target)
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
                raise NotFoundError(f"{target} does not exist") from error

        return self._call("get", target, read)

    def list(self, folder: str = "") -> list[str]:
        """Without the temporary files of writers, dead or alive."""
        target = self._at(folder) if folder else self.url

        def scan() -> list[str]:
            try:
                entries = self._posix.scan(target)
            except (FileNotFoundError, NotADirectoryError):
                return []
            shown = ((name, is_folder) for name, is_folder in entries if not name.startswith(TMP_PREFIX))
            return sorted(f"{name}/" if is_folder else name for name, is_folder in shown)

        return self._call("list", target, scan)

    def remove(self, path: str) -> None:
        """A rename out of sight first, so that no reader sees half a folder."""
        target = self._at(path)
        folder = os.path.dirname(target)
        # In the same folder, so that the rename stays within one file system; `list` hides the name.
        doomed = _tmp_name(folder)
        # Tried again after a fault, it must not rename again: by then another may have made `target` anew.
        is_hidden = False

        def remove() -> None:
            nonlocal is_hidden
            with suppress(FileNotFoundError, NotADirectoryError):
                if not is_hidden:
                    # First out of sight, for good: half a folder is never seen under its name. Killed here: it is gone
                    # for every reader, and what lies under the hidden name goes with the folder above it.
                    self._posix.rename(target, doomed)
                    is_hidden = True
                # The new name is durable before the first file goes: after a power loss the old one would come back,
                # with a part of its files.
                self._sync_folder(folder)
                self._posix.remove_tree(doomed)

        self._call("remove", target, remove)

    def local_file(self, path: str) -> Path | None:
        """See Storage."""
        return Path(self._at(path))

    @contextmanager
    def local_copy(self, path: str) -> Iterator[Path]:
        """No copy: the file or folder itself, which must not be changed."""
        target = Path(self._at(path))
        if not target.exists():
            raise NotFoundError(f"{target} does not exist")
        yield target

    def _at(self, path: str) -> str:
        return f"{self.url}/{check_path(path)}"

    def _write(self, verb: str, path: str, data: Data) -> bool:
        """Write a file durably by "put" or "put_new"; True unless put_new lost."""
        target = self._at(path)
        folder = os.path.dirname(target)
        in_doubt = False  # an earlier try may have made the name although it failed

        def write() -> bool:
            nonlocal in_doubt
            # A new name for each try: what a killed one left is never written on.
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
                    # Before the name is given: a power loss after it would leave the name with torn bytes.
                    self._posix.sync(descriptor)
                finally:
                    self._posix.close(descriptor)
                # Killed before the next call: nothing but a hidden file. Killed after it: all of the bytes.
                was_in_doubt, in_doubt = in_doubt, True
                if verb == "put":
                    self._posix.rename(tmp, target)
                    created = True
                else:
                    created = self._link(tmp, target) or (was_in_doubt and self._posix.read(target) == data)
            finally:
                with suppress(OSError):
                    # After a rename there is nothing left under it; after a link it is a second name of the target.
                    self._posix.unlink(tmp)
            # Only now does the name survive a power loss; also for who lost put_new: False means it is there for good.
            self._sync_folder(folder)
            return created

        def write_where_folders_vanish() -> bool:
            for _ in range(_MAX_TRIES - 1):
                try:
                    return write()
                except OSError as error:
                    # A folder that vanished is made anew by the next try; what else fails here does so again.
                    if error.errno not in _VANISHED:
                        raise
            return write()

        return self._call(verb, target, write_where_folders_vanish)

    def _call(self, verb: str, target: str, operation: Callable[[], T]) -> T:
        def is_transient(error: BaseException) -> bool:
            return isinstance(error, OSError) and error.errno in _TRANSIENT

        # Faults of a file server that is away are waited out; a full disk or a wrong owner does not pass by itself.
        patience = Patience(f"{verb} {target}", is_transient, self._posix.pause)
        try:
            return patience.call(operation)
        except OSError as error:
            advice = _ADVICE.get(error.errno or 0, "check that the file system is mounted and writable")
            tries = f" (tries: {patience.tries})" if patience.tries > 1 else ""
            kind = StorageError if is_transient(error) else StorageRefusedError
            raise kind(f"{verb} {target} failed{tries}: {error.strerror or error}; {advice}") from error

    def _link(self, tmp: str, target: str) -> bool:
        """True if `target` is `tmp` now, by link(2): one winner, also on NFS, and unlike O_EXCL it never shows part."""
        try:
            self._posix.link(tmp, target)
            return True
        except OSError as error:
            # An NFS client may send the call again after a lost reply, and hear "exists" about its own link.
            if self._posix.is_same_file(tmp, target):
                return True
            if isinstance(error, FileExistsError):
                return False
            raise

    def _make_folders(self, folder: str) -> None:
        """`mkdir -p`, with the parent of every new folder synced."""
        if self._posix.is_folder(folder):
            return
        parent = os.path.dirname(folder)
        self._make_folders(parent)  # from the top down: a folder is never durable below one that is not
        with suppress(FileExistsError):  # another process was faster; if it is a file, the write says ENOTDIR
            self._posix.make_folder(folder)
            if folder.startswith(f"{self.url}/"):
                self._restrict(folder)
        self._posix.sync_folder(parent)

    def _restrict(self, path: str) -> None:
        """What is new follows the root, so that no process needs a setting to know."""
        if self._is_private is None:
            self._is_private = self._posix.is_restricted(self.url)
        if self._is_private:
            with suppress(OSError):  # a file system that keeps no modes; nobody else enters the root
                self._posix.restrict(path)

    def _sync_folder(self, folder: str) -> None:
        """Make the names in `folder` durable, and once per folder those of its parents.

        The parents too because another process may have made them and died before it could.
        """
        inode = self._posix.sync_folder(folder)
        # By the inode too: a folder that was removed and made again has not been made durable yet.
        if (folder, inode) in self._synced:
            return
        parent = folder
        while len(parent) > len(self.url):
            parent = os.path.dirname(parent)
            self._posix.sync_folder(parent)
        self._synced.add((folder, inode))


def _tmp_name(folder: str) -> str:
    return f"{folder}/{TMP_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
