"""Columns of the experience table: its Arrow schema, experiences as a table of it, and such a table as the bytes of a
shard, a Parquet file or JSON lines.

Rows become columns without a Python loop over tokens. Token ids and logprobs in numpy arrays cost one copy; other
sequences cost about 30 times as much, but make the same experience.

The same experiences give the same bytes. JSON lines, readable by people, hold one experience per line with the fields
of `SCHEMA` and nothing rounded: {"schema": "1.0", "run": ..., "uid": ..., ...}. A number is the shortest text of the
same float32. Files are several times larger than Parquet, and slower to read.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rftdask.buffer.log.schema import ADDED_COLUMNS, EXPERTS_COLUMN, SCHEMA_VERSION, Experience
from rftdask.buffer.log.shard import ShardName
from rftdask.errors import DamagedError, DataError
from rftdask.storage.safe_text import encodable

_PAGE_BYTES = 1 << 16
"""Page size of a column. A page that fits the processor's cache is 10 % cheaper to write than the usual megabyte."""


def _list_of(kind: pa.DataType) -> pa.DataType:
    # Without nulls there are no definition levels, which makes reading 1.5 to 2 times faster.
    return pa.list_(pa.field("element", kind, nullable=False))


_COLUMNS = {
    "uid": pa.string(),
    "taskset": pa.string(),
    "epoch": pa.int32(),
    "task_index": pa.int64(),
    "rollout": pa.int32(),
    "turn": pa.int32(),
    "attempt": pa.int32(),
    "explore_step": pa.int64(),
    "status": pa.string(),
    "tokens": _list_of(pa.int32()),
    "prompt_length": pa.int32(),
    "rollout_logprobs": _list_of(pa.float32()),
    # Run lengths, the first one trained: [3, 2, 4] = 3 trained, 2 not, 4 trained. Empty = all trained.
    "loss_mask_runs": _list_of(pa.int32()),
    "reward": pa.float32(),
    "min_policy_version": pa.int64(),
    "max_policy_version": pa.int64(),
    "weights_hash": pa.string(),
    **dict.fromkeys(("temperature", "top_p"), pa.float32()),
    "top_k": pa.int32(),
    "seed": pa.int64(),
    **dict.fromkeys(("prompt_text", "response_text", "truth", "error"), pa.string()),
    "metrics": pa.map_(pa.string(), pa.float64()),
    "env_state": pa.string(),
    "turn_reward": pa.float32(),
    # The fields of `Turn`, in order.
    "turns": _list_of(
        pa.struct(
            [
                pa.field(name, kind, nullable=name in ADDED_COLUMNS)
                for name, kind in {
                    **dict.fromkeys(("number", "start", "end", "text_start", "text_end"), pa.int32()),
                    "source": pa.string(),
                    **dict.fromkeys(("seed", "min_policy_version", "max_policy_version"), pa.int64()),
                    "env_state": pa.string(),
                    "turn_reward": pa.float32(),
                }.items()
            ]
        )
    ),
    # Token by token, the same number for each.
    "routed_experts": _list_of(pa.int16()),
    "images": _list_of(pa.string()),
    "version_starts": _list_of(
        pa.struct(
            [pa.field("start", pa.int32(), nullable=False), pa.field("policy_version", pa.int64(), nullable=False)]
        )
    ),
    "session": pa.string(),
}


SCHEMA = pa.schema(
    [pa.field(name, kind, nullable=name in ("reward", *ADDED_COLUMNS)) for name, kind in _COLUMNS.items()],
    metadata={"rftdask.schema": SCHEMA_VERSION},
)


_ALL_TRAINED: tuple[int, ...] = ()
"""Runs of most rows; a new list per row would trigger the garbage collector for every shard."""


