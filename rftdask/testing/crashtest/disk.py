"""Disk: a simulated disk below local storage that keeps only synced data over a power loss.

A seed decides whether unsynced data is kept, lost or torn: the bytes of a file if `sync` was not called after the last
write, a name if its folder was not synced after the change. Each change of a folder is kept or lost atomically and
independently, so changes may survive out of order. Real file systems promise more than that.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from rftdask.storage.base import Data
from rftdask.storage.local import Posix

Call = ParamSpec("Call")
Result = TypeVar("Result")
_NUMBERS = itertools.count(1)
"""Inodes of folders and descriptors of files. Numbers are never reused, so no object is mistaken for an older one."""


@dataclass(eq=False)
class _File:
    data: bytes = b""
    synced: bytes = b""


@dataclass(eq=False)
class _Folder:
    number: int = field(default_factory=lambda: next(_NUMBERS))
    names: dict[str, _Node] = field(default_factory=dict)
    synced: dict[str, _Node] = field(default_factory=dict)
    unsynced: list[dict[str, _Node | None]] = field(default_factory=list)
    """Changes since the last sync, in order. None: the name is removed."""

    def change(self, names: dict[str, _Node | None]) -> None:
        """Change several names atomically; a power loss keeps all of the change or none."""
        _apply(self.names, names)
        self.unsynced.append(names)


_Node = _File | _Folder


def _apply(names: dict[str, _Node], change: dict[str, _Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _alone(
    call: Callable[Concatenate[SimulatedDisk, Call], Result],
) -> Callable[Concatenate[SimulatedDisk, Call], Result]:
    """Serialize calls, including the time in which `before_change` inspects the disk between two calls."""

    @wraps(call)
    def alone(disk: SimulatedDisk, /, *args: Call.args, **kwargs: Call.kwargs) -> Result:
        with disk.lock:
            return call(disk, *args, **kwargs)

    return alone


class SimulatedDisk(Posix):
    """Simulated disk for `LocalStorage("/run", SimulatedDisk())`. Safe to use from threads.

    sync_files, sync_folders: False turns the sync calls into no-ops.
    """

    def __init__(self, *, sync_files: bool = True, sync_folders: bool = True) -> None:
        self.sync_files = sync_files
        self.sync_folders = sync_folders
        self.before_change: Callable[[str, str], None] = lambda call, path: None
        """Called with (call, path) before each change. May raise."""
        self.lock = threading.RLock()
        self._root = _Folder()
        self._open: dict[int, _File] = {}

    def copy(self) -> SimulatedDisk:
        """Copy of the disk, without open files."""
        disk = SimulatedDisk(sync_files=self.sync_files, sync_folders=self.sync_folders)
        # Open files are not copied, since a power loss closes them.
        disk._root = deepcopy(self._root)  # a file with two names remains one file
        return disk

    def after_power_loss(self, seed: int) -> SimulatedDisk:
        """Disk after the power is back. This disk does not change."""
        rng = random.Random(seed)
        share_kept = rng.choice((0.0, 0.5, 0.5, 1.0))  # include the extremes, which independent draws hardly ever reach
        found: set[int] = set()

        def settle(node: _Node) -> None:
            if id(node) in found:
                return  # a file may have two names
            found.add(id(node))
            if isinstance(node, _File):
                if node.data != node.synced and rng.random() >= share_kept:
                    cut = rng.randrange(len(node.data) + 1)
                    # A file system may grow a file before it writes the blocks.
                    whole_length_but_zeros = node.data[:cut] + bytes(len(node.data) - cut)
                    node.data = rng.choice((node.synced, node.data[:cut], whole_length_but_zeros))
                node.synced = node.data
                return
            # Name changes are kept or lost independently, since a journal may write them in any order.
            for change in node.unsynced:
                if rng.random() < share_kept:
                    _apply(node.synced, change)
            node.names, node.unsynced = dict(node.synced), []
            for below in node.names.values():
                settle(below)

        disk = self.copy()
        settle(disk._root)
        return disk

    # ---- calls that change the disk

    @_alone
    def create(self, path: str) -> int:
        """Create a file. The name is visible at once and durable after `sync_folder`."""
        self.before_change("create", path)
        folder, name = self._place(path)
        if name in folder.names:
            raise _error(errno.EEXIST, path)
        file = _File()
        folder.change({name: file})
        self._open[number := next(_NUMBERS)] = file
        return number

    @_alone
    def write(self, descriptor: int, data: Data) -> None:
        """Append bytes. Readers see them at once."""
        self.before_change("write", "")
        self._open[descriptor].data += data  # durable only after `sync`

    @_alone
    def sync(self, descriptor: int) -> None:
        """Make the bytes durable, under whatever name survives."""
        self.before_change("sync", "")
        if self.sync_files:
            self._open[descriptor].synced = self._open[descriptor].data

    @_alone
    def close(self, descriptor: int) -> None:
        """Drop the descriptor. Makes nothing durable."""
        del self._open[descriptor]

    @_alone
    def rename(self, source: str, target: str) -> None:
        """Rename atomically: a power loss leaves both names as before or both as after."""
        self.before_change("rename", target)
        folder, name = self._place(source)
        if name not in folder.names:
            raise _error(errno.ENOENT, source)
        if isinstance(folder.names.get(os.path.basename(target)), _Folder):
            raise _error(errno.EISDIR, target)
        assert os.path.dirname(source) == os.path.dirname(target), "storage renames within a folder only"
        # One change, as rename(2) promises: no crash leaves both names or none.
        folder.change({name: None, os.path.basename(target): folder.names[name]})

    @_alone
    def link(self, source: str, target: str) -> None:
        """Add a second name for a file. Both share the bytes and their durability."""
        self.before_change("link", target)
        folder, name = self._place(target)
        if name in folder.names:
            raise _error(errno.EEXIST, target)
        folder.change({name: self._node(source)})

    @_alone
    def unlink(self, path: str) -> None:
        """Remove a name. Raises: FileNotFoundError."""
        self.before_change("unlink", path)
        folder, name = self._place(path)
        if not isinstance(folder.names.get(name), _File):
            raise _error(errno.ENOENT, path)
        folder.change({name: None})

    @_alone
    def make_folder(self, path: str) -> None:
        """Create a folder. Raises: FileExistsError; FileNotFoundError: its parent does not exist."""
        self.before_change("make folder", path)
        folder, name = self._place(path)
        if name in folder.names:
            raise _error(errno.EEXIST, path)
        folder.change({name: _Folder()})

    @_alone
    def remove_tree(self, path: str) -> None:
        """Remove a tree, deepest entries first, one change each; a power loss may leave any part."""
        node = self._node(path)
        for name in [*node.names] if isinstance(node, _Folder) else ():
            self.remove_tree(f"{path}/{name}")
        self.before_change("remove tree", path)
        folder, name = self._place(path)
        folder.change({name: None})

    @_alone
    def sync_folder(self, path: str) -> int:
        """Make all names in the folder durable. Returns the number of the folder, in place of an inode."""
        self.before_change("sync folder", path)
        folder = self._folder(path)
        if self.sync_folders:
            # Only the names; the bytes of each file need `sync`.
            folder.synced, folder.unsynced = dict(folder.names), []
        return folder.number

    # ---- calls that read the disk

    def read(self, path: str, start: int = 0, size: int | None = None) -> bytes:
        """Written bytes, synced or not. Raises: IsADirectoryError, FileNotFoundError."""
        node = self._node(path)
        if isinstance(node, _Folder):
            raise _error(errno.EISDIR, path)
        return node.data[start : None if size is None else start + size]

    @_alone
    def scan(self, path: str) -> list[tuple[str, bool]]:
        """Names in a folder, unsorted, as from the system."""
        return [(name, isinstance(node, _Folder)) for name, node in self._folder(path).names.items()]

    def is_folder(self, path: str) -> bool:
        """True if the path is a folder. False if it does not exist."""
        with suppress(OSError):
            return isinstance(self._node(path), _Folder)
        return False

    def is_same_file(self, path: str, other: str) -> bool:
        """True if both names refer to one file. False if one does not exist."""
        with suppress(OSError):
            return self._node(path) is self._node(other)
        return False

    def _node(self, path: str) -> _Node:
        node: _Node = self._root
        for name in path.strip("/").split("/") if path.strip("/") else ():
            if isinstance(node, _File):
                raise _error(errno.ENOTDIR, path)
            if name not in node.names:
                raise _error(errno.ENOENT, path)
            node = node.names[name]
        return node

    def _folder(self, path: str) -> _Folder:
        node = self._node(path)
        if isinstance(node, _File):
            raise _error(errno.ENOTDIR, path)
        return node

    def _place(self, path: str) -> tuple[_Folder, str]:
        return self._folder(os.path.dirname(path)), os.path.basename(path)


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)  # Python maps it to FileNotFoundError and its siblings
