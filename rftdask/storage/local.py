"""Storage in a folder of a POSIX file system: a local disk, NFS, Lustre.

It knows nothing of fsspec. A write is a temporary file in the same folder, fsync, one rename or link, fsync of the
folder: without the first fsync a power loss can leave the name with torn bytes, without the second the name can vanish.
Invariant: a visible name always has all its bytes; what an operation leaves behind when killed has a hidden name.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rftdask.errors import NotFoundError, StorageError
from rftdask.storage.base import TMP_PREFIX, Storage, check_path

_MAX_TRIES = 5
"""Tries when a folder vanishes under a write (collected by somebody) or an NFS handle goes stale."""

_VANISHED = (errno.ENOENT, errno.ESTALE)

_ADVICE = {
    errno.ENOSPC: "free some space, or move the run to a larger disk",
    errno.EDQUOT: "the quota is used up: free some space or ask for more",
    errno.EROFS: "the file system is read-only: mount it writable or choose another folder",
    errno.EACCES: "check the owner and the mode of the folder",
    errno.EPERM: "check owner and mode; create-only writes also need hard links, which some file systems lack",
    errno.EOPNOTSUPP: "create-only writes need hard links, which this file system lacks: choose another one",
    errno.ENOTDIR: "something above it is a file: choose another folder or move that file",
    errno.EISDIR: "a folder has that name: choose another name or remove it",
    errno.ENAMETOOLONG: "choose a shorter folder or run name",
    errno.EIO: "the disk or its server reports a fault: see the system log",
}


class LocalStorage(Storage):
    """`LocalStorage("/scratch/runs")`; the folder is made by the first write."""

    def __init__(self, root: str | Path) -> None:
        self.url = os.path.abspath(os.path.expanduser(root))
        self._synced: set[tuple[str, int]] = set()

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[str]]:
        return LocalStorage, (self.url,)

    def put(self, path: str, data: bytes) -> None:
        self._write("put", path, data, _replace)

    def put_new(self, path: str, data: bytes) -> bool:
        return self._write("put_new", path, data, _link)

    def get(self, path: str) -> bytes:
        target = self._at(path)
        for last in (False, False, True):  # ESTALE: on NFS the file was replaced between lookup and read
            try:
                with open(target, "rb", buffering=0) as file:
                    return file.read()
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
                raise NotFoundError(f"{target} does not exist") from error
            except OSError as error:
                if last or error.errno != errno.ESTALE:
                    raise _explain("get", target, error) from error
        raise AssertionError("unreachable")

    def list(self, folder: str = "") -> list[str]:
        target = self._at(folder) if folder else self.url
        try:
            with os.scandir(target) as entries:
                shown = (entry for entry in entries if not entry.name.startswith(TMP_PREFIX))
                return sorted(entry.name + "/" if entry.is_dir() else entry.name for entry in shown)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _explain("list", target, error) from error

    def remove(self, path: str) -> None:
        target = self._at(path)
        folder = os.path.dirname(target)
        doomed = _tmp_name(folder)
        try:
            os.rename(target, doomed)  # first out of sight, so that half a folder is never seen under its name
            if os.path.isdir(doomed) and not os.path.islink(doomed):
                shutil.rmtree(doomed)
            else:
                os.unlink(doomed)
            self._sync_folder(folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise _explain("remove", target, error) from error

    @contextmanager
    def local_copy(self, path: str) -> Iterator[Path]:
        target = Path(self._at(path))
        if not target.exists():
            raise NotFoundError(f"{target} does not exist")
        yield target

    def sweep(self, older_than_s: float = 3600.0) -> int:
        """Remove what killed writers left behind, if untouched for `older_than_s`; returns how many.

        Age is by this machine's clock: leave an hour or more, so that skew never makes a live write look old.
        """
        num_removed = 0
        for folder, folders, files in os.walk(self.url):
            for name in [name for name in (*folders, *files) if name.startswith(TMP_PREFIX)]:
                leftover = os.path.join(folder, name)
                with suppress(FileNotFoundError):
                    if time.time() - os.stat(leftover, follow_symlinks=False).st_ctime >= older_than_s:
                        shutil.rmtree(leftover) if name in folders else os.unlink(leftover)
                        num_removed += 1
            folders[:] = [name for name in folders if not name.startswith(TMP_PREFIX)]
        return num_removed

    def _at(self, path: str) -> str:
        return f"{self.url}/{check_path(path)}"

    def _write(self, verb: str, path: str, data: bytes, publish: Callable[[str, str], bool]) -> bool:
        target = self._at(path)
        folder = os.path.dirname(target)
        for tries_left in reversed(range(_MAX_TRIES)):
            tmp = _tmp_name(folder)
            try:
                try:
                    self._write_tmp(tmp, data)
                    created = publish(tmp, target)
                finally:
                    with suppress(OSError):
                        os.unlink(tmp)
                self._sync_folder(folder)  # also for the loser of put_new: False means that it is there for good
                return created
            except OSError as error:
                if error.errno not in _VANISHED or not tries_left:
                    raise _explain(verb, target, error) from error
        raise AssertionError("unreachable")

    def _write_tmp(self, tmp: str, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(tmp, flags, 0o666)
        except FileNotFoundError:
            _make_folders(os.path.dirname(tmp))
            descriptor = os.open(tmp, flags, 0o666)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)

    def _sync_folder(self, folder: str) -> None:
        """Make the names in `folder` durable, and once per folder those of its parents.

        The parents too because another process may have made them and died before it could.
        """
        inode = _fsync_folder(folder)
        if (folder, inode) in self._synced:
            return
        parent = folder
        while len(parent) > len(self.url):
            parent = os.path.dirname(parent)
            _fsync_folder(parent)
        self._synced.add((folder, inode))


def _replace(tmp: str, target: str) -> bool:
    os.replace(tmp, target)
    return True


def _link(tmp: str, target: str) -> bool:
    """Whether `target` is `tmp`, by link(2): it has one winner, also on NFS, and unlike O_EXCL never shows part."""
    try:
        os.link(tmp, target)
        return True
    except OSError as error:
        # An NFS client may send the call again after a lost reply, and hear "exists" about its own link.
        with suppress(OSError):
            if os.path.samefile(tmp, target):
                return True
        if isinstance(error, FileExistsError):
            return False
        raise


def _tmp_name(folder: str) -> str:
    return f"{folder}/{TMP_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"


def _make_folders(folder: str) -> None:
    """`mkdir -p`, with the parent of every new folder synced."""
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    _make_folders(parent)
    with suppress(FileExistsError):  # another process was faster; if it is a file, the write says ENOTDIR
        os.mkdir(folder)
    _fsync_folder(parent)


def _fsync_folder(folder: str) -> int:
    """Sync the names in `folder`; returns its inode."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_ino
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):  # some network file systems have no fsync of folders
            return os.fstat(descriptor).st_ino
        raise
    finally:
        os.close(descriptor)


def _explain(verb: str, target: str, error: OSError) -> StorageError:
    advice = _ADVICE.get(error.errno or 0, "check that the file system is mounted and writable")
    return StorageError(f"{verb} {target} failed: {error.strerror or error}; {advice}")
