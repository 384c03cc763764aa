"""Exchange: each rank reads its own rows of a batch from storage, then all give each other what they read.

So every shard is read about once, and every rank knows the whole batch: some bytes a token, next to nothing beside the
gradients, in return for which rows can be dealt for computing by their lengths, and advantages, masks and denominators
be those of the whole batch on every rank. Invariant: the batch is, to the bit, what one rank would have read, but for
the numbers of states, which are compared within a group alone.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from rftdask.buffer.batches.batch import TrainingBatch
from rftdask.buffer.batches.ledger import LedgerEntry
from rftdask.trainer.ranks import Ranks

_UIDS = "uids"
_NUMBERS = ("groups", "rollouts")
_UNKNOWN = {"baselines": np.nan, "states": -1, "turn_rewards": 0.0}
"""Of rows whose part of the batch has none, where others have."""


def places_of(entry: LedgerEntry, rank: int, size: int) -> range:
    """The places in an entry that a rank reads: a run of neighbors, who often lie in the same shard, and whole groups,
    each of which is one item of `use`. Rows of a dataset may be parted anywhere.
    """
    ends = [0]
    for rows in entry.use:
        last = ends[-1]
        ends += [last + 1 + i for i in range(len(rows.rows))] if rows.of_dataset else [last + len(rows.rows)]
    first, after = (ends[bisect_right(ends, ends[-1] * part // size) - 1] for part in (rank, rank + 1))
    return range(first, after)


Read = Callable[[LedgerEntry, Sequence[int] | None], TrainingBatch]
"""As `BatchSource.read`."""


def read_together(entry: LedgerEntry, ranks: Ranks, read: Read) -> TrainingBatch:
    """The whole batch of an entry, of which this rank reads its places. Made by all ranks."""
    if ranks.size == 1:
        return read(entry, None)
    places = places_of(entry, ranks.rank, ranks.size)
    # An entry without rows is read by rank 0, for the shapes of nothing.
    nothing = not any(rows.rows for rows in entry.use)
    data = to_bytes(read(entry, places)) if len(places) or (ranks.leads and nothing) else b""
    return join_parts([from_bytes(part) for part in ranks.gather_bytes(data) if part])


def join_parts(parts: Sequence[TrainingBatch]) -> TrainingBatch:
    """The rows of all parts, in order; groups and rollouts are numbered through by first appearance."""
    joined: dict[str, Any] = {_UIDS: tuple(uid for part in parts for uid in part.uids)}
    for field in fields(TrainingBatch):
        values = [getattr(part, field.name) for part in parts]
        if field.name in _NUMBERS:
            joined[field.name] = _numbered([key for i, part in enumerate(parts) for key in _keys(field.name, part, i)])
        elif field.name == "states":
            joined[field.name] = _joined(_apart(values), parts, _UNKNOWN[field.name])
        elif field.name != _UIDS:
            joined[field.name] = _joined(values, parts, _UNKNOWN.get(field.name))
    return TrainingBatch(**joined)


def _joined(
    values: Sequence[np.ndarray | None], parts: Sequence[TrainingBatch], unknown: float | None
) -> np.ndarray | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    kind = known[0].dtype
    return np.concatenate(
        [np.full(len(part), unknown, kind) if v is None else v for v, part in zip(values, parts, strict=True)]
    )


def _apart(values: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """Each part's numbers after those of the parts before it; -1 stays."""
    found: list[np.ndarray | None] = []
    begin = 0
    for value in values:
        found.append(None if value is None else np.where(value < 0, value, value + begin))
        begin += 0 if value is None or not len(value) else int(value.max()) + 1
    return found


def _keys(name: str, part: TrainingBatch, number: int) -> list[tuple[str, int, int]]:
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


def to_bytes(batch: TrainingBatch) -> bytes:
    arrays = {f.name: getattr(batch, f.name) for f in fields(TrainingBatch) if f.name != _UIDS}
    named = {name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None}
    return save({**named, _UIDS: np.frombuffer(json.dumps(batch.uids).encode(), np.uint8)})


def from_bytes(data: bytes) -> TrainingBatch:
    arrays = load(data)
    uids = tuple(json.loads(arrays.pop(_UIDS).tobytes()))
    return TrainingBatch(**arrays, uids=uids)
