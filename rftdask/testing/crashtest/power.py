"""Power loss at every system call of a short run: all roles die at once, and the disk keeps only synced data.

One run on a simulated disk yields a copy of the disk before each call. Each copy loses its power with several seeds,
and a new run continues from the remainder. Everything that a commit confirmed before the loss must exist after it.

A seed decides whether unsynced data is kept, lost or torn: the bytes of a file if `sync` was not called after the last
write, a name if its folder was not synced after the change. Each change of a folder is kept or lost atomically and
independently, so changes may survive out of order. Real file systems promise more than that.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial

from rftdask.buffer.log.shard import ShardName
from rftdask.errors import NotFoundError
from rftdask.storage.base import Data
from rftdask.storage.local import LocalStorage, Posix
from rftdask.testing.crashtest.ending import Ending, go_on, num_rows
from rftdask.testing.crashtest.figures import Figures
from rftdask.testing.crashtest.workload import Parts, Plan, Witness, run_all

_ROOT = "/run"
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
        """Copy of the disk, without open files, which a power loss closes."""
        disk = SimulatedDisk(sync_files=self.sync_files, sync_folders=self.sync_folders)
        disk._root = deepcopy(self._root)  # a file with two names remains one file
        return disk

    def after_power_loss(self, seed: int) -> SimulatedDisk:
        """Disk after the power is back. This disk does not change."""
        rng = random.Random(seed)
        share_kept = rng.choice((0.0, 0.5, 0.5, 1.0))  # include the extremes, which independent draws hardly ever reach
        settled: set[int] = set()

        def settle(node: _Node) -> None:
            if id(node) in settled:
                return  # a file may have two names
            settled.add(id(node))
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

    @contextmanager
    def _changing(self, call: str, path: str = "") -> Iterator[None]:
        with self.lock:  # also while `before_change` inspects the disk between two calls
            self.before_change(call, path)
            yield

    def create(self, path: str) -> int:
        with self._changing("create", path):
            file = _File()
            self._add(path, file)  # durable only after `sync_folder`
            self._open[number := next(_NUMBERS)] = file
            return number

    def write(self, descriptor: int, data: Data) -> None:
        with self._changing("write"):
            self._open[descriptor].data += data  # durable only after `sync`

    def sync(self, descriptor: int) -> None:
        with self._changing("sync"):
            if self.sync_files:
                self._open[descriptor].synced = self._open[descriptor].data

    def close(self, descriptor: int) -> None:
        del self._open[descriptor]

    def rename(self, source: str, target: str) -> None:
        assert os.path.dirname(source) == os.path.dirname(target), "storage renames within a folder only"
        with self._changing("rename", target):
            (folder, name), new_name = self._place(source), os.path.basename(target)
            if isinstance(folder.names.get(new_name), _Folder):
                raise _error(errno.EISDIR, target)
            # One change, as rename(2) promises: no crash leaves both names or none.
            folder.change({name: None, new_name: self._node(source)})

    def link(self, source: str, target: str) -> None:
        with self._changing("link", target):
            self._add(target, self._node(source))  # both names share the bytes and their durability

    def unlink(self, path: str) -> None:
        with self._changing("unlink", path):
            folder, name = self._place(path)
            if not isinstance(folder.names.get(name), _File):
                raise _error(errno.ENOENT, path)
            folder.change({name: None})

    def make_folder(self, path: str) -> None:
        with self._changing("make folder", path):
            self._add(path, _Folder())

    def remove_tree(self, path: str) -> None:
        """Remove a tree, deepest entries first, one change each; a power loss may leave any part."""
        node = self._node(path)
        for name in [*node.names] if isinstance(node, _Folder) else ():
            self.remove_tree(f"{path}/{name}")
        with self._changing("remove tree", path):
            folder, name = self._place(path)
            folder.change({name: None})

    def sync_folder(self, path: str) -> int:
        """Make all names in the folder durable. Returns the number of the folder, in place of an inode."""
        with self._changing("sync folder", path):
            folder = self._folder(path)
            if self.sync_folders:
                # Only the names; the bytes of each file need `sync`.
                folder.synced, folder.unsynced = dict(folder.names), []
            return folder.number

    # ---- calls that read the disk

    def read(self, path: str, start: int = 0, size: int | None = None) -> bytes:
        node = self._node(path)
        if isinstance(node, _Folder):
            raise _error(errno.EISDIR, path)
        return node.data[start : None if size is None else start + size]

    def scan(self, path: str) -> list[tuple[str, bool]]:
        with self.lock:
            return [(name, isinstance(node, _Folder)) for name, node in self._folder(path).names.items()]

    def is_folder(self, path: str) -> bool:
        with suppress(OSError):
            return isinstance(self._node(path), _Folder)
        return False

    def is_same_file(self, path: str, other: str) -> bool:
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

    def _add(self, path: str, node: _Node) -> None:
        folder, name = self._place(path)
        if name in folder.names:
            raise _error(errno.EEXIST, path)
        folder.change({name: node})


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)  # Python maps it to FileNotFoundError and its siblings


def lose_power(
    plan: Plan,
    seeds: range,
    *,
    every: int = 1,
    where: str = ".*",
    sync_files: bool = True,
    sync_folders: bool = True,
    parts: Parts | None = None,
) -> Figures:
    """Lose power before every `every`-th call that matches `where`, with each seed.

    where: pattern for calls such as "link /run/ledger/main/00000001.json". The arguments after it disable a protection.
    """
    order = "in their order" if plan.ordered else "as they come"
    figures = Figures("power", f"power losses: {len(seeds)} at each system call, batches taken {order}")
    disk, witness = SimulatedDisk(sync_files=sync_files, sync_folders=sync_folders), Witness()
    moments: list[tuple[str, SimulatedDisk, Witness]] = []  # the state before each system call
    disk.before_change = lambda call, path: moments.append((f"{call} {path}", disk.copy(), witness.copy()))
    run_all(lambda: LocalStorage(_ROOT, disk), plan, parts or Parts(), witness, seeds.start)
    figures.num_operations = len(moments)
    chosen = [number for number, (call, _, _) in enumerate(moments) if re.fullmatch(where, call)]
    for number in chosen[::every]:
        call, before, seen = moments[number]
        for seed in seeds:
            # An independent draw for each call.
            left = before.after_power_loss(seed * len(moments) + number)
            own = seen.copy()
            # Checked before the run continues: a writer would commit the same unit again and hide the loss.
            gone = [path for path in own.shards_acknowledged() if not _is_whole(LocalStorage(_ROOT, left), path)]
            if gone:
                problems = [f"{path} was committed and is now missing or torn" for path in gone]
                ending = Ending(problems, sum(map(num_rows, gone)))
            else:
                ending = go_on(partial(LocalStorage, _ROOT, left), plan, own, seed + 1000, parts)
            figures.add(f"power lost before call {number} ({call}), seed {seed}", ending, own)
    return figures


def _is_whole(storage: LocalStorage, path: str) -> bool:
    name = ShardName.try_parse(path.rpartition("/")[2])
    try:
        # By the checksum in its name, as readers do.
        return name is not None and zlib.crc32(storage.get(path)) == name.crc32
    except NotFoundError:
        return False
