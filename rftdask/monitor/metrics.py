"""Metrics: JSON-lines files on storage, the only source of plots, trackers and reports.

    metrics/<role>/<first step>-<part>.jsonl      one JSON object per line: role, step, time_s, tags (strings), metrics

A writer keeps the rows of its open part in memory and rewrites the whole part, so storage needs no append, and readers
see complete rows only. A part ends after `rows_per_part` rows, which bounds the cost of a row. The meanings of the
metrics are in `reports.metric_table`.

Invariant: a part has one writer, its rows never change, and it ends before the writer's next part begins.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rftdask.errors import DamagedError
from rftdask.processes.dask_task import WorkerInfo
from rftdask.processes.gpus import METER
from rftdask.storage.base import Storage
from rftdask.storage.checked_json import parse_object

if TYPE_CHECKING:
    import pandas as pd

FOLDER = "metrics"
MACHINE = "machine"
"""Role of the resource use of worker processes and their machines, written by the driver."""
_MACHINE_INTERVAL_S = 4.0
_MAX_DENSE_ROWS = 10_000
"""Each worker has a row every `_MACHINE_INTERVAL_S` up to about this many rows, and then increasingly rarely."""
_PART_NAME = re.compile(r"(\d+)-(\d+)\.jsonl")
_RESERVED = ("role", "step", "time_s")
_ROWS_PER_PART = 500
_SHARED_ROLES = ("eval", "explorer", MACHINE)
"""Roles that several processes can write concurrently: the driver's evaluations of tasks and the trainer's of held-out
rows; several explorers; several drivers."""


@dataclass(frozen=True)
class MetricsRow:
    """Metrics of one role at one step."""

    role: str
    """"trainer", "explorer", "eval", or MACHINE."""
    step: int
    """trainer: optimizer step; explorer: explore step; eval: evaluated policy_version; machine: Unix seconds."""
    time_s: float
    """Time of writing, Unix seconds."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Distinguish rows of one step: taskset, stage, process."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """NaN and infinities are read back as NaN."""

    def to_json(self) -> str:
        """Return one line without its line end, in which strings are tags, and numbers and nulls are metrics."""
        # JSON has no NaN; null is read as NaN.
        values = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        line = {"role": self.role, "step": self.step, "time_s": self.time_s, **self.tags, **values}
        return json.dumps(line, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> MetricsRow:
        """Inverse of `to_json`. Raises: ValueError or KeyError: invalid line."""
        values = parse_object(line)
        role, step, time_s = (values.pop(name) for name in _RESERVED)
        tags = {name: value for name, value in values.items() if isinstance(value, str)}
        metrics = {n: math.nan if v is None else float(v) for n, v in values.items() if not isinstance(v, str)}
        return cls(role, int(step), float(time_s), tags, metrics)


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """Writes the rows of one role; each start of a role opens a new part. Thread-safe.

    Example: with MetricsWriter(storage, "trainer") as metrics: metrics.write(step, {"loss": 0.31}, stage="rl")

    A crash loses at most the rows of the last `flush_interval_s`. Only `write` and `flush` flush, so call `flush`
    before a long wait. If a put fails, the rows stay in memory and the next flush retries.
    """

    def __init__(
        self,
        storage: Storage,
        role: str,
        *,
        rows_per_part: int = _ROWS_PER_PART,
        flush_interval_s: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not re.fullmatch(r"[\w.-]+", role):
            raise ValueError(f"metrics role {role!r}: use letters, digits, '_', '-' and '.' only")
        self._storage, self._role, self._clock = storage, role, clock
        self._rows_per_part, self._flush_interval_s = rows_per_part, flush_interval_s
        self._lock = threading.RLock()
        self._lines: list[str] = []
        self._num_durable = 0
        self._path = ""  # of the open part, once it is on storage
        self._first_step = 0
        self._put_at = -math.inf

    def write(self, step: int, metrics: Mapping[str, float], **tags: str) -> None:
        """Add one row. A step written again replaces its row.

        Args: metrics: values that `float` accepts.
        Raises: ValueError: a name is reserved, or is both tag and metric; StorageError.
        """
        clashes = sorted(set(_RESERVED) & {*metrics, *tags} | set(metrics) & set(tags))
        if clashes:
            raise ValueError(f"metrics of {self._role} step {step}: names already taken: {', '.join(clashes)}")
        now = self._clock()
        values = {name: float(value) for name, value in metrics.items()}
        row = MetricsRow(self._role, int(step), now, {name: str(tag) for name, tag in tags.items()}, values)
        with self._lock:
            # The name of a part contains its first step, so that a listing shows the range of each part.
            if not self._lines:
                self._first_step = row.step
            self._lines.append(row.to_json())
            is_full = len(self._lines) >= self._rows_per_part
            # Also flush if the wall clock was set back.
            if is_full or not 0 <= now - self._put_at < self._flush_interval_s:
                self.flush()
            if is_full:
                self._lines, self._num_durable, self._path = [], 0, ""

    def flush(self) -> None:
        """Make all rows durable; free if they already are. Raises: StorageError."""
        with self._lock:  # the role's loop and its background threads write concurrently
            if self._num_durable == len(self._lines):
                return
            # Rewrite the whole part, since object stores cannot append; `rows_per_part` bounds the cost.
            data = ("\n".join(self._lines) + "\n").encode()
            if self._path:
                self._storage.put(self._path, data)
            else:
                # Number it after the newest part of any writer.
                number = max((part for part, _ in _parts(self._storage, self._role)), default=0)
                while not self._path:  # terminates: each failed attempt means that another writer created a part
                    number += 1
                    path = f"{FOLDER}/{self._role}/{self._first_step:08d}-{number:06d}.jsonl"
                    # Create-only, so that a writer believed dead cannot share a part with this one.
                    if self._storage.put_new(path, data):
                        self._path = path
            self._num_durable, self._put_at = len(self._lines), self._clock()

    def close(self) -> None:
        """Flush. The writer can still be used, and closed again."""
        self.flush()

    def __exit__(self, *exc: object) -> None:
        self.close()


class MachineLog(MetricsWriter):
    """Writes the measurements of the workers' meters. The number of rows grows with the logarithm of a stage's time, so
    the metrics of weeks on many workers still fit into memory.
    """

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.time) -> None:
        super().__init__(storage, MACHINE, flush_interval_s=_MACHINE_INTERVAL_S, clock=clock)
        self._began_s, self._wrote_s = clock(), 0.0

    def note(self, workers: Mapping[str, WorkerInfo]) -> None:
        """Write a row per worker if the interval has passed. Raises: StorageError."""
        now = self._clock()
        if now - self._wrote_s < max(_MACHINE_INTERVAL_S, len(workers) * (now - self._began_s) / _MAX_DENSE_ROWS):
            return
        for address, info in workers.items():
            measured = info.get("metrics", {}).get(METER)
            if measured:  # new workers have no measurements yet, and workers of a foreign cluster have no meter
                self._wrote_s = now
                self.write(int(now), measured, process=str(info["name"]), host=info.get("host", address))


class MetricsFollower:
    """Returns each row of a run once, in the order of the parts.

    It rereads only the newest part of each role. An older part is read a last time after its successor is listed, or,
    if several processes write the role, after it is full.
    """

    def __init__(self, storage: Storage, cursor: Mapping[str, int] | None = None) -> None:
        """cursor: position of an earlier follower, whose rows are not returned again."""
        self._storage = storage
        self._num_returned = dict(cursor or {})
        self._ended: set[str] = set()

    @property
    def cursor(self) -> dict[str, int]:
        """Number of returned rows by path of the part."""
        return dict(self._num_returned)

    def poll(self) -> list[MetricsRow]:
        """Return the rows added since the last call. Raises: StorageError, DamagedError."""
        new_rows: list[MetricsRow] = []
        for role in _roles(self._storage):
            parts = _parts(self._storage, role)
            for number, (_, path) in enumerate(parts, start=1):
                if path in self._ended:
                    continue
                rows = _read_part(self._storage, path)
                # Rows are only ever added to a part, so their number is a cursor.
                new_rows += rows[self._num_returned.get(path, 0) :]
                self._num_returned[path] = len(rows)
                if number < len(parts) and (role not in _SHARED_ROLES or len(rows) >= _ROWS_PER_PART):
                    self._ended.add(path)  # its writer has begun another part
        return new_rows


def read_metrics(storage: Storage, role: str | None = None) -> pd.DataFrame:
    """Read all rows of a run, or of one role, in the format of `rows_to_frame`; empty without rows."""
    return rows_to_frame(read_rows(storage, role))


def read_rows(storage: Storage, role: str | None = None) -> list[MetricsRow]:
    """Read all rows of a run, or of one role, in the order of `latest_rows`, without pandas."""
    roles = _roles(storage) if role is None else [role]
    return latest_rows(row for name in roles for _, path in _parts(storage, name) for row in _read_part(storage, path))


def latest_rows(rows: Iterable[MetricsRow]) -> list[MetricsRow]:
    """Return one row per (role, step, tags), the one written last, sorted by step, then role and tags."""
    # A resumed role repeats some steps; only the newer row belongs to the continued run.
    latest = {(row.step, row.role, *sorted(row.tags.items())): row for row in sorted(rows, key=lambda row: row.time_s)}
    return [latest[key] for key in sorted(latest)]


def rows_to_frame(rows: Iterable[MetricsRow]) -> pd.DataFrame:
    """Return `latest_rows` as a table.

    Columns: role (str), step (int64), time_s, tags (str, "" if missing), metrics (float64, NaN if missing).
    """
    import pandas as pd  # late: half a second, which writers do not need

    kept = latest_rows(rows)
    columns: dict[str, list[str] | list[int] | list[float]] = {
        "role": [row.role for row in kept],
        "step": [row.step for row in kept],
        "time_s": [row.time_s for row in kept],
    }
    for tag in sorted({tag for row in kept for tag in row.tags}):
        columns[tag] = [row.tags.get(tag, "") for row in kept]
    for metric in sorted({metric for row in kept for metric in row.metrics}):
        columns[metric] = [row.metrics.get(metric, math.nan) for row in kept]
    return pd.DataFrame(columns)


def _roles(storage: Storage) -> list[str]:
    return [name.rstrip("/") for name in storage.list(FOLDER) if name.endswith("/")]


def _parts(storage: Storage, role: str) -> list[tuple[int, str]]:
    """Return (number, path) of the parts of a role, in the order of creation."""
    matches = filter(None, map(_PART_NAME.fullmatch, storage.list(f"{FOLDER}/{role}")))
    return sorted((int(match[2]), f"{FOLDER}/{role}/{match.string}") for match in matches)


def _read_part(storage: Storage, path: str) -> list[MetricsRow]:
    try:
        return [MetricsRow.from_json(line) for line in storage.get(path).decode().splitlines()]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path}: not a metrics file ({error}); remove it to continue without its rows") from error
