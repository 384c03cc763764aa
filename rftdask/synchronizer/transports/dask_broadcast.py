"""Broadcast over Dask: in-memory versions travel between machines block by block, from one Dask worker to the next.

The explorers' machines form a binary tree below the machine that holds a file. Each machine fetches blocks from its
parent, which returns a block as soon as it has it. So the holder sends a version at most twice, whatever the number of
machines. This is the one exception to "weights never travel over Dask"; it uses Dask's keys and interface.

Invariants: the receiver verifies every block; if a parent dies, hangs or lacks the version, the next ancestor is asked,
and the holder last; every wait has a deadline. If the holder is lost, the engine requests files (engines/client.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from distributed import Worker
from distributed.protocol.serialize import to_serialize
from distributed.utils import sync

from rftdask.errors import NotFoundError, RftError
from rftdask.storage import Storage
from rftdask.storage.base import Data
from rftdask.synchronizer.manifest import FileEntry, check_block
from rftdask.synchronizer.node_cache import Transport, copy_name, held_block, place
from rftdask.synchronizer.published import Published

_OPERATION = "rftdask_weights_block"
_COMING_S = 2.0
"""Seconds to wait for a block that the parent is fetching, before the next ancestor is asked."""
_POLL_INTERVAL_S = 0.02
_ANSWER_S = 60.0
"""Seconds to wait for a response of at most 64 MiB. After that the other worker counts as hung."""


def serve_blocks(worker: Worker) -> None:
    """Serve blocks in this machine's memory to other workers. Idempotent."""
    worker.handlers[_OPERATION] = _answer


def dask_transport(storage: Storage, worker: Worker, peers: Sequence[str]) -> Transport:
    """Transport of a worker. peers: addresses of all explorer workers, including this one."""

    def transport(published: Published, name: str, entry: FileEntry) -> Callable[[int], Data]:
        holder = published.holder(name)
        copies = [copy_name(storage, whole) for whole in (published, published.part(name))]
        ask = partial(_ask, worker, copies=copies, file=name, asker=place())
        return partial(_take, ask, [*above(worker.address, peers), holder], f"{published.folder}/{name}", entry)

    return transport


def above(address: str, peers: Sequence[str]) -> list[str]:
    """Ancestors of `address` in a binary tree of the sorted peers, nearest first.

    Example: above("f", ["a", "b", "c", "d", "e", "f"]) == ["c", "a"]
    """
    order = sorted({*peers, address})
    number, ancestors = order.index(address), []
    while number:
        number = (number - 1) // 2
        ancestors.append(order[number])
    return ancestors


def _take(ask: Callable[..., bytes | None], sources: list[str], path: str, entry: FileEntry, number: int) -> Data:
    for source in list(sources):
        data = None
        try:
            data = ask(source, number=number)
            if data is not None:
                check_block(path, data, entry, number)
                return data
        except (OSError, TimeoutError, RftError):  # OSError includes Dask's broken connections
            with suppress(ValueError):  # another thread may have removed it already
                sources.remove(source)
    raise NotFoundError(f"no reachable worker holds block {number} of {path}; still reachable: {sources}")


def _ask(worker: Worker, source: str, *, copies: list[str], file: str, number: int, asker: str) -> bytes | None:
    """Block from another worker's memory. None: it has none. Raises: OSError, TimeoutError: no response."""

    async def ask() -> Mapping[str, Any] | None:
        call = getattr(worker.rpc(source), _OPERATION)
        return await asyncio.wait_for(call(copies=copies, file=file, number=number, asker=asker), _ANSWER_S)

    # A worker without the handler returns None: it does not serve yet.
    answer: Mapping[str, Any] | None = sync(worker.loop, ask, callback_timeout=2 * _ANSWER_S)
    return None if answer is None else answer["block"]


async def _answer(copies: list[str], file: str, number: int, asker: str) -> dict[str, Any]:
    deadline = time.monotonic() + _COMING_S
    while asker != await asyncio.to_thread(place):  # a worker of the asking machine is itself the one that fetches
        block = await asyncio.to_thread(held_block, copies, file, number)
        if isinstance(block, bytes):
            return {"block": to_serialize(block)}
        if not block or time.monotonic() > deadline:
            break
        await asyncio.sleep(_POLL_INTERVAL_S)
    return {"block": None}
