"""`rftdask data refine` and `rftdask data setup`: filter, deduplicate and score a dataset over Dask workers.

    parts of the input -> scored/<n>.parquet (filtered, scored) -> selection by hash and score -> part-<n>.parquet

A worker holds one part at a time; the client holds a hash and a score for each row. Files appear whole, so the same
command continues after an interruption, and another command in the same folder is rejected. The output is a dataset (a
folder of Parquet files) with a report of the dropped rows. The module does not know about runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import dask
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from distributed import Client, LocalCluster
from distributed.security import Security

from rftdask import __version__
from rftdask.cli.common import say
from rftdask.config.plugins import find_part
from rftdask.data.juicer.base import OperatorResult, Pipeline, as_list, read_operators, read_recipe
from rftdask.data.juicer.environment import set_up
from rftdask.data.juicer.session import check_juicer, open_juicer
from rftdask.errors import DataError, NotFoundError, UserError
from rftdask.processes.dask_cluster import DASK_CONFIG
from rftdask.storage import open_storage

Submit = Callable[[Callable[[int], Any], Sequence[int]], list[Any]]
"""Maps a function over part numbers on the workers, and returns the results in order."""
PART_ROWS = 50_000
"""Rows in a part of a .jsonl file. A part of a Parquet file is a row group."""
REPORT = "report/report.json"  # in a subfolder: files next to the parts would belong to the dataset
SOURCE = "source_row"
"""Column with the origin of a row, FILE#ROW, unless the dataset already has a column of that name."""
_SCORED, _NUM_SHOWN = "scored", 3
_GONE = b"rftdask.gone"
"""Metadata key of a scored part: count and first rows that --where and each Data-Juicer operator dropped."""
_CONNECT_TIMEOUT_S = 60.0


