"""Shard: one immutable file of experiences. Its name has everything a planner needs, and a checksum of its bytes.

A shard holds a whole work unit (number `unit` of explore step `explore_step`), all its groups in the order of the
tasks. Or it holds some whole groups of the unit that were done long before the others; its name then lists them. So a
listing shows which work is done, and a unit that ran twice gives two shards with the same groups, of which the reader
uses one. This module knows no storage. It imports pyarrow late, because a listing of shards does not need it.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rftdask.buffer.log.schema import ADDED_COLUMNS, EXPERTS_COLUMN, SCHEMA_VERSION, Experience
from rftdask.errors import DamagedError, DataError

if TYPE_CHECKING:
    import pyarrow as pa

_NAME = re.compile(
    r"(\d{8,})-(\d{4,})-([0-9a-f]+)(?:-p([0-9a-f]+)-(\d+))?-n(\d+)-v(\d+)-(\d+)-([0-9a-f]{8})\.(parquet|jsonl|sql)"
)

MAX_PART_TASKS = 512
"""Larger work units are committed whole: the bits of a part would make the file name too long."""
_PAGE_BYTES = 1 << 16
"""Page size of a column. A page that fits the processor's cache is 10 % cheaper to write than the usual megabyte."""


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
        """The file name."""
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


def encode_shard(
    experiences: Sequence[Experience], *, explore_step: int, unit: int, writer: str, run: str = "", codec: str = "lz4"
) -> tuple[ShardName, bytes]:
    """Encode experiences as a Parquet file; return its name and bytes. The same experiences give the same bytes.

    Args: codec: lz4 for file systems, where time matters; zstd for object stores, where size matters.
    Raises: ValueError: as `experiences_to_table`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from rftdask.buffer.log.columns import experiences_to_table

    sink = pa.BufferOutputStream()
    pq.write_table(
        experiences_to_table(experiences, run),
        sink,
        compression=codec,
        compression_level=1 if codec == "zstd" else None,
        # Few rows and many different values: dictionaries and statistics cost more to write than they save, except for
        # experts: 128 of them need 7 bits instead of 32.
        use_dictionary=[EXPERTS_COLUMN],
        write_statistics=False,
        # 5 % smaller and 20 % slower to write: worth it over a network.
        use_byte_stream_split=["rollout_logprobs.list.element"] if codec == "zstd" else False,
        data_page_size=_PAGE_BYTES,
        # One row group: a shard is read whole.
        row_group_size=1 << 20,
    )
    data: bytes = sink.getvalue().to_pybytes()
    return shard_name(experiences, data, explore_step=explore_step, unit=unit, writer=writer), data


def shard_name(
    experiences: Sequence[Experience],
    data: bytes,
    *,
    explore_step: int,
    unit: int,
    writer: str,
    suffix: str = "parquet",
) -> ShardName:
    """Return the name of a shard that holds these experiences as the bytes `data`."""
    # 0 for a shard without rows, which still marks its unit as done.
    low = min((e.min_policy_version for e in experiences), default=0)
    high = max((e.max_policy_version for e in experiences), default=0)
    return ShardName(explore_step, unit, writer, len(experiences), low, high, zlib.crc32(data), suffix)


def decode_shard(name: ShardName, data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Decode and verify the rows, with these columns of `SCHEMA`; None: with every column of the file.

    Raises: DamagedError: bytes or rows do not match the name; DataError: another schema.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from rftdask.buffer.log.columns import SCHEMA

    check_bytes(name, data)
    try:
        # Not read_table: it looks for a data set first, which costs as much as reading a small shard. Without the page
        # checksums: the checksum of all bytes was just verified.
        with pq.ParquetFile(pa.BufferReader(data), pre_buffer=False) as file:
            table = file.read(columns, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise DamagedError(f"shard {name.text}: its checksum fits, but it is not a Parquet file: {error}") from error
    check_version(name, {(table.schema.metadata or {}).get(b"rftdask.schema", b"").decode()})
    wanted = SCHEMA.names if columns is None else columns
    table = with_added_columns(table, wanted)
    missing = set(wanted) - set(table.column_names)
    if missing or table.num_rows != name.num_rows:
        raise DamagedError(f"shard {name.text}: {table.num_rows} rows, columns missing: {sorted(missing) or 'none'}")
    return table


def with_added_columns(table: pa.Table, wanted: Sequence[str]) -> pa.Table:
    """Return the table with null columns for the wanted ones that an earlier schema version lacks."""
    import pyarrow as pa

    from rftdask.buffer.log.columns import SCHEMA

    for column in ADDED_COLUMNS:
        if column in wanted and column not in table.column_names:
            kind = SCHEMA.field(column)
            table = table.append_column(kind, pa.nulls(table.num_rows, kind.type))
    return table


def check_bytes(name: ShardName, data: bytes) -> None:
    """Raise DamagedError if the bytes are not those of the shard."""
    if zlib.crc32(data) != name.crc32:
        raise DamagedError(
            f"shard {name.text}: crc32 {zlib.crc32(data):08x} does not match its name ({len(data)} bytes)"
        )


def check_version(name: ShardName, versions: Iterable[str]) -> None:
    """Raise DataError if the shard has a schema of another major version."""
    # Later minor versions add columns that this reader ignores.
    if other := {v for v in versions if v.partition(".")[0] != SCHEMA_VERSION.partition(".")[0]}:
        raise DataError(
            f"shard {name.text}: schema version {', '.join(sorted(other)) or 'unknown'}, this rftdask reads "
            f"{SCHEMA_VERSION}; use the version that wrote the run (run.json names it)"
        )
