"""Metrics: the numbers of a run as small JSON-lines files on storage, the one source of plots, trackers and reports.

    metrics/<role>/<first step>-<part>.jsonl      one JSON object per line: role, step, time_s, tags (strings), metrics

A writer keeps the rows of its open part in memory and puts the part again as a whole, so storage needs no append and
a reader sees whole rows only. A part ends after `rows_per_part` rows, therefore the cost of a row stays flat.
It knows nothing of what the numbers mean (see `explain`).

Invariant: a part belongs to one writer, rows in it are never changed, and a part ends before the writer's next begins.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rftdask.errors import DamagedError
from rftdask.storage.base import Storage
from rftdask.storage.checked_json import parse_object

if TYPE_CHECKING:
    import pandas as pd

FOLDER = "metrics"
MACHINE = "machine"
"""Role of what worker processes and their machines have in use; the driver writes it."""
_PART_NAME = re.compile(r"(\d+)-(\d+)\.jsonl")
_RESERVED = ("role", "step", "time_s")
_ROWS_PER_PART = 500
_OF_SEVERAL = ("eval", "explorer", MACHINE)
"""Roles that several processes may write at once: the driver's evaluations of tasks and the trainer's of held-out rows;
explorers of one run; the drivers of its commands."""


@dataclass(frozen=True)
class MetricsRow:
    """Numbers that one role measured at one step.

    Example: MetricsRow("eval", 40, 1760000000.0, {"taskset": "gsm8k"}, {"accuracy": 0.61})
    """

    role: str
    """"trainer", "explorer", "eval", or MACHINE."""
    step: int
    """trainer: optimizer step; explorer: explore step; eval: policy_version that was evaluated; machine: Unix seconds,
    since a process has no steps."""
    time_s: float
    """When it was written, Unix seconds."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Tell apart rows of one step: taskset, stage, process."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """NaN and infinities come back as NaN."""

    def to_json(self) -> str:
        """One line without its end. In it strings are tags; numbers and nulls are metrics."""
        # JSON has no NaN; null is read as one.
        values = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        line = {"role": self.role, "step": self.step, "time_s": self.time_s, **self.tags, **values}
        return json.dumps(line, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> MetricsRow:
        """Inverse of `to_json`. Raises: ValueError or KeyError: not such a line."""
        values = parse_object(line)
        role, step, time_s = (values.pop(name) for name in _RESERVED)
        tags = {name: value for name, value in values.items() if isinstance(value, str)}
        metrics = {n: math.nan if v is None else float(v) for n, v in values.items() if not isinstance(v, str)}
        return cls(role, int(step), float(time_s), tags, metrics)


class MetricsWriter:
    """Writes the rows of one role; each start of a role opens a new part. Safe to use from threads.

    Example:
        with MetricsWriter(storage, "trainer") as metrics:
            metrics.write(step, {"loss": 0.31, "grad_norm": 0.8}, stage="rl")

    A crash loses at most the rows of the last `flush_interval_s`, or those since the last write: there is no thread,
    so call `flush` before a long wait. When a put fails the rows stay and the next flush tries again.
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
        """Add one row. `metrics` values may be anything `float` takes; a step written again replaces its row.

        Raises: ValueError: a name that is reserved or both tag and metric; StorageError.
        """
        clashes = sorted(set(_RESERVED) & {*metrics, *tags} | set(metrics) & set(tags))
        if clashes:
            raise ValueError(f"metrics of {self._role} step {step}: names already taken: {', '.join(clashes)}")
        now = self._clock()
        values = {name: float(value) for name, value in metrics.items()}
        row = MetricsRow(self._role, int(step), now, {name: str(tag) for name, tag in tags.items()}, values)
        with self._lock:
            # The name of a part has its first step, so that a listing tells what is where.
            if not self._lines:
                self._first_step = row.step
            self._lines.append(row.to_json())
            is_full = len(self._lines) >= self._rows_per_part
            # Written so that a wall clock that was set back cannot stop the flushing.
            if is_full or not 0 <= now - self._put_at < self._flush_interval_s:
                self.flush()
            if is_full:
                self._lines, self._num_durable, self._path = [], 0, ""

    def flush(self) -> None:
        """Make all rows durable; costs nothing when they are. Raises: StorageError."""
        with self._lock:  # the role's loop and its background threads write
            if self._num_durable == len(self._lines):
                return
            # The part as a whole, since object stores cannot append; `rows_per_part` bounds what a flush costs.
            data = ("\n".join(self._lines) + "\n").encode()
            if self._path:
                self._storage.put(self._path, data)
            else:
                # After the newest part of anybody: a resumed role goes on with a part of its own.
                number = max((part for part, _ in _parts(self._storage, self._role)), default=0)
                while not self._path:  # ends: each turn somebody else made a part
                    number += 1
                    path = f"{FOLDER}/{self._role}/{self._first_step:08d}-{number:06d}.jsonl"
                    # Create-only, so that a writer that was thought dead cannot share a part with this one.
                    if self._storage.put_new(path, data):
                        self._path = path
            self._num_durable, self._put_at = len(self._lines), self._clock()

    def close(self) -> None:
        """Flush. The writer may be closed again, or used again."""
        self.flush()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class MetricsFollower:
    """Gives each row of a run once, in the order of the parts.

    Of each role it reads again only the newest part; an older part is read a last time once its successor is listed,
    or, where several may write, once it is full.

    Example:
        follower = MetricsFollower(storage)
        for row in follower.poll(): ...
    """

    def __init__(self, storage: Storage, cursor: Mapping[str, int] | None = None) -> None:
        """`cursor`: that of an earlier follower, whose rows are not given again."""
        self._storage = storage
        self._num_given = dict(cursor or {})
        self._ended: set[str] = set()

    @property
    def cursor(self) -> dict[str, int]:
        """Path of each part and how many of its rows were given."""
        return dict(self._num_given)

    def poll(self) -> list[MetricsRow]:
        """Rows that came since the last call. Raises: StorageError, DamagedError."""
        found: list[MetricsRow] = []
        for role in _roles(self._storage):
            parts = _parts(self._storage, role)
            for number, (_, path) in enumerate(parts, start=1):
                if path in self._ended:
                    continue
                rows = _read_part(self._storage, path)
                # Rows are only ever added to a part, so their number is a cursor.
                found += rows[self._num_given.get(path, 0) :]
                self._num_given[path] = len(rows)
                if number < len(parts) and (role not in _OF_SEVERAL or len(rows) >= _ROWS_PER_PART):
                    self._ended.add(path)  # its writer has begun another, and will not come back to this one
        return found


def read_metrics(storage: Storage, role: str | None = None) -> pd.DataFrame:
    """Read all rows of a run, or of one role, as `rows_to_frame` gives them; empty when there are none."""
    rows: list[MetricsRow] = []
    for name in _roles(storage) if role is None else [role]:
        for _, path in _parts(storage, name):
            rows += _read_part(storage, path)
    return rows_to_frame(rows)


def rows_to_frame(rows: Iterable[MetricsRow]) -> pd.DataFrame:
    """Make one line per (role, step, tags), of which the row written last wins whole, by step, then role and tags.

    Columns: role (str), step (int64), time_s, tags (str, "" where missing), metrics (float64, NaN where missing).
    """
    import pandas as pd  # late: half a second that a writer does not need

    # A resumed role measures some steps again: the newer row is of the run as it went on.
    latest = {(row.step, row.role, *sorted(row.tags.items())): row for row in sorted(rows, key=lambda row: row.time_s)}
    kept = [latest[key] for key in sorted(latest)]
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
    """(part number, path) of the role's parts, in the order they were begun."""
    names = storage.list(f"{FOLDER}/{role}")
    matches = filter(None, map(_PART_NAME.fullmatch, names))
    return sorted((int(match[2]), f"{FOLDER}/{role}/{match.string}") for match in matches)


def _read_part(storage: Storage, path: str) -> list[MetricsRow]:
    try:
        return [MetricsRow.from_json(line) for line in storage.get(path).decode().splitlines()]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path}: not a metrics file ({error}); remove it to go on without its rows") from error
