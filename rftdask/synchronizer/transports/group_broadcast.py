"""Group broadcast: the rank that holds a file broadcasts it to other machines in a torch.distributed process group.

A group lives for one broadcast. Machines send join requests to the rendezvous server of the rank; requests that arrive
within a moment form one group with the rank as member 0, and later requests form the next group. A lost member leaves
no state behind: the other members of its group get an error at once, or at the deadline if it hangs, and join again.
The backend is gloo, from host memory to host memory, also if ranks use GPUs, since engines map the received files.

Invariants: every collective has a deadline; the receiver verifies every block. Sockets stay on the interface of the
Dask worker; like all sockets of torch they have no authentication.
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
from rftdask.synchronizer.manifest import FileEntry, block_numbers, block_span, check_block
from rftdask.synchronizer.node_cache import NodeCache, Transport
from rftdask.synchronizer.published import Published, read_published

log = logging.getLogger(__name__)

_ANSWER_S = 30.0
"""Seconds to wait for a member in a collective. A block of 64 MiB takes less on any network."""
_TRY_S = 1.0
"""Seconds per attempt to reach a rank, after which it is checked whether the rank still listens."""
_GATHER_S = 0.1
"""Seconds to collect join requests for one group. All machines follow one pointer, so they arrive together."""
_POLL_INTERVAL_S = 0.05
_JOIN_REQUESTS = "join-requests"

# torch exports its stores at run time only, so type checkers do not see them.
_dist: Any = dist


class RendezvousServer:
    """Accepts join requests for files in the memory of this rank's machine, and broadcasts them from its own threads.

    Example: InMemoryPublisher(storage, RendezvousServer(storage, "10.0.0.7").address)
    """

    def __init__(self, storage: Storage, host: str) -> None:
        """host: address of the interface to listen on."""
        listener = socket.create_server((host, 0), family=socket.getaddrinfo(host, None)[0][0])
        port = listener.getsockname()[1]
        self.address = f"{host}:{port}"
        self._storage, self._host, self._num_groups = storage, host, 0
        self._store = _store(self.address, is_master=True, master_listen_fd=listener.detach())
        # Daemon threads do not keep the process alive; waiting members notice its end.
        threading.Thread(target=self._watch, name="weights-rendezvous", daemon=True).start()

    def _watch(self) -> None:
        while True:
            if not self._store.queue_len(_JOIN_REQUESTS):
                time.sleep(_POLL_INTERVAL_S)
                continue
            time.sleep(_GATHER_S)
            groups: dict[tuple[int, str, str], list[str]] = {}
            while self._store.queue_len(_JOIN_REQUESTS):
                try:
                    version, content_hash, file, reply_key = json.loads(self._store.queue_pop(_JOIN_REQUESTS))
                except ValueError:  # not a machine of this run
                    continue
                groups.setdefault((version, content_hash, file), []).append(reply_key)
            for request, reply_keys in groups.items():
                self._num_groups += 1
                arguments = (f"group-{self._num_groups}", *request, reply_keys)
                threading.Thread(target=self._broadcast, args=arguments, name="weights-group", daemon=True).start()

    def _broadcast(self, name: str, version: int, content_hash: str, file: str, reply_keys: Sequence[str]) -> None:
        try:
            published = read_published(self._storage, version)
            if published is None or published.held is None or published.content_hash != content_hash:
                raise NotFoundError(f"version {version} is no longer in memory")
            copy = NodeCache.find(self._storage, published.part(file))
            if copy is None:
                raise NotFoundError(f"{file} of version {version} is not on the machine of its rank")
        except RftError as error:
            for reply_key in reply_keys:
                self._store.set(reply_key, json.dumps(["", 0, 0, str(error)]))
            return
        try:
            # A separate connection: a call that waits for a member holds the GIL, and would stop the whole rank.
            store = _store(self.address, is_master=False)
            for rank, reply_key in enumerate(reply_keys, 1):
                store.set(reply_key, json.dumps([name, rank, 1 + len(reply_keys), ""]))
            group = _group(name, store, 0, 1 + len(reply_keys), self._host)
            entry = dict(published.files)[file]
            with copy.files[0].open("rb") as opened:
                # A private mapping, since torch requires writable memory; nothing writes to it.
                mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            for number in block_numbers(entry):
                start, stop = block_span(entry, number)
                _broadcast(group, torch.frombuffer(mapped, dtype=torch.uint8, offset=start, count=stop - start))
        except RuntimeError as error:  # from torch: a member was lost or hangs; all members get it and join again
            log.warning("version %d did not reach all of %d machines: %s", version, len(reply_keys), error)
        finally:
            copy.close()


def group_transport(host: str) -> Transport:
    """Transport that joins the groups of ranks. host: address of this machine's interface."""

    def transport(published: Published, name: str, entry: FileEntry) -> Callable[[int], Data]:
        return BroadcastPeer(published.holder(name), host, published, name, entry).take

    return transport


class BroadcastPeer:
    """Receives one file. Joins a group at the first block, since a broadcast waits for all members."""

    def __init__(self, address: str, host: str, published: Published, name: str, entry: FileEntry) -> None:
        self._address, self._host, self._published = address, host, published
        self._name, self._entry = name, entry
        self._ready = threading.Condition()
        self._next = 0
        """Next block that the rank broadcasts. Negative: the group is lost."""
        self._group: Any = None

    def take(self, number: int) -> Data:
        """Receive and verify a block. Raises: NotFoundError: no rank sends it; WaitTimeout: a member is lost."""
        with self._ready:
            # Several threads call this; blocks arrive in order.
            if not self._ready.wait_for(lambda: self._next < 0 or self._next == number, 2 * _ANSWER_S):
                raise WaitTimeout(f"block {number} of {self._path} did not arrive within {2 * _ANSWER_S:.0f} s")
            if self._next < 0:
                raise WaitTimeout(f"{self._path} did not arrive: the group was lost")
            try:
                if self._group is None:
                    self._group = self._join()
                start, stop = block_span(self._entry, number)
                block = torch.empty(stop - start, dtype=torch.uint8)
                _broadcast(self._group, block)
                self._next += 1
            except BaseException as error:
                self._next, self._group = -1, None
                if isinstance(error, RuntimeError | OSError):  # from torch
                    text = f"{self._path} did not arrive from {self._address}: {str(error).partition('. ')[0]}"
                    raise WaitTimeout(text) from error
                raise
            finally:
                self._ready.notify_all()
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
            raise NotFoundError(f"cannot fetch {self._path} from {self._address}: {error}") from error
        reply_key = secrets.token_hex(16)
        request = [self._published.version, self._published.content_hash, self._name, reply_key]
        store.queue_push(_JOIN_REQUESTS, json.dumps(request))
        store.wait([reply_key], timedelta(seconds=_ANSWER_S))
        name, rank, size, refusal = json.loads(store.get(reply_key))
        with suppress(RuntimeError):
            store.delete_key(reply_key)
        if refusal:
            raise NotFoundError(f"cannot fetch {self._path} from {self._address}: {refusal}")
        return _group(name, store, rank, size, self._host)


def _store_of_another(address: str) -> Any:
    """Connect to a rank's store. Raises: OSError: nothing listens at `address`; RuntimeError: no response."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _ANSWER_S
    while True:
        # Checked before each short attempt: torch keeps trying for over a minute if nothing listens.
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
    """Broadcast from member 0 to all. Raises: RuntimeError: a member was lost or missed the deadline."""
    group.broadcast([block], _dist.BroadcastOptions()).wait()  # rootRank is 0