def mask_to_runs(mask: Sequence[bool] | np.ndarray | None) -> list[int]:
    """Return the run lengths of `mask`, the first run counting True; [] for None or a mask that is all True."""
    if mask is None:
        return []
    array = np.asarray(mask, bool)
    if array.all():
        return []
    # Places where one run ends and the next begins.
    edges = np.flatnonzero(array[1:] != array[:-1]) + 1
    runs: list[int] = np.diff(edges, prepend=0, append=len(array)).tolist()
    return runs if array[0] else [0, *runs]


def experiences_to_table(experiences: Sequence[Experience], run: str = "") -> pa.Table:
    """Make a table of `SCHEMA` with one row per experience, in the same order. Texts are stored as `encodable`.

    Raises: ValueError: inconsistent lengths, or a trainable row without a reward; OverflowError: a token id beyond
    int32, or more tokens than one shard can address.
    """
    # Checked before anything is written: a shard is immutable.
    for experience in experiences:
        if problem := _problem(experience):
            raise ValueError(f"experience {experience.uid}: {problem}")

    # Lists and maps are built from flat arrays, the other columns below from one attribute per row.
    metrics = [experience.metrics for experience in experiences]
    metrics_type = SCHEMA.field("metrics").type
    masks = [_ALL_TRAINED if e.loss_mask is None else mask_to_runs(e.loss_mask) for e in experiences]
    columns: dict[str, pa.Array] = {
        "uid": _array([e.uid for e in experiences], pa.string()),
        "tokens": _lists([e.tokens for e in experiences], np.int32),
        "rollout_logprobs": _lists([e.rollout_logprobs for e in experiences], np.float32),
        "loss_mask_runs": _lists(masks, np.int32),
        "routed_experts": _experts([e.routed_experts for e in experiences]),
        "turns": _array(
            [None if e.turns is None else list(map(vars, e.turns)) for e in experiences], SCHEMA.field("turns").type
        ),
        "version_starts": pa.array(
            [
                None if e.version_starts is None else [{"start": s, "policy_version": v} for s, v in e.version_starts]
                for e in experiences
            ],
            SCHEMA.field("version_starts").type,
        ),
        "metrics": pa.MapArray.from_arrays(
            pa.array(_offsets(metrics)),
            _array(list(chain.from_iterable(metrics)), metrics_type.key_type),
            pa.array(list(chain.from_iterable(row.values() for row in metrics)), metrics_type.item_type),
            type=metrics_type,
        ),
    }
    for name, kind in zip(SCHEMA.names, SCHEMA.types, strict=True):
        if name not in columns:
            # attrgetter and map loop in C: this runs for every column of every shard.
            columns[name] = _array(list(map(attrgetter(name), experiences)), kind)
    schema = SCHEMA.with_metadata({**(SCHEMA.metadata or {}), b"rftdask.run": json.dumps(run).encode()})
    return pa.Table.from_arrays([columns[name] for name in SCHEMA.names], schema=schema)


def _problem(e: Experience) -> str:
    """Describe what is inconsistent in an experience; "": nothing."""
    num_tokens = len(e.tokens) - e.prompt_length
    if len(e.rollout_logprobs) != num_tokens:
        return f"{len(e.rollout_logprobs)} rollout_logprobs for {num_tokens} response tokens"
    if e.loss_mask is not None and len(e.loss_mask) != num_tokens:
        return f"loss_mask of {len(e.loss_mask)} for {num_tokens} response tokens"
    if e.turns is not None and [turn.end for turn in e.turns[-1:]] != [num_tokens]:
        return f"its last turn does not end with its {num_tokens} response tokens"
    if e.routed_experts is not None and len(e.routed_experts) != len(e.tokens) - 1:
        return f"routed_experts of {len(e.routed_experts)} tokens, not of all but the last of {len(e.tokens)}"
    starts = [start for start, _ in e.version_starts or ()]
    if starts and not 0 == starts[0] <= starts[-1] < num_tokens:
        first = f"version_starts at {starts} do not begin with its first of {num_tokens} response tokens"
        return f"{first}, or end behind its last"
    return f"status {e.status} without a reward" if e.reward is None and e.status.trainable else ""


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:  # texts come from tasks, workflows and clients, so one of them must not end the run
        return pa.array(_encodable(values), kind)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {key: _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list | tuple) else value


