"""Process group: held versions on their way between machines, by a broadcast of the rank that holds a file.

A group lives for one broadcast. Machines that want a file knock at the door of its rank; those that come within a
moment are one group, in which the rank is the first member, and who comes later is in the next one. So there is nothing
that a lost member could leave half set up: the others of its group get an error at once, or at the deadline if it
hangs, and knock again. It is torch.distributed's gloo, from host memory to host memory, also where ranks have GPUs:
what a machine gets its engines map.

Invariants: no collective without a deadline; every block is verified by who gets it. Sockets stay on the interface of
the Dask worker; like all of torch's they know no keys.
"""

from __future__ import annotations

import json
import logging
import mmap
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rftdask.errors import NotFoundError, RftError, WaitTimeout
from rftdask.storage import Storage
from rftdask.storage.base import Data
from rftdask.synchronizer.manifest import BLOCK_BYTES, FileEntry, block_numbers, check_block
from rftdask.synchronizer.node_cache import NodeCopy, Transport
from rftdask.synchronizer.published import Published, read_published

log = logging.getLogger(__name__)

_ANSWER_S = 30.0
"""For a member to take part in what the others wait for: a block is 64 MiB, which takes less on any network."""
_TRY_S = 1.0
"""For one try to reach a rank, after which it is looked whether it still listens."""
_GATHER_S = 0.1
"""In which machines that knock are one group: they all look at one pointer, so they come together."""
_LOOK_S = 0.05
_KNOCKS = "knocks"

# torch exports its stores at run time, and says so to no type checker.
_dist: Any = dist


class Door:
    """Where a rank takes who wants a file that is held on its machine. Threads of its own do the rest.

    Example: Holder(storage, Door(storage, "10.0.0.7").address)
    """

    def __init__(self, storage: Storage, host: str) -> None:
        """host: address of the interface on which others come."""
        own = socket.create_server((host, 0), family=socket.getaddrinfo(host, None)[0][0])
        port = own.getsockname()[1]
        self.address = f"{host}:{port}"
        self._storage, self._host, self._num_groups = storage, host, 0
        self._store = _store(self.address, is_master=True, master_listen_fd=own.detach())
        # Daemon, like those of the groups: a process that must end ends, and who waits for it notices.
        threading.Thread(target=self._watch, name="weights-door", daemon=True).start()

    def _watch(self) -> None:
        while True:
            if not self._store.queue_len(_KNOCKS):
                time.sleep(_LOOK_S)
                continue
            time.sleep(_GATHER_S)
            groups: dict[tuple[int, str, str], list[str]] = {}
            while self._store.queue_len(_KNOCKS):
                try:
                    version, content_hash, file, seat = json.loads(self._store.queue_pop(_KNOCKS))
                except ValueError:  # no machine of this run
                    continue
                groups.setdefault((version, content_hash, file), []).append(seat)
            for wanted, seats in groups.items():
                self._num_groups += 1
                arguments = (f"group-{self._num_groups}", *wanted, seats)
                threading.Thread(target=self._give, args=arguments, name="weights-group", daemon=True).start()

    def _give(self, name: str, version: int, content_hash: str, file: str, seats: Sequence[str]) -> None:
        try:
            published = read_published(self._storage, version)
            if published is None or published.held is None or published.content_hash != content_hash:
                raise NotFoundError(f"version {version} is held no more")
            copy = NodeCopy.find(self._storage, published.part(file))
            if copy is None:
                raise NotFoundError(f"{file} of version {version} is not on the machine of its rank")
        except RftError as error:
            for seat in seats:
                self._store.set(seat, json.dumps(["", 0, 0, str(error)]))
            return
        try:
            # Of its own: a call on one that waits for a member holds Python's lock, and with it the whole rank.
            store = _store(self.address, is_master=False)
            for rank, seat in enumerate(seats, 1):
                store.set(seat, json.dumps([name, rank, 1 + len(seats), ""]))
            group = _group(name, store, 0, 1 + len(seats), self._host)
            entry = dict(published.files)[file]
            with copy.files[0].open("rb") as opened:
                # Private, since torch wants memory that could be written; nobody writes it.
                mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            for number in block_numbers(entry):
                start, size = number * BLOCK_BYTES, _size(entry, number)
                _broadcast(group, torch.frombuffer(mapped, dtype=torch.uint8, offset=start, count=size))
        except RuntimeError as error:  # torch's, for a member that was lost or hangs; each has it, and comes again
            log.warning("version %d did not reach all of %d machines: %s", version, len(seats), error)
        finally:
            copy.close()