def data_refine(
    path: Annotated[str, typer.Argument(metavar="DATASET", help="Input .jsonl or .parquet: a file, glob or folder")],
    out: Annotated[str, typer.Argument(metavar="FOLDER", help="Output folder, new or of this command to continue it")],
    where: Annotated[str, typer.Option(help="SQL condition over the columns; keeps the rows that satisfy it")] = "",
    juicer: Annotated[
        str, typer.Option(help="Data-Juicer filters and mappers: recipe (YAML) or JSON [{name: {...}}]")
    ] = "",
    unique: Annotated[list[str] | None, typer.Option(help="Column with unique text, ignoring case and space")] = None,
    score: Annotated[str, typer.Option(help="Dotted path of a function (row) -> number, or {name: number}")] = "",
    top: Annotated[int, typer.Option(min=0, help="Number of rows to keep, with the highest --score (0: all)")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Number of processes on this machine")] = 2,
    scheduler: Annotated[str, typer.Option(metavar="ADDRESS", help="Dask scheduler whose workers to use instead")] = "",
) -> None:
    """Filter, deduplicate and score a dataset.

    Dask workers do it in parts. It prints how many rows were dropped, and why.
    """
    steps = Steps(where, juicer, tuple(unique or ()), score, top)
    with on_workers(workers, scheduler) as submit:
        say(refine(path, out, steps, submit).render())


def data_setup(
    extra: Annotated[
        list[str] | None, typer.Option("--with", metavar="PACKAGE", help="Additional package: torch, ftfy, ...")
    ] = None,
) -> None:
    """Create the environment of Data-Juicer, once.

    task_pipeline, the operator data_juicer and `rftdask data refine` use it.
    """
    say(set_up(extra or ()))


@dataclass(frozen=True)
class Steps:
    """Steps of a refinement, in this order, except that scores are computed before `unique` and applied after it.

    Example: Steps(where="len(prompt) > 3", unique=("prompt",))
    """

    where: str = ""
    """SQL condition over the columns; "": all rows."""
    juicer: str = ""
    """Data-Juicer operators on single rows, as a recipe (YAML) or a JSON list [{name: args}, ...]. Their measurements
    become columns. "": none."""
    unique: tuple[str, ...] = ()
    """Columns whose text is compared, ignoring case and whitespace. The first of equal rows stays."""
    score: str = ""
    """Dotted path of a function (row) -> number, or (row) -> {name: number} for several columns."""
    top: int = 0
    """Number of rows to keep, with the highest `score`. 0: all."""

    def __post_init__(self) -> None:
        if self.top < 0 or (self.top and not self.score):
            raise UserError(
                f"--top {self.top}: it keeps the rows with the highest --score; give both, and --top above 0"
            )
        if not (self.where or self.juicer or self.unique or self.score):
            raise UserError("nothing to do: give --where, --juicer, --unique or --score")

    def pipeline(self) -> Pipeline | None:
        """Return the operators of `juicer`. Raises: UserError: not an operator, or one that needs several rows."""
        if not self.juicer:
            return None
        recipe: dict[str, Any] = {}
        if self.juicer.lstrip().startswith("["):
            try:
                entries = json.loads(self.juicer)
            except ValueError as error:
                raise UserError(f"--juicer: not a JSON list: {error}") from error
        else:
            recipe = read_recipe(self.juicer, "--juicer")
            entries = recipe["process"]
        if "dataset_path" in recipe:
            raise UserError("--juicer: the recipe has a dataset_path, but the command names the dataset; remove it")
        operators = read_operators(entries, "--juicer")
        names = [name for entry in operators for name in entry]
        if others := [name for name in names if not name.endswith(("_filter", "_mapper"))]:
            raise UserError(
                f"--juicer: {', '.join(others)}: a worker sees only a part of the rows, so use filters and mappers "
                "(*_filter, *_mapper); --unique removes equal texts of the whole dataset"
            )
        text_key = (as_list(recipe.get("text_keys")) or ["text"])[0]
        paths = as_list(recipe.get("custom_operator_paths"))
        return Pipeline(operators, text_key, int(recipe.get("np") or 1), paths)


@contextlib.contextmanager
def on_workers(num_workers: int, scheduler: str = "") -> Iterator[Submit]:
    """Start Dask workers for `refine` on this machine, with their own TLS keys, or use those of a running scheduler.

    A part whose worker is lost is repeated up to three times. Raises: UserError: the scheduler does not answer.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(dask.config.set({**DASK_CONFIG, "distributed.scheduler.allowed-failures": 3}))
        if scheduler:
            try:
                client = Client(scheduler, timeout=_CONNECT_TIMEOUT_S)
            except (OSError, ValueError) as error:
                raise UserError(f"--scheduler: no Dask scheduler answers at {scheduler}: {error}") from error
        else:
            cluster = LocalCluster(
                n_workers=num_workers,
                threads_per_worker=1,
                host="127.0.0.1",
                protocol="tls://",
                security=Security.temporary(),
                silence_logs=40,
                dashboard_address="127.0.0.1:0",  # without it, Dask would take port 8787
                scheduler_kwargs={"dashboard": False},
            )
            client = Client(stack.enter_context(cluster))
        stack.enter_context(client)
        yield lambda function, numbers: client.gather(client.map(function, numbers, pure=False))


@dataclass(frozen=True)
class Part:
    """Part of an input file: rows [start, start + count) of a .jsonl file, or row group `start` of a Parquet file."""

    file: str
    start: int
    count: int
    first_row: int


@dataclass(frozen=True)
class Refined:
    """Result of a refinement."""

    rows_in: int
    rows_out: int
    dropped: Mapping[str, int]
    """Number of dropped rows by reason."""
    examples: Mapping[str, Sequence[str]]
    """First dropped rows by reason, as FILE#ROW."""

    def render(self) -> str:
        """Return text with a line for each reason."""
        lines = [f"{self.rows_out:,} of {self.rows_in:,} rows stay"]
        for reason, count in self.dropped.items():
            lines.append(f"  {count:,} {reason}, such as {', '.join(self.examples[reason])}")
        return "\n".join(lines)


def refine(path: str, out: str, steps: Steps, submit: Submit) -> Refined:
    """Refine the dataset at `path` (.jsonl or .parquet, a file, a glob or a folder) into folder `out`.

    Raises: UserError: `out` belongs to another command, or a step is wrong; DataError: a file cannot be read, or no
        row stays.
    """
    parts, pipeline = read_parts(path), steps.pipeline()
    if pipeline is not None:
        with tempfile.TemporaryDirectory(prefix="rftdask-") as folder:
            check_juicer(pipeline, Path(folder, "log"), "--juicer")
    storage = open_storage(out)
    command = {"input": path, "steps": asdict(steps), "parts": [asdict(part) for part in parts]}
    if pipeline is not None:  # the recipe may have changed since
        command["pipeline"] = asdict(pipeline)
    try:
        before = json.loads(storage.get("report/command.json"))
    except NotFoundError:
        if storage.list(""):
            raise UserError(f"{out} is not empty, and this command did not create it; choose another folder") from None
        storage.put("report/command.json", json.dumps({**command, "version": __version__}, indent=1).encode())
    else:
        if {key: before.get(key) for key in command} != json.loads(json.dumps(command)):
            raise UserError(f"{out} was begun by another command, or the input has changed; choose another folder")
    scored = submit(partial(_score, parts, out, steps, pipeline), range(len(parts)))
    hashes, scores = (np.concatenate([result[key] for result in scored]) for key in ("hash", "score"))
    part_of = np.repeat(np.arange(len(parts)), [len(result["score"]) for result in scored])
    reasons = np.zeros(len(hashes), np.int8)
    if steps.unique:
        first = np.unique(hashes, return_index=True)[1]
        reasons[:] = 1
        reasons[first] = 0
    if steps.top:
        staying = np.flatnonzero(reasons == 0)
        # A stable sort keeps the first of equal scores.
        below = staying[np.argsort(-scores[staying], kind="stable")[steps.top :]]
        reasons[below] = 2
    by_part = [reasons[part_of == number] for number in range(len(parts))]
    selected = submit(partial(_select, out, by_part), range(len(parts)))
    operators = () if pipeline is None else [f"by {name} (operator {n})" for n, name in enumerate(pipeline.names, 1)]
    early = (f"not ({steps.where})", *operators)
    names = (*early, f"with the text of an earlier row in {', '.join(steps.unique)}", "below the top")
    counts = [sum(result["gone"][number][0] for result in scored) for number in range(len(early))]
    counts += [int((reasons == 1).sum()), int((reasons == 2).sum())]
    firsts = [[name for result in scored for name in result["gone"][number][1]] for number in range(len(early))]
    firsts += [[name for rows in selected for name in rows[reason]] for reason in (1, 2)]
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
        raise DataError(f"no row of {path} is left: {result.render()}")
    return result


def read_parts(path: str) -> list[Part]:
    """Return the parts of a dataset in row order. Raises: DataError: no .jsonl or .parquet file exists."""
    filesystem, root = fsspec.core.url_to_fs(path)
    folder = root.rstrip("/")
    is_folder = filesystem.isdir(folder)
    names = filesystem.glob(f"{folder}/*" if is_folder else root)
    files = sorted(name for name in names if name.endswith((".jsonl", ".parquet")))
    if not files:
        raise DataError(f"{path}: no .jsonl or .parquet file found")
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
                raise DataError(f"{part.file}:{place}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{part.file}:{place}: not a JSON object {{column: value}}")
            yield row
        number += 1


def _score(parts: Sequence[Part], out: str, steps: Steps, pipeline: Pipeline | None, number: int) -> dict[str, Any]:
    """Filter and score a part, unless its file exists. Returns: hash and score of its rows ("hash", "score"), and the
    count and first rows that --where and each Data-Juicer operator dropped ("gone").
    """
    storage, name, part = open_storage(out), f"{_SCORED}/{number:06d}.parquet", parts[number]
    try:
        table = pq.read_table(pa.BufferReader(storage.get(name)))
    except NotFoundError:
        table = _read(part)
        if SOURCE not in table.column_names:
            table = table.append_column(SOURCE, pa.array(_row_names(part, range(len(table)))))
        places, gone = np.arange(len(table)), [np.zeros(0, np.int64)]
        if steps.where:
            table, places = _filtered(table, steps.where)
            gone = [np.setdiff1d(np.arange(part.count), places)]
        if pipeline is not None:
            table, dropped = _juiced(table, pipeline)
            gone += [places[rows] for rows in dropped]
        if steps.score:
            table = _scored(table, steps.score)
        dropped_rows = json.dumps([(len(rows), _row_names(part, rows[:_NUM_SHOWN])) for rows in gone])
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), _GONE: dropped_rows.encode()})
        storage.put(name, _parquet(table))
    score = table["score"].to_numpy(zero_copy_only=False) if steps.score else np.zeros(len(table))
    hashes = _hashes(table, steps.unique) if steps.unique else np.zeros(len(table), "S16")
    return {"hash": hashes, "score": score, "gone": json.loads(table.schema.metadata[_GONE])}


