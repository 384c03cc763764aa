"""Refine: a dataset filtered, deduplicated and scored, part by part, over Dask workers.

    parts of the input -> scored/<n>.parquet (filtered, scored) -> what stays, by hash and score -> part-<n>.parquet

A worker holds one part at a time, the client a hash and a number for each row. Every file is written whole or not at
all, so the same command goes on where it was ended; another one in the same folder is refused. The output is a dataset
(a folder of Parquet) with a report of what was dropped and why. It knows no run.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rftdask import __version__
from rftdask.config.plugins import find_part
from rftdask.errors import DataError, NotFoundError, UserError
from rftdask.storage import open_storage

Submit = Callable[[Callable[[int], Any], Sequence[int]], list[Any]]
"""Maps a function over the numbers of parts, on whatever workers, and returns the results in their order."""
PART_ROWS = 50_000
"""Rows of a part of a .jsonl file; of Parquet a part is a row group."""
REPORT = "report/report.json"  # in a folder of its own: files beside the parts would be part of the dataset
SOURCE = "source_row"
"""Column that says where a row is from, FILE#ROW, unless the dataset has one of that name."""
_SCORED, _NUM_SHOWN = "scored", 3
_CONNECT_S = 60.0


@dataclass(frozen=True)
class Steps:
    """What is done with each row, in this order. Example: Steps(where="len(prompt) > 3", unique=("prompt",))"""

    where: str = ""
    """SQL condition over the columns; "": all rows."""
    unique: tuple[str, ...] = ()
    """Columns whose text is compared, but for case and space; of equal rows the first stays."""
    score: str = ""
    """Dotted path of a function (row) -> number, or name -> number for several columns."""
    top: int = 0
    """Rows that stay, of the largest `score`; 0: all."""

    def __post_init__(self) -> None:
        if self.top < 0 or (self.top and not self.score):
            raise UserError("--top is a number of rows, of the largest --score: give both")
        if not (self.where or self.unique or self.score):
            raise UserError("nothing to do: give --where, --unique or --score")


@contextlib.contextmanager
def on_workers(num_workers: int, scheduler: str = "") -> Iterator[Submit]:
    """Dask workers for `refine`: processes of this machine, with keys of their own, or those of a running scheduler.

    A part whose worker is lost is done again, three times. Raises: UserError: no scheduler answers.
    """
    import dask  # late: reading the command line needs no cluster
    from distributed import Client, LocalCluster
    from distributed.security import Security

    from rftdask.processes.dask_cluster import DASK_CONFIG  # late, as Dask

    with contextlib.ExitStack() as stack:
        stack.enter_context(dask.config.set({**DASK_CONFIG, "distributed.scheduler.allowed-failures": 3}))
        if scheduler:
            try:
                client = Client(scheduler, timeout=_CONNECT_S)
            except (OSError, ValueError) as error:
                raise UserError(f"--scheduler: no Dask scheduler answers at {scheduler}: {error}") from error
        else:
            own = {"host": "127.0.0.1", "protocol": "tls://", "security": Security.temporary(), "silence_logs": 40}
            # Without an address its server of pages takes port 8787, whoever has it.
            pages = {"dashboard_address": "127.0.0.1:0", "scheduler_kwargs": {"dashboard": False}}
            workers = {"n_workers": num_workers, "threads_per_worker": 1, **pages}
            client = Client(stack.enter_context(LocalCluster(**workers, **own)))
        stack.enter_context(client)
        yield lambda function, numbers: client.gather(client.map(function, numbers, pure=False))


@dataclass(frozen=True)
class Part:
    """A piece of an input file: rows [start, start + count) of a .jsonl, or row group `start` of Parquet."""

    file: str
    start: int
    count: int
    first_row: int


@dataclass(frozen=True)
class Refined:
    """What became of a dataset."""

    rows_in: int
    rows_out: int
    dropped: Mapping[str, int]
    """Rows by the reason."""
    examples: Mapping[str, Sequence[str]]
    """The first rows of each reason, as FILE#ROW."""

    def render(self) -> str:
        """As text, a line for each reason."""
        lines = [f"{self.rows_out:,} of {self.rows_in:,} rows stay"]
        for reason, count in self.dropped.items():
            lines.append(f"  {count:,} {reason}, such as {', '.join(self.examples[reason])}")
        return "\n".join(lines)


