"""Posix: the calls of the operating system that local storage is made of, and nothing else.

It knows no promise and no order; `LocalStorage` does. It is the seam at which crash tests stand: one implementation
stops the process between two calls, another is a disk that forgets what was not synced.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from contextlib import suppress

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class Posix:
    """The real calls. Each raises OSError as the system does; paths are absolute."""

    # ---- what changes the disk

    def create(self, path: str) -> int:
        """Descriptor of a new, empty file."""
        return os.open(path, _NEW_FILE, 0o666)

    def write(self, descriptor: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    def sync(self, descriptor: int) -> None:
        """Make the bytes written so far survive a power loss; says nothing of the name."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: str, target: str) -> None:
        """Give the file or folder at `source` the name `target`, in place of a file that has it."""
        os.replace(source, target)

    def link(self, source: str, target: str) -> None:
        """Give the file a second name. Raises: FileExistsError: the name is taken."""
        os.link(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def make_folder(self, path: str) -> None:
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

    # ---- what only looks

    def read(self, path: str) -> bytes:
        with open(path, "rb", buffering=0) as file:
            return file.read()

    def scan(self, path: str) -> list[tuple[str, bool]]:
        """(name, whether it is a folder) of everything directly in a folder."""
        with os.scandir(path) as entries:
            return [(entry.name, entry.is_dir()) for entry in entries]

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def is_same_file(self, path: str, other: str) -> bool:
        with suppress(OSError):
            return os.path.samefile(path, other)
        return False
