"""Dask tree: held versions on their way between machines, block by block, from one Dask worker's memory to the next.

The machines of the explorers are a tree below the one that holds a file: each asks the one above it, which gives a
block as soon as it has it, or is asked to wait for it. So the holder gives a version twice, however many there are. It
is the one exception to "weights never travel over Dask", and takes the keys and the interface that Dask has.

Invariants: every block is verified by who gets it; whoever is above may die, hang or know nothing of the version: then
the next one above is asked, and the holder last; no wait is without a deadline. What is left of a lost holder's
version is not asked for: who cannot get it asks for files (engines/client.py).
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
"""For a block that the machine above is about to get; after that the next one above is asked."""
_LOOK_S = 0.02
_ANSWER_S = 60.0
"""For an answer, which is 64 MiB at most; longer says that the other hangs."""


def serve_blocks(worker: Worker) -> None:
    """Give blocks that are on this machine to other workers, from here on. Idempotent."""
    worker.handlers[_OPERATION] = _answer


def over_dask(storage: Storage, worker: Worker, peers: Sequence[str]) -> Transport:
    """The transport of a worker. peers: addresses of all workers of explorers, this one's among them."""

    def transport(published: Published, name: str, entry: FileEntry) -> Callable[[int], Data]:
        holder = dict(published.held.addresses).get(name) if published.held is not None else None
        if holder is None:
            raise NotFoundError(f"{published.folder}/{name} is held by nobody that Dask's workers could ask")
        copies = [copy_name(storage, whole) for whole in (published, published.part(name))]
        ask = partial(_ask, worker, copies=copies, file=name, asker=place())
        return partial(_take, ask, [*above(worker.address, peers), holder], f"{published.folder}/{name}", entry)

    return transport


def above(address: str, peers: Sequence[str]) -> list[str]:
    """The peers above one of them in a binary tree in the order of their addresses, the nearest first.

    Example: above("f", ["a", "b", "c", "d", "e", "f"]) == ["c", "a"]
    """
    order = sorted({*peers, address})
    number, found = order.index(address), []
    while number:
        number = (number - 1) // 2
        found.append(order[number])
    return found


def _take(ask: Callable[..., bytes | None], sources: list[str], path: str, entry: FileEntry, number: int) -> Data:
    for source in list(sources):
        data = None
        try:
            data = ask(source, number=number)
            if data is not None:
                check_block(path, data, entry, number)
                return data
        except (OSError, TimeoutError, RftError):  # of OSError Dask's broken connections are kinds
            with suppress(ValueError):  # another thread has found it out, too
                sources.remove(source)
    raise NotFoundError(f"block {number} of {path} is in the memory of no worker that could be asked: {sources}")


def _ask(worker: Worker, source: str, *, copies: list[str], file: str, number: int, asker: str) -> bytes | None:
    """What a worker has of a block; None: nothing. Raises: OSError, TimeoutError: it does not answer."""

    async def ask() -> Mapping[str, Any] | None:
        call = getattr(worker.rpc(source), _OPERATION)
        return await asyncio.wait_for(call(copies=copies, file=file, number=number, asker=asker), _ANSWER_S)

    # None of a worker that does not know the call: it has not begun to serve.
    answer: Mapping[str, Any] | None = sync(worker.loop, ask, callback_timeout=2 * _ANSWER_S)
    return None if answer is None else answer["block"]


async def _answer(copies: list[str], file: str, number: int, asker: str) -> dict[str, Any]:
    deadline = time.monotonic() + _COMING_S
    while asker != await asyncio.to_thread(place):  # on its own machine it is the one who brings the version there
        found = await asyncio.to_thread(held_block, copies, file, number)
        if isinstance(found, bytes):
            return {"block": to_serialize(found)}
        if not found or time.monotonic() > deadline:
            break
        await asyncio.sleep(_LOOK_S)
    return {"block": None}