def _row_names(part: Part, rows: Iterable[int]) -> list[str]:
    return [f"{os.path.basename(part.file)}#{part.first_row + row}" for row in rows]


def _juiced(table: pa.Table, pipeline: Pipeline) -> tuple[pa.Table, list[list[int]]]:
    """Return the rows that Data-Juicer keeps, as changed by it, and the row numbers that each operator dropped."""
    rows, results = table.to_pylist(), list[OperatorResult]()
    with (
        tempfile.TemporaryDirectory(prefix="rftdask-") as folder,
        open_juicer(pipeline, Path(folder, "log"), "--juicer") as juicer,
    ):
        left = sorted(juicer.run(rows, results.append), key=lambda result: result.row)
    kept = table.take(pa.array([result.row for result in left], "int64"))
    # Columns that no operator changed keep their types.
    measured = {name for result in left for name in result.stats}
    for name in dict.fromkeys(name for result in left for name in (*result.changed, *result.stats)):
        values = [{**rows[result.row], **result.changed, **result.stats}.get(name) for result in left]
        is_number = name in measured and all(isinstance(value, int | float | None) for value in values)
        # All parts need one type, also a part whose measurements are all whole numbers.
        column, at = pa.array(values, "float64" if is_number else None), kept.schema.get_field_index(name)
        kept = kept.append_column(name, column) if at < 0 else kept.set_column(at, name, column)
    removed = {name for result in left for name in result.removed}
    kept = kept.drop_columns([name for name in kept.column_names if name in removed])
    return kept, [list(result.dropped) for result in results]