def over_group(host: str) -> Transport:
    """The transport of a process that joins the groups of ranks. host: address of its interface to them."""

    def transport(published: Published, name: str, entry: FileEntry) -> Callable[[int], Data]:
        address = dict(published.held.addresses).get(name) if published.held is not None else None
        if address is None:
            raise NotFoundError(f"{published.folder}/{name} is held by no rank that takes others into a group")
        return _Member(address, host, published, name, entry).take

    return transport


class _Member:
    """One who wants a file. It joins when the first block is asked for: a broadcast waits for all."""

    def __init__(self, address: str, host: str, published: Published, name: str, entry: FileEntry) -> None:
        self._address, self._host, self._published = address, host, published
        self._name, self._entry = name, entry
        self._turn = threading.Condition()
        self._next = 0
        """The block that the rank broadcasts next; below 0: the group is lost."""
        self._group: Any = None

    def take(self, number: int) -> Data:
        """Raises: NotFoundError: nobody takes it into a group; WaitTimeout: a member was lost, or hangs."""
        with self._turn:
            # Several threads ask, in the order of the blocks, in which they come.
            if not self._turn.wait_for(lambda: self._next < 0 or self._next == number, 2 * _ANSWER_S):
                raise WaitTimeout(f"block {number} of {self._path} did not come in {2 * _ANSWER_S:.0f} s")
            if self._next < 0:
                raise WaitTimeout(f"{self._path} did not come: the group was lost")
            try:
                if self._group is None:
                    self._group = self._join()
                block = torch.empty(_size(self._entry, number), dtype=torch.uint8)
                _broadcast(self._group, block)
                self._next += 1
            except BaseException as error:
                self._next, self._group = -1, None
                if isinstance(error, RuntimeError | OSError):  # torch's
                    text = f"{self._path} did not come from {self._address}: {str(error).partition('. ')[0]}"
                    raise WaitTimeout(text) from error
                raise
            finally:
                self._turn.notify_all()
        data: memoryview = block.numpy().data
        check_block(self._path, data, self._entry, number)
        return data

    @property
    def _path(self) -> str:
        return f"{self._published.folder}/{self._name}"

    def _join(self) -> Any:
        try:
            store = _store_of_another(self._address)
        except OSError as error:
            raise NotFoundError(f"{self._path} is not to be had from {self._address}: {error}") from error
        seat = secrets.token_hex(16)
        knock = [self._published.version, self._published.content_hash, self._name, seat]
        store.queue_push(_KNOCKS, json.dumps(knock))
        store.wait([seat], timedelta(seconds=_ANSWER_S))
        name, rank, size, refusal = json.loads(store.get(seat))
        with suppress(RuntimeError):
            store.delete_key(seat)
        if refusal:
            raise NotFoundError(f"{self._path} is not to be had from {self._address}: {refusal}")
        return _group(name, store, rank, size, self._host)


def _store_of_another(address: str) -> Any:
    """Raises: OSError: nobody listens there any more; RuntimeError: who listens does not answer."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _ANSWER_S
    while True:
        # Looked at between short tries: torch's would go on for longer than a minute where nobody is any more.
        socket.create_connection((host, int(port)), _ANSWER_S).close()
        try:
            store = _store(address, _TRY_S, is_master=False)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
        else:
            store.set_timeout(timedelta(seconds=_ANSWER_S))
            return store


def _store(address: str, timeout_s: float = 0.0, **more: Any) -> Any:
    host, _, port = address.rpartition(":")
    timeout = timedelta(seconds=timeout_s or _ANSWER_S)
    return _dist.TCPStore(host, int(port), timeout=timeout, wait_for_workers=False, **more)


def _group(name: str, store: Any, rank: int, size: int, host: str) -> Any:
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=_ANSWER_S)
    return _dist.ProcessGroupGloo(_dist.PrefixStore(name, store), rank, size, options)


def _broadcast(group: Any, block: Tensor) -> None:
    """From the first member to all. Raises: RuntimeError: one was lost, or did not answer in time."""
    group.broadcast([block], _dist.BroadcastOptions()).wait()  # rootRank is 0


def _size(entry: FileEntry, number: int) -> int:
    return min(BLOCK_BYTES, entry.size_bytes - number * BLOCK_BYTES)
