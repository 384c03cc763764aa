"""Groups: which rows of a shard belong together, and the slot of their task in the explore step. Pure; no storage.

Invariant: the rows of a group are adjacent in one shard, and a group is identified by the slot of its task in the
explore step, in whichever shard it is. So a group that was committed twice is recognized. No Python loop runs over
rows.
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
    """Return the groups of a shard, in the order of its tasks. tasks_per_unit: tasks of a whole work unit."""
    starts = _group_starts(table)
    if not len(starts):
        return []
    # Dictionary codes: statuses are compared as whole columns of numbers.
    statuses = table.column("status").combine_chunks().dictionary_encode()
    names, codes = statuses.dictionary.to_pylist(), numbers_of(statuses.indices)
    good = np.isin(codes, [code for code, status in enumerate(names) if status in _TRAINABLE])
    versions = numbers_of(table.column("min_policy_version"))
    # Per group: the oldest version of its trainable rows, and their number.
    oldest = np.minimum.reduceat(np.where(good, versions, np.iinfo(np.int64).max), starts)
    num_good = np.add.reduceat(good.astype(np.int64), starts)
    ends = np.append(starts[1:], len(table))
    # A whole unit has all its tasks in order; the name of a part lists its tasks.
    slots = range(len(starts)) if name.part is None else name.part.slots
    groups = []
    for slot, start, end, count, version in zip(
        slots, starts.tolist(), ends.tolist(), num_good.tolist(), oldest.tolist(), strict=True
    ):
        rows = tuple(range(start, end))
        others: tuple[tuple[str, tuple[int, ...]], ...] = ()
        if count < end - start:  # rare: most groups have no failed rollout
            is_good, group_codes = good[start:end], codes[start:end]
            bad = sorted((names[code], code) for code in np.unique(group_codes[~is_good]).tolist())
            rows = tuple((np.flatnonzero(is_good) + start).tolist())
            others = tuple(
                (status, tuple((np.flatnonzero(group_codes == code) + start).tolist())) for status, code in bad
            )
        position = (name.explore_step, name.unit * tasks_per_unit + slot)
        groups.append(Group(position, name.text, rows, others, version if count else 0))
    return groups


def _group_starts(table: pa.Table) -> np.ndarray:
    """Return the number of the first row of each group."""
    changes = np.zeros(len(table), bool)
    changes[:1] = True  # a slice, which an empty table also has
    for name in GROUP_KEY:
        codes = numbers_of(table.column(name).combine_chunks().dictionary_encode().indices)
        changes[1:] |= codes[1:] != codes[:-1]
    return np.flatnonzero(changes)


def group_numbers(table: pa.Table) -> np.ndarray:
    """Return the number of each row's group within the shard, [N] int64."""
    starts = np.zeros(len(table), np.int64)
    starts[_group_starts(table)[1:]] = 1
    return np.cumsum(starts)


def group_slots(table: pa.Table, name: ShardName, tasks_per_unit: int) -> np.ndarray:
    """Return the slot of each row's group in its explore step, as in `groups_of_shard`; [N] int64."""
    numbers = group_numbers(table)
    slots = numbers if name.part is None else np.asarray(name.part.slots, np.int64)[numbers]
    return slots + name.unit * tasks_per_unit


def first_copies(shards: Iterable[tuple[ShardName, pa.Table]]) -> list[pa.Table]:
    """Return the rows of each shard, without the groups that an earlier one of these shards holds."""
    seen: set[tuple[int, int, int]] = set()
    tables = []
    for name, table in shards:
        numbers = group_numbers(table)
        slots = name.part.slots if name.part is not None else range(int(numbers[-1]) + 1 if len(numbers) else 0)
        keys = [(name.explore_step, name.unit, slot) for slot in slots]
        new = [number for number, key in enumerate(keys) if key not in seen]
        tables.append(table if len(new) == len(keys) else table.filter(pa.array(np.isin(numbers, new))))
        seen.update(keys)
    return tables