def _filtered(table: pa.Table, where: str) -> tuple[pa.Table, np.ndarray]:
    try:
        import duckdb  # late: an extra
    except ImportError:
        raise UserError("--where needs DuckDB: pip install 'rftdask[sql]'") from None
    connection = duckdb.connect(":memory:")
    connection.execute("set python_enable_replacements = false")
    connection.register("rows", table.append_column("__place", pa.array(range(len(table)), "int64")))
    try:
        places = connection.sql(f"select __place from rows where ({where}) order by __place").to_arrow_table()
    except duckdb.Error as error:
        raise UserError(f"--where {where!r}: {error}\n(columns: {', '.join(table.column_names)})") from error
    finally:
        connection.close()
    numbers = places["__place"].to_numpy()
    return table.take(pa.array(numbers)), numbers


def _scored(table: pa.Table, score: str) -> pa.Table:
    function = find_part("score", score, {})
    rows = table.to_pylist()
    values: list[Mapping[str, float]] = []
    for row in rows:
        try:
            value = function(row)
            named = dict(value) if isinstance(value, Mapping) else {"score": value}
            values.append({key: float(number) for key, number in named.items()})
        except Exception as error:  # raised by the user's function
            raise DataError(f"--score {score}, row {row[SOURCE]}: {type(error).__name__}: {error}") from error
        if "score" not in values[-1] or np.isnan(values[-1]["score"]):
            raise DataError(f"--score {score}, row {row[SOURCE]}: {values[-1]} has no number 'score'")
    for name in sorted({key for value in values for key in value} or {"score"}):
        if name in table.column_names:
            raise DataError(f"--score {score}: the dataset already has a column {name}; rename one of them")
        table = table.append_column(name, pa.array([value.get(name) for value in values], "float64"))
    return table


def _hashes(table: pa.Table, columns: Sequence[str]) -> np.ndarray:
    if missing := [column for column in columns if column not in table.column_names]:
        raise UserError(
            f"--unique {', '.join(missing)}: no such column; the columns are {', '.join(table.column_names)}"
        )
    hashes = []
    for row in table.select(list(columns)).to_pylist():
        texts = [" ".join(str(value).casefold().split()) for value in row.values()]
        hashes.append(hashlib.blake2b("\0".join(texts).encode(), digest_size=16).hexdigest()[:16])
    return np.array(hashes, "S16")


def _select(out: str, reasons: Sequence[np.ndarray], number: int) -> dict[int, list[str]]:
    """Write the rows of a part that stay. Returns: the first dropped rows, by reason number."""
    storage, reason_of = open_storage(out), reasons[number]
    table = pq.read_table(pa.BufferReader(storage.get(f"{_SCORED}/{number:06d}.parquet")))
    if (reason_of == 0).any():
        metadata = {key: value for key, value in table.schema.metadata.items() if key != _GONE}
        kept = table.filter(pa.array(reason_of == 0)).replace_schema_metadata(metadata)
        storage.put(f"part-{number:06d}.parquet", _parquet(kept))
    sources = np.array(table[SOURCE].to_pylist(), object)
    return {reason: sources[reason_of == reason][:_NUM_SHOWN].tolist() for reason in (1, 2)}


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()