def _lists(rows: Sequence[Sequence[Any] | np.ndarray], dtype: type[np.number[Any]]) -> pa.Array:
    """Make a list column of `dtype`. Raises: OverflowError: an integer that does not fit."""

    def as_array(row: Sequence[Any] | np.ndarray) -> np.ndarray:
        if isinstance(row, np.ndarray) and row.dtype != dtype and np.issubdtype(dtype, np.integer):
            return np.array(row.tolist(), dtype)  # a cast between arrays would wrap around
        return np.asarray(row, dtype)

    filled = [row for row in rows if len(row)]
    try:
        # casting="no" raises TypeError if a row must be converted.
        values = np.concatenate(filled, dtype=dtype, casting="no") if filled else np.zeros(0, dtype)
    except TypeError:
        values = np.concatenate([as_array(row) for row in filled])
    kind = pa.from_numpy_dtype(dtype)
    return pa.ListArray.from_arrays(pa.array(_offsets(rows)), pa.array(values, kind), type=_list_of(kind))


def _experts(rows: Sequence[np.ndarray | None]) -> pa.Array:
    kind = SCHEMA.field("routed_experts").type
    if all(row is None for row in rows):
        return pa.nulls(len(rows), kind)
    lists = _lists([() if row is None else row.reshape(-1) for row in rows], np.int16)
    return pa.ListArray.from_arrays(lists.offsets, lists.values, kind, mask=pa.array([row is None for row in rows]))


def _offsets(rows: Sequence[Any]) -> np.ndarray:
    """Return the begin of each row, [N + 1] int32. Raises: OverflowError: more values than a list can address."""
    ends = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), out=ends[1:])
    if ends[-1] > np.iinfo(np.int32).max:
        raise OverflowError(f"{ends[-1]} values in one shard; lower explorer.tasks_per_batch")
    return ends.astype(np.int32)


def runs_to_mask(runs: Sequence[int], length: int) -> list[bool]:
    """Inverse of `mask_to_runs` for a response of `length` tokens."""
    if not len(runs):
        return [True] * length
    return [number % 2 == 0 for number, count in enumerate(runs) for _ in range(count)]


# ---- bytes of a shard


def encode_parquet(experiences: Sequence[Experience], run: str = "", codec: str = "lz4") -> bytes:
    """Encode experiences as a Parquet file.

    Args: codec: lz4 for file systems, where time matters; zstd for object stores, where size matters.
    Raises: ValueError: as `experiences_to_table`.
    """
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
    return data