def refine(path: str, out: str, steps: Steps, submit: Submit) -> Refined:
    """Refine the dataset at `path` (.jsonl or .parquet, a file, a glob or a folder) into folder `out`.

    Raises: UserError: `out` is of another command, or a step is wrong; DataError: a file cannot be read, or nothing
        stays.
    """
    parts = read_parts(path)
    storage, told = (
        open_storage(out),
        {"input": path, "steps": asdict(steps), "parts": [asdict(part) for part in parts]},
    )
    said = json.dumps({**told, "version": __version__}, indent=1).encode()
    try:
        before = json.loads(storage.get("report/command.json"))
    except NotFoundError:
        if storage.list(""):
            raise UserError(f"{out} is not empty, and nothing says that this command made it") from None
        storage.put("report/command.json", said)
    else:
        if {key: before.get(key) for key in told} != json.loads(json.dumps(told)):
            raise UserError(f"{out} was begun by another command, or the input has changed; choose another folder")
    found = submit(partial(_score, parts, out, steps), range(len(parts)))
    hashes, scores = (np.concatenate([each[key] for each in found]) for key in ("hash", "score"))
    part_of = np.repeat(np.arange(len(parts)), [len(each["score"]) for each in found])
    reasons = np.zeros(len(hashes), np.int8)
    if steps.unique:
        first = np.unique(hashes, return_index=True)[1]
        reasons[:] = 1
        reasons[first] = 0
    if steps.top:
        staying = np.flatnonzero(reasons == 0)
        # Stable, so that of equal scores the first rows stay.
        below = staying[np.argsort(-scores[staying], kind="stable")[steps.top :]]
        reasons[below] = 2
    by_part = [reasons[part_of == number] for number in range(len(parts))]
    told_of = submit(partial(_select, out, by_part), range(len(parts)))
    names = (f"not ({steps.where})", f"with the text of an earlier row in {', '.join(steps.unique)}", "below the top")
    counts = (sum(each["filtered"] for each in found), int((reasons == 1).sum()), int((reasons == 2).sum()))
    firsts = [[name for each in found for name in each["examples"]]]
    firsts += [[name for each in told_of for name in each[reason]] for reason in (1, 2)]
    result = Refined(
        rows_in=sum(part.count for part in parts),
        rows_out=int((reasons == 0).sum()),
        dropped={name: count for name, count in zip(names, counts, strict=True) if count},
        examples={name: shown[:_NUM_SHOWN] for name, shown in zip(names, firsts, strict=True)},
    )
    storage.put(REPORT, json.dumps(asdict(result), indent=1).encode())
    for name in storage.list(_SCORED):
        storage.remove(f"{_SCORED}/{name}")
    if not result.rows_out:
        raise DataError(f"no row of {path} stays: {result.render()}")
    return result


def read_parts(path: str) -> list[Part]:
    """The parts of a dataset, in the order of its rows. Raises: DataError: there is no such file, or another kind."""
    filesystem, root = fsspec.core.url_to_fs(path)
    folder = root.rstrip("/")
    is_folder = filesystem.isdir(folder)
    files = [
        each for kind in ("jsonl", "parquet") for each in filesystem.glob(f"{folder}/*.{kind}" if is_folder else root)
    ]
    files = sorted({file for file in files if file.endswith((".jsonl", ".parquet"))})
    if not files:
        raise DataError(f"{path}: no .jsonl or .parquet file is there")
    parts: list[Part] = []
    for file in files:
        name, first = filesystem.unstrip_protocol(file), 0
        with filesystem.open(file, "rb") as opened:
            if file.endswith(".parquet"):
                metadata = pq.ParquetFile(opened).metadata
                sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            else:
                num_rows = sum(1 for line in opened if line.strip())
                sizes = [min(PART_ROWS, num_rows - start) for start in range(0, num_rows, PART_ROWS)]
        for number, size in enumerate(sizes):
            parts.append(Part(name, number if file.endswith(".parquet") else first, size, first))
            first += size
    return parts


def _read(part: Part) -> pa.Table:
    with fsspec.open(part.file, "rb") as opened:
        if part.file.endswith(".parquet"):
            return pq.ParquetFile(opened).read_row_group(part.start)
        rows = list(_rows(opened, part))
    return pa.Table.from_pylist(rows)


def _rows(opened: Any, part: Part) -> Iterator[dict[str, Any]]:
    number = 0
    for place, line in enumerate(opened, start=1):
        if not line.strip():
            continue
        if number >= part.start + part.count:
            return
        if number >= part.start:
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{part.file}:{place}: not a line of JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{part.file}:{place}: not an object {{column: value}}")
            yield row
        number += 1


