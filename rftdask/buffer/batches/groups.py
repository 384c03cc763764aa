"""Groups: which rows of a shard belong together, and where their task is in the explore step. Pure; no storage.

Invariant: rows of a group lie together in one shard, and a group is found at the place of its task in the explore step,
whichever shard it is in: so a group committed twice is known as such. No Python loop runs over rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from rftdask.buffer.batches.batch import GROUP_KEY, numbers_of
from rftdask.buffer.batches.selection import Group
from rftdask.buffer.log.schema import Status
from rftdask.buffer.log.shard import ShardName

_TRAINABLE = frozenset(status.value for status in Status if status.trainable)


def groups_of_shard(table: pa.Table, name: ShardName, tasks_per_unit: int) -> list[Group]:
    """Find the groups of a shard, in the order of its tasks. tasks_per_unit: tasks of a whole work unit."""
    starts = _group_starts(table)
    if not len(starts):
        return []
    # As codes of few names: comparing numbers of whole columns at once is what keeps Python out of the rows.
    statuses = table.column("status").combine_chunks().dictionary_encode()
    names, codes = statuses.dictionary.to_pylist(), numbers_of(statuses.indices)
    good = np.isin(codes, [code for code, status in enumerate(names) if status in _TRAINABLE])
    versions = numbers_of(table.column("min_policy_version"))
    # Per group, in one sweep of numpy: the oldest version of its good rows, and how many are good.
    oldest = np.minimum.reduceat(np.where(good, versions, np.iinfo(np.int64).max), starts)
    num_good = np.add.reduceat(good.astype(np.int64), starts)
    ends = np.append(starts[1:], len(table))
    # A whole unit has all its tasks in order; a part says in its name which it has.
    slots = range(len(starts)) if name.part is None else name.part.slots
    groups = []
    for slot, start, end, count, version in zip(
        slots, starts.tolist(), ends.tolist(), num_good.tolist(), oldest.tolist(), strict=True
    ):
        rows = tuple(range(start, end))
        others: tuple[tuple[str, tuple[int, ...]], ...] = ()
        if count < end - start:  # rare: most groups have no failed rollout
            is_good, own = good[start:end], codes[start:end]
            bad = sorted((names[code], code) for code in np.unique(own[~is_good]).tolist())
            rows = tuple((np.flatnonzero(is_good) + start).tolist())
            others = tuple((status, tuple((np.flatnonzero(own == code) + start).tolist())) for status, code in bad)
        position = (name.explore_step, name.unit * tasks_per_unit + slot)
        groups.append(Group(position, name.text, rows, others, version if count else 0))
    return groups


def _group_starts(table: pa.Table) -> np.ndarray:
    """Number of the first row of each group."""
    changes = np.zeros(len(table), bool)
    # A slice, so that a table without rows is no special case.
    changes[:1] = True
    for name in GROUP_KEY:
        codes = numbers_of(table.column(name).combine_chunks().dictionary_encode().indices)
        # A group ends where any of the columns changes from one row to the next.
        changes[1:] |= codes[1:] != codes[:-1]
    return np.flatnonzero(changes)


def group_numbers(table: pa.Table) -> np.ndarray:
    """[N] int64 number of each row's group within the shard; rows of a group lie together."""
    starts = np.zeros(len(table), np.int64)
    starts[_group_starts(table)[1:]] = 1
    return np.cumsum(starts)


def group_slots(table: pa.Table, name: ShardName, tasks_per_unit: int) -> np.ndarray:
    """[N] int64 place of each row's group in its explore step, as in `groups_of_shard`."""
    numbers = group_numbers(table)
    # A part says in its name which tasks of the unit its groups are of.
    slots = numbers if name.part is None else np.asarray(name.part.slots, np.int64)[numbers]
    return slots + name.unit * tasks_per_unit


def first_copies(shards: Iterable[tuple[ShardName, pa.Table]]) -> list[pa.Table]:
    """The rows of these shards without the groups that an earlier one of them holds."""
    seen: set[tuple[int, int, int]] = set()
    tables = []
    for name, table in shards:
        numbers = group_numbers(table)
        # Of a whole unit the groups are numbered from 0; a part names the slots of its own.
        slots = name.part.slots if name.part is not None else range(int(numbers[-1]) + 1 if len(numbers) else 0)
        keys = [(name.explore_step, name.unit, slot) for slot in slots]
        new = [number for number, key in enumerate(keys) if key not in seen]
        tables.append(table if len(new) == len(keys) else table.filter(pa.array(np.isin(numbers, new))))
        seen.update(keys)
    return tables