def decode_parquet(name: ShardName, data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Decode and verify the rows, with these columns of `SCHEMA`; None: with every column of the file.

    Raises: DamagedError: bytes or rows do not match the name; DataError: another schema.
    """
    _check_bytes(name, data)
    try:
        # Not read_table: it looks for a data set first, which costs as much as reading a small shard. Without the page
        # checksums: the checksum of all bytes was just verified.
        with pq.ParquetFile(pa.BufferReader(data), pre_buffer=False) as file:
            table = file.read(columns, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise DamagedError(f"shard {name.text}: its checksum fits, but it is not a Parquet file: {error}") from error
    _check_version(name, {(table.schema.metadata or {}).get(b"rftdask.schema", b"").decode()})
    wanted = SCHEMA.names if columns is None else columns
    table = with_added_columns(table, wanted)
    missing = set(wanted) - set(table.column_names)
    if missing or table.num_rows != name.num_rows:
        raise DamagedError(f"shard {name.text}: {table.num_rows} rows, columns missing: {sorted(missing) or 'none'}")
    return table


def with_added_columns(table: pa.Table, wanted: Sequence[str] = SCHEMA.names) -> pa.Table:
    """Return the table with null columns for the wanted ones that an earlier schema version lacks."""
    for column in ADDED_COLUMNS:
        if column in wanted and column not in table.column_names:
            kind = SCHEMA.field(column)
            table = table.append_column(kind, pa.nulls(table.num_rows, kind.type))
    return table


def to_lines(table: pa.Table, head: Mapping[str, str] | None = None) -> bytes:
    """Encode a table of `SCHEMA` as JSON lines, each beginning with `head`.

    Null values of `ADDED_COLUMNS` are omitted, so such a row has the same bytes as in earlier schema versions.
    """

    def shortest(column: pa.ChunkedArray) -> pa.ChunkedArray:
        # float32 via its shortest text to float64, which Python then prints as 0.1 instead of 0.10000000149.
        if pa.types.is_float32(column.type):
            return column.cast(pa.string()).cast(pa.float64())
        if pa.types.is_list(column.type) and pa.types.is_float32(column.type.value_type):
            return column.cast(pa.list_(pa.string())).cast(pa.list_(pa.float64()))
        return column

    columns = {field.name: shortest(table.column(field.name)).to_pylist() for field in SCHEMA}
    columns["metrics"] = [dict(pairs) for pairs in columns["metrics"]]
    lines = []
    for row in zip(*columns.values(), strict=True):
        fields = dict(zip(columns, row, strict=True))
        present = {key: value for key, value in fields.items() if value is not None or key not in ADDED_COLUMNS}
        lines.append(json.dumps({**(head or {}), **present}, ensure_ascii=False) + "\n")
    return "".join(lines).encode()


def encode_lines(experiences: Sequence[Experience], run: str = "", codec: str = "") -> bytes:
    """Encode experiences as JSON lines, which are not compressed. Raises: ValueError: as `experiences_to_table`."""
    return to_lines(experiences_to_table(experiences), {"schema": SCHEMA_VERSION, "run": run})


def decode_lines(name: ShardName, data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Decode and verify the rows, with all columns. Raises: as `decode_parquet`."""
    _check_bytes(name, data)
    try:
        # The last element follows the last newline, and is empty.
        rows = [json.loads(line) for line in data.decode().split("\n")[:-1]]
        versions = {str(row["schema"]) for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"shard {name.text}: its checksum fits, but it is not JSON lines: {error!r}") from error
    _check_version(name, versions)
    # Older shards lack ADDED_COLUMNS; newer ones may have more fields, which are ignored below.
    missing = {field for row in rows for field in SCHEMA.names if field not in row} - set(ADDED_COLUMNS)
    if missing or len(rows) != name.num_rows:
        raise DamagedError(f"shard {name.text}: {len(rows)} rows, fields missing: {sorted(missing) or 'none'}")
    try:
        return pa.Table.from_pylist([{**row, "metrics": list(row["metrics"].items())} for row in rows], SCHEMA)
    except (pa.ArrowException, ValueError, TypeError, AttributeError) as error:
        raise DamagedError(f"shard {name.text}: its checksum fits, but its fields do not: {error}") from error


def _check_bytes(name: ShardName, data: bytes) -> None:
    if zlib.crc32(data) != name.crc32:
        raise DamagedError(
            f"shard {name.text}: crc32 {zlib.crc32(data):08x} does not match its name ({len(data)} bytes)"
        )


def _check_version(name: ShardName, versions: Iterable[str]) -> None:
    # Later minor versions add columns that this reader ignores.
    if other := {v for v in versions if v.partition(".")[0] != SCHEMA_VERSION.partition(".")[0]}:
        raise DataError(
            f"shard {name.text}: schema version {', '.join(sorted(other)) or 'unknown'}, this rftdask reads "
            f"{SCHEMA_VERSION}; use the version that wrote the run (run.json names it)"
        )


FORMATS = {"parquet": (encode_parquet, decode_parquet), "jsonl": (encode_lines, decode_lines)}
"""Functions that encode and decode a shard, by the suffix of its name."""