def _score(parts: Sequence[Part], out: str, steps: Steps, number: int) -> dict[str, Any]:
    """Filter and score a part, unless that was done. Returns: hash and score of its rows, and what was filtered."""
    storage, name, part = open_storage(out), f"{_SCORED}/{number:06d}.parquet", parts[number]
    try:
        table = pq.read_table(pa.BufferReader(storage.get(name)))
    except NotFoundError:
        table = _read(part)
        if SOURCE not in table.column_names:
            at = [f"{os.path.basename(part.file)}#{part.first_row + row}" for row in range(len(table))]
            table = table.append_column(SOURCE, pa.array(at))
        places = np.arange(len(table))
        if steps.where:
            table, places = _filtered(table, steps.where)
        if steps.score:
            table = _scored(table, steps.score)
        table = table.append_column("__place", pa.array(places, "int64"))
        storage.put(name, _parquet(table))
    kept = set(table["__place"].to_pylist())
    gone = [row for row in range(part.count) if row not in kept]
    score = table["score"].to_numpy(zero_copy_only=False) if steps.score else np.zeros(len(table))
    shown = [f"{os.path.basename(part.file)}#{part.first_row + row}" for row in gone[:_NUM_SHOWN]]
    hashes = _hashes(table, steps.unique) if steps.unique else np.zeros(len(table), "S16")
    return {"hash": hashes, "score": score, "filtered": len(gone), "examples": shown}


def _filtered(table: pa.Table, where: str) -> tuple[pa.Table, np.ndarray]:
    try:
        import duckdb  # late: an extra
    except ImportError:
        raise UserError("--where is SQL, which needs DuckDB: pip install 'rftdask[sql]'") from None
    connection = duckdb.connect(":memory:")
    connection.execute("set python_enable_replacements = false")
    connection.register("rows", table.append_column("__place", pa.array(range(len(table)), "int64")))
    try:
        found = connection.sql(f"select __place from rows where ({where}) order by __place").to_arrow_table()
    except duckdb.Error as error:
        raise UserError(f"--where {where!r}: {error}\n(columns: {', '.join(table.column_names)})") from error
    finally:
        connection.close()
    places = found["__place"].to_numpy()
    return table.take(pa.array(places)), places


def _scored(table: pa.Table, score: str) -> pa.Table:
    function = find_part("score", score, {})
    rows = table.to_pylist()
    values: list[Mapping[str, float]] = []
    for row in rows:
        try:
            value = function(row)
            named = dict(value) if isinstance(value, Mapping) else {"score": value}
            values.append({key: float(number) for key, number in named.items()})
        except Exception as error:  # of somebody else's function: told with its row
            raise DataError(f"--score {score}, row {row[SOURCE]}: {type(error).__name__}: {error}") from error
        if "score" not in values[-1] or np.isnan(values[-1]["score"]):
            raise DataError(f"--score {score}, row {row[SOURCE]}: {values[-1]} has no number `score`")
    for name in sorted({key for value in values for key in value} or {"score"}):
        if name in table.column_names:
            raise DataError(f"--score {score}: the dataset has a column {name} already")
        table = table.append_column(name, pa.array([value.get(name) for value in values], "float64"))
    return table


def _hashes(table: pa.Table, columns: Sequence[str]) -> np.ndarray:
    if missing := [column for column in columns if column not in table.column_names]:
        raise UserError(f"--unique {', '.join(missing)}: no such column; there are {', '.join(table.column_names)}")
    hashes = []
    for row in table.select(list(columns)).to_pylist():
        texts = [" ".join(str(value).casefold().split()) for value in row.values()]
        hashes.append(hashlib.blake2b("\0".join(texts).encode(), digest_size=16).hexdigest()[:16])
    return np.array(hashes, "S16")


def _select(out: str, reasons: Sequence[np.ndarray], number: int) -> dict[int, list[str]]:
    """Write the rows of a part that stay. Returns: the first of those that do not, by the reason."""
    storage, own = open_storage(out), reasons[number]
    table = pq.read_table(pa.BufferReader(storage.get(f"{_SCORED}/{number:06d}.parquet")))
    if (own == 0).any():
        kept = table.filter(pa.array(own == 0)).drop_columns(["__place"])
        storage.put(f"part-{number:06d}.parquet", _parquet(kept))
    at = np.array(table[SOURCE].to_pylist(), object)
    return {reason: at[own == reason][:_NUM_SHOWN].tolist() for reason in (1, 2)}


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()
