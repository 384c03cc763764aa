"""Exchange: each rank reads its own rows of a batch from storage, then all give each other what they read.

So every shard is read about once, and every rank knows the whole batch: some bytes a token, next to nothing beside the
gradients, in return for which rows can be dealt for computing by their lengths, and advantages, masks and denominators
be those of the whole batch on every rank. Invariant: what `exchange` gives is, to the bit, what one rank would have
read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from rftdask.buffer.batch import Batch
from rftdask.buffer.ledger import LedgerEntry
from rftdask.trainer.ranks import Ranks

_UIDS = "uids"
_NUMBERS = ("groups", "rollouts")


def places_of(num_rows: int, rank: int, size: int) -> range:
    """The places in an entry that a rank reads: a run of neighbors, who often lie in the same shard."""
    return range(num_rows * rank // size, num_rows * (rank + 1) // size)


Read = Callable[[LedgerEntry, Sequence[int] | None], Batch]
"""As `BatchSource.read`."""


def read_together(entry: LedgerEntry, ranks: Ranks, read: Read) -> Batch:
    """The whole batch of an entry, of which this rank reads its places. Made by all ranks."""
    if ranks.size == 1:
        return read(entry, None)
    num_rows = sum(len(rows.rows) for rows in entry.use)
    places = places_of(num_rows, ranks.rank, ranks.size)
    # An entry without rows is read by rank 0, for the shapes of nothing.
    data = to_bytes(read(entry, places)) if len(places) or (ranks.leads and not num_rows) else b""
    return join_parts([from_bytes(part) for part in ranks.gather_bytes(data) if part])


def join_parts(parts: Sequence[Batch]) -> Batch:
    """The rows of all parts, in order; groups and rollouts are numbered through by first appearance."""
    joined: dict[str, Any] = {_UIDS: tuple(uid for part in parts for uid in part.uids)}
    for field in fields(Batch):
        values = [getattr(part, field.name) for part in parts]
        if field.name in _NUMBERS:
            joined[field.name] = _numbered([key for i, part in enumerate(parts) for key in _keys(field.name, part, i)])
        elif field.name != _UIDS:
            joined[field.name] = None if values[0] is None else np.concatenate(values)
    return Batch(**joined)


def _keys(name: str, part: Batch, number: int) -> list[tuple[str, int, int]]:
    """What a row's group or rollout is known by everywhere.

    A rollout's uid ends with its number and its turn; a dataset's rows have none, and no group of them is parted.
    """
    parted = 2 if name == "groups" else 1
    return [
        ("", number, int(own)) if expert else (uid.rsplit("/", parted)[0], 0, 0)
        for uid, own, expert in zip(part.uids, getattr(part, name), part.experts, strict=True)
    ]


def _numbered(keys: Sequence[tuple[str, int, int]]) -> np.ndarray:
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[key] for key in keys], dtype=np.int64)


def to_bytes(batch: Batch) -> bytes:
    arrays = {f.name: getattr(batch, f.name) for f in fields(Batch) if f.name != _UIDS}
    named = {name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None}
    return save({**named, _UIDS: np.frombuffer(json.dumps(batch.uids).encode(), np.uint8)})


def from_bytes(data: bytes) -> Batch:
    arrays = load(data)
    uids = tuple(json.loads(arrays.pop(_UIDS).tobytes()))
    return Batch(**arrays, uids=uids)
