"""Shard: one immutable file of experiences. Its name has everything a planner needs, and a checksum of its bytes.

A shard holds a whole work unit (number `unit` of explore step `explore_step`), all its groups in the order of the
tasks. Or it holds some whole groups of the unit that were done long before the others; its name then lists them. So a
listing shows which work is done, and a unit that ran twice gives two shards with the same groups, of which the reader
uses one. This module knows no storage. It imports pyarrow late, because a listing of shards does not need it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

_NAME = re.compile(
    r"(\d{8,})-(\d{4,})-([0-9a-f]+)(?:-p([0-9a-f]+)-(\d+))?-n(\d+)-v(\d+)-(\d+)-([0-9a-f]{8})\.(parquet|jsonl|sql)"
)

MAX_PART_TASKS = 512
"""Larger work units are committed whole: the bits of a part would make the file name too long."""


@dataclass(frozen=True, order=True)
class Part:
    """The groups of a work unit that a shard holds, if it does not hold all.

    Example: Part((0, 1, 3), num_tasks=8) is "p0b-8" in a name: bits 0, 1 and 3 of 8.
    """

    slots: tuple[int, ...]
    """Places of the groups' tasks in the unit, ascending, which is the order of the rows."""
    num_tasks: int
    """Tasks of the whole unit."""

    @property
    def text(self) -> str:
        """The part in a shard name, such as "p0b-8"."""
        return f"p{sum(1 << slot for slot in self.slots):0{-(-self.num_tasks // 4)}x}-{self.num_tasks}"

    @classmethod
    def parse(cls, bits: str, num_tasks: str) -> Part:
        """Inverse of `text`, from its two numbers: hexadecimal bits, and tasks."""
        mask = int(bits, 16)
        return cls(tuple(slot for slot in range(mask.bit_length()) if mask >> slot & 1), int(num_tasks))


@dataclass(frozen=True, order=True)
class ShardName:
    """The parsed file name of a shard.

    Example: "00000012-0003-9f3a61c2b07d-n64-v10-11-1c291ca3.parquet" is unit 3 of explore step 12, written by 9f3a...,
    with 64 rows sampled by versions 10 to 11, then the crc32 of the file and its format. With "-p0b-8" before the
    number of rows it holds three of the eight groups of its unit, see `Part`.
    """

    explore_step: int
    """From 1."""
    unit: int
    """Number of the work unit in its explore step, from 0."""
    writer: str
    """Hexadecimal, random for each log instance: two attempts at a unit never share a name."""
    num_rows: int
    min_policy_version: int
    max_policy_version: int
    """Versions of the oldest and newest weights that sampled a token."""
    crc32: int
    """Checksum of all bytes."""
    suffix: str = "parquet"
    part: Part | None = None
    """None: the whole unit."""

    @cached_property
    def text(self) -> str:
        part = "" if self.part is None else f"-{self.part.text}"
        return (
            f"{self.explore_step:08d}-{self.unit:04d}-{self.writer}{part}-n{self.num_rows}"
            f"-v{self.min_policy_version}-{self.max_policy_version}-{self.crc32:08x}.{self.suffix}"
        )

    @classmethod
    def try_parse(cls, text: str) -> ShardName | None:
        """Return the parsed name, or None for another kind of file."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        step, unit, writer, bits, num_tasks, rows, low, high, crc, suffix = match.groups()
        part = None if bits is None else Part.parse(bits, num_tasks)
        name = cls(int(step), int(unit), writer, int(rows), int(low), int(high), int(crc, 16), suffix, part)
        return name if name.text == text else None  # other leading zeros would give another path


def done_units(names: Iterable[ShardName]) -> set[tuple[int, int]]:
    """Return the (explore step, unit) of the work units all of whose groups are in these shards."""
    done: set[tuple[int, int]] = set()
    slots_of_unit: dict[tuple[int, int], set[int]] = defaultdict(set)
    for name in names:
        key = (name.explore_step, name.unit)
        slots_of_unit[key].update(name.part.slots if name.part else ())
        # Parts of several attempts add up: it does not matter which attempt committed a group.
        if name.part is None or len(slots_of_unit[key]) == name.part.num_tasks:
            done.add(key)
    return done


def repeated_shards(names: Iterable[ShardName]) -> list[ShardName]:
    """Return the shards of the work units that may have a group in several shards."""
    units: dict[tuple[int, int], list[ShardName]] = defaultdict(list)
    for name in names:
        units[(name.explore_step, name.unit)].append(name)
    repeated: list[ShardName] = []
    for shards in units.values():
        parts = [name.part for name in shards if name.part is not None]
        slots = [slot for part in parts for slot in part.slots]
        # Parts that share no group are one copy of the unit; a whole shard repeats every other one.
        if len(shards) > 1 and (len(parts) < len(shards) or len(set(slots)) < len(slots)):
            repeated += shards
    return repeated
