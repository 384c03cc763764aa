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
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rftdask import __version__
from rftdask.config.plugins import find_part
from rftdask.data.juicer.base import OperatorResult, Pipeline, as_list, read_operators, read_recipe
from rftdask.data.juicer.session import check_juicer, open_juicer
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
_GONE = b"rftdask.gone"
"""Metadata of a scored part: how many rows --where and each operator of Data-Juicer dropped, and the first of them."""
_CONNECT_S = 60.0


@dataclass(frozen=True)
class Steps:
    """What is done with each row, in this order but for scores, which come before `unique` and decide after it.

    Example: Steps(where="len(prompt) > 3", unique=("prompt",))
    """

    where: str = ""
    """SQL condition over the columns; "": all rows."""
    juicer: str = ""
    """Operators of Data-Juicer that look at single rows, as a recipe (YAML) or a list of JSON: [{name: args}, ...];
    what they measure are columns. "": none."""
    unique: tuple[str, ...] = ()
    """Columns whose text is compared, but for case and space; of equal rows the first stays."""
    score: str = ""
    """Dotted path of a function (row) -> number, or name -> number for several columns."""
    top: int = 0
    """Rows that stay, of the largest `score`; 0: all."""

    def __post_init__(self) -> None:
        if self.top < 0 or (self.top and not self.score):
            raise UserError("--top is a number of rows, of the largest --score: give both")
        if not (self.where or self.juicer or self.unique or self.score):
            raise UserError("nothing to do: give --where, --juicer, --unique or --score")

    def pipeline(self) -> Pipeline | None:
        """The operators of `juicer`. Raises: UserError: they are none, or look at more than a row."""
        if not self.juicer:
            return None
        recipe: dict[str, Any] = {}
        if self.juicer.lstrip().startswith("["):
            try:
                entries = json.loads(self.juicer)
            except ValueError as error:
                raise UserError(f"--juicer: not a list of JSON: {error}") from error
        else:
            recipe = read_recipe(self.juicer, "--juicer")
            entries = recipe["process"]
        if "dataset_path" in recipe:
            raise UserError(
                "--juicer: the recipe has a dataset_path, and the dataset is that of the command; remove it"
            )
        operators = read_operators(entries, "--juicer")
        names = [name for entry in operators for name in entry]
        if others := [name for name in names if not name.endswith(("_filter", "_mapper"))]:
            raise UserError(
                f"--juicer: {', '.join(others)}: a worker sees a part of the rows, so only filters and mappers "
                "(*_filter, *_mapper) do the same in all parts; --unique finds equal texts of the whole dataset"
            )
        text_key = (as_list(recipe.get("text_keys")) or ["text"])[0]
        paths = as_list(recipe.get("custom_operator_paths"))
        return Pipeline(operators, text_key, int(recipe.get("np") or 1), paths)


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
    parts, pipeline = read_parts(path), steps.pipeline()
    if pipeline is not None:
        with tempfile.TemporaryDirectory(prefix="rftdask-") as folder:
            check_juicer(pipeline, Path(folder, "log"), "--juicer")
    storage, told = (
        open_storage(out),
        {"input": path, "steps": asdict(steps), "parts": [asdict(part) for part in parts]},
    )
    if pipeline is not None:  # what its recipe says now
        told["pipeline"] = asdict(pipeline)
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
    found = submit(partial(_score, parts, out, steps, pipeline), range(len(parts)))
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
    operators = () if pipeline is None else [f"by {name} (operator {n})" for n, name in enumerate(pipeline.names, 1)]
    early = (f"not ({steps.where})", *operators)
    names = (*early, f"with the text of an earlier row in {', '.join(steps.unique)}", "below the top")
    counts = [sum(each["gone"][number][0] for each in found) for number in range(len(early))]
    counts += [int((reasons == 1).sum()), int((reasons == 2).sum())]
    firsts = [[name for each in found for name in each["gone"][number][1]] for number in range(len(early))]
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


def _score(parts: Sequence[Part], out: str, steps: Steps, pipeline: Pipeline | None, number: int) -> dict[str, Any]:
    """Filter and score a part, unless that was done. Returns: hash and score of its rows; and of --where and each
    operator of Data-Juicer how many rows it dropped, and the first of them.
    """
    storage, name, part = open_storage(out), f"{_SCORED}/{number:06d}.parquet", parts[number]
    try:
        table = pq.read_table(pa.BufferReader(storage.get(name)))
    except NotFoundError:
        table = _read(part)
        if SOURCE not in table.column_names:
            at = [f"{os.path.basename(part.file)}#{part.first_row + row}" for row in range(len(table))]
            table = table.append_column(SOURCE, pa.array(at))
        places, gone = np.arange(len(table)), [np.zeros(0, np.int64)]
        if steps.where:
            table, places = _filtered(table, steps.where)
            gone = [np.setdiff1d(np.arange(part.count), places)]
        if pipeline is not None:
            table, dropped = _juiced(table, pipeline)
            gone += [places[rows] for rows in dropped]
        if steps.score:
            table = _scored(table, steps.score)
        first = [
            [f"{os.path.basename(part.file)}#{part.first_row + row}" for row in rows[:_NUM_SHOWN]] for rows in gone
        ]
        told = json.dumps([(len(rows), shown) for rows, shown in zip(gone, first, strict=True)])
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), _GONE: told.encode()})
        storage.put(name, _parquet(table))
    score = table["score"].to_numpy(zero_copy_only=False) if steps.score else np.zeros(len(table))
    hashes = _hashes(table, steps.unique) if steps.unique else np.zeros(len(table), "S16")
    return {"hash": hashes, "score": score, "gone": json.loads(table.schema.metadata[_GONE])}


def _juiced(table: pa.Table, pipeline: Pipeline) -> tuple[pa.Table, list[list[int]]]:
    """The rows that Data-Juicer leaves, as it leaves them; and the numbers of those that each operator dropped."""
    rows, results = table.to_pylist(), list[OperatorResult]()
    with (
        tempfile.TemporaryDirectory(prefix="rftdask-") as folder,
        open_juicer(pipeline, Path(folder, "log"), "--juicer") as juicer,
    ):
        left = sorted(juicer.run(rows, results.append), key=lambda result: result.row)
    kept = table.take(pa.array([result.row for result in left], "int64"))
    # Columns that no operator touched are as they were, to the last type.
    measured = {name for result in left for name in result.stats}
    for name in dict.fromkeys(name for result in left for name in (*result.changed, *result.stats)):
        values = [{**rows[each.row], **each.changed, **each.stats}.get(name) for each in left]
        is_number = name in measured and all(isinstance(value, int | float | None) for value in values)
        # Parts are one dataset: a part in which all are whole numbers is as the others.
        column, at = pa.array(values, "float64" if is_number else None), kept.schema.get_field_index(name)
        kept = kept.append_column(name, column) if at < 0 else kept.set_column(at, name, column)
    removed = {name for result in left for name in result.removed}
    kept = kept.drop_columns([name for name in kept.column_names if name in removed])
    return kept, [list(result.dropped) for result in results]


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
        metadata = {key: value for key, value in table.schema.metadata.items() if key != _GONE}
        kept = table.filter(pa.array(own == 0)).replace_schema_metadata(metadata)
        storage.put(f"part-{number:06d}.parquet", _parquet(kept))
    at = np.array(table[SOURCE].to_pylist(), object)
    return {reason: at[own == reason][:_NUM_SHOWN].tolist() for reason in (1, 2)}


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()
