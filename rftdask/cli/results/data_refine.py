"""Refine: filters, deduplicates and scores a dataset, part by part, on Dask workers.

    parts of the input -> scored/<n>.parquet (filtered, scored) -> selection by hash and score -> part-<n>.parquet

A worker holds one part at a time, the client a hash and a number for each row. Files are written atomically, so the
same command continues where it was interrupted; a different one in the same folder is refused. The output is a dataset
(a folder of Parquet) with a report of the dropped rows and their reasons. This module knows no run.
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
from typing import Annotated, Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from rftdask import __version__
from rftdask.cli.common import say
from rftdask.cluster.secrets_dir import new_security
from rftdask.config.plugins import find_part
from rftdask.data.juicer import check_juicer, open_juicer
from rftdask.data.juicer.base import OperatorResult, Pipeline, make_pipeline, read_recipe
from rftdask.data.juicer.environment import set_up
from rftdask.data.task_pipeline import NUM_EXAMPLES, SOURCE
from rftdask.errors import DataError, NotFoundError, UserError
from rftdask.processes.dask_cluster import set_config
from rftdask.storage import open_storage

Submit = Callable[[Callable[[int], Any], Sequence[int]], list[Any]]
"""Maps a function over the numbers of parts, on any workers, and returns the results in order."""
PART_ROWS = 50_000
"""Rows of a part of a .jsonl file; a part of a Parquet file is a row group."""
REPORT, _COMMAND = "report/report.json", "report/command.json"  # not next to the parts, where they would be data
_SCORED = "scored"
_DROPPED = b"rftdask.gone"
"""Metadata of a scored part: how many rows --where and each operator of Data-Juicer dropped, and the first of them."""
_CONNECT_S = 60.0


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
    """Operations on each row, in this order, except that scores are computed before `unique`.

    Example: Steps(where="len(prompt) > 3", unique=("prompt",))
    """

    where: str = ""
    """SQL condition over the columns; "": all rows."""
    juicer: str = ""
    """Operators of Data-Juicer on single rows, as a recipe (YAML) or a JSON list [{name: args}, ...]; their statistics
    become columns. "": none."""
    unique: tuple[str, ...] = ()
    """Columns whose text is compared, ignoring case and white space; the first of equal rows remains."""
    score: str = ""
    """Dotted path of a function (row) -> number, or name -> number for several columns."""
    top: int = 0
    """Number of rows with the largest `score` that remain; 0: all."""

    def __post_init__(self) -> None:
        if self.top < 0 or (self.top and not self.score):
            raise UserError("--top is the number of rows to keep by --score: give both")
        if not (self.where or self.juicer or self.unique or self.score):
            raise UserError("nothing to do: give --where, --juicer, --unique or --score")

    def pipeline(self) -> Pipeline | None:
        """Return the operators of `juicer`. Raises: UserError: invalid operators, or not on single rows."""
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
        pipeline = make_pipeline(entries, "--juicer", recipe, (recipe.get("text_keys") or ["text"])[0])
        if others := [name for name in pipeline.names if not name.endswith(("_filter", "_mapper"))]:
            raise UserError(
                f"--juicer: {', '.join(others)}: a worker sees a part of the rows, so only filters and mappers "
                "(*_filter, *_mapper) are allowed; --unique finds equal texts in the whole dataset"
            )
        return pipeline


@contextlib.contextmanager
def on_workers(num_workers: int, scheduler: str = "") -> Iterator[Submit]:
    """Provide Dask workers for `refine`: processes of this machine with their own keys, or of a running scheduler.

    A part whose worker is lost is repeated up to three times. Raises: UserError: no scheduler answers.
    """
    from distributed import Client, LocalCluster  # late: reading the command line needs no cluster

    with contextlib.ExitStack() as stack:
        stack.enter_context(set_config({"distributed.scheduler.allowed-failures": 3}))
        if scheduler:
            try:
                client = Client(scheduler, timeout=_CONNECT_S)
            except (OSError, ValueError) as error:
                raise UserError(f"--scheduler: no Dask scheduler answers at {scheduler}: {error}") from error
        else:
            network = {"host": "127.0.0.1", "protocol": "tls://", "security": new_security(), "silence_logs": 40}
            # By default the dashboard takes port 8787, which may be in use.
            dashboard = {"dashboard_address": "127.0.0.1:0", "scheduler_kwargs": {"dashboard": False}}
            workers = {"n_workers": num_workers, "threads_per_worker": 1}
            client = Client(stack.enter_context(LocalCluster(**workers, **network, **dashboard)))
        stack.enter_context(client)
        yield lambda function, numbers: client.gather(client.map(function, numbers, pure=False))


@dataclass(frozen=True)
class Part:
    """A piece of an input file: rows [start, start + count) of a .jsonl, or row group `start` of Parquet."""

    file: str
    start: int
    count: int
    first_row: int

    def source(self, row: int) -> str:
        """Return the origin of a row of the part, FILE#ROW."""
        return f"{os.path.basename(self.file)}#{self.first_row + row}"


@dataclass(frozen=True)
class Refined:
    """Result of refining a dataset."""

    rows_in: int
    rows_out: int
    dropped: Mapping[str, int]
    """Reason -> number of rows."""
    examples: Mapping[str, Sequence[str]]
    """Reason -> its first rows, as FILE#ROW."""

    def render(self) -> str:
        """Format the result as text, with one line per reason."""
        lines = [f"{self.rows_out:,} of {self.rows_in:,} rows remain"]
        for reason, count in self.dropped.items():
            lines.append(f"  {count:,} {reason}, such as {', '.join(self.examples[reason])}")
        return "\n".join(lines)


def refine(path: str, out: str, steps: Steps, submit: Submit) -> Refined:
    """Refine the dataset at `path` (.jsonl or .parquet, a file, a glob or a folder) into folder `out`.

    Raises: UserError: a different command made `out`, or a step is invalid; DataError: a file cannot be read, or no row
        remains.
    """
    parts, pipeline, storage = read_parts(path), steps.pipeline(), open_storage(out)
    command: dict[str, Any] = {"input": path, "steps": asdict(steps), "parts": [asdict(part) for part in parts]}
    if pipeline is not None:
        check_juicer(pipeline, "--juicer")
        command["pipeline"] = asdict(pipeline)  # the content of a recipe may change
    try:
        before = json.loads(storage.get(_COMMAND))
    except NotFoundError:
        if storage.list(""):
            raise UserError(f"{out} is not empty, and was not made by this command; choose another folder") from None
        storage.put(_COMMAND, json.dumps({**command, "version": __version__}, indent=1).encode())
    else:
        if {key: before.get(key) for key in command} != json.loads(json.dumps(command)):
            raise UserError(f"{out} was made by another command, or the input has changed; choose another folder")
    scored = submit(partial(_score, parts, out, steps, pipeline), range(len(parts)))
    hashes, scores = (np.concatenate([part[key] for part in scored]) for key in ("hash", "score"))
    ends = np.cumsum([len(part["score"]) for part in scored])
    reasons = np.zeros(len(hashes), np.int8)  # 0: remains, 1: repeats the text of an earlier row, 2: below the top
    if steps.unique:
        reasons[:] = 1
        reasons[np.unique(hashes, return_index=True)[1]] = 0
    if steps.top:
        remaining = np.flatnonzero(reasons == 0)
        # A stable sort: the first of equal scores remain.
        reasons[remaining[np.argsort(-scores[remaining], kind="stable")[steps.top :]]] = 2
    selected = submit(partial(_select, out, np.split(reasons, ends[:-1])), range(len(parts)))
    operators = [] if pipeline is None else [f"by {name} (operator {n})" for n, name in enumerate(pipeline.names, 1)]
    drops: dict[str, tuple[int, list[str]]] = {}  # reason -> count, first rows
    for number, reason in enumerate([f"not ({steps.where})", *operators]):
        of_parts = [part["dropped"][number] for part in scored]
        drops[reason] = sum(count for count, _ in of_parts), [row for _, rows in of_parts for row in rows]
    repeats = f"with the text of an earlier row in {', '.join(steps.unique)}"
    for number, reason in ((1, repeats), (2, "below the top")):
        drops[reason] = int((reasons == number).sum()), [row for rows in selected for row in rows[number]]
    result = Refined(
        rows_in=sum(part.count for part in parts),
        rows_out=int((reasons == 0).sum()),
        dropped={reason: count for reason, (count, _) in drops.items() if count},
        examples={reason: rows[:NUM_EXAMPLES] for reason, (_, rows) in drops.items()},
    )
    storage.put(REPORT, json.dumps(asdict(result), indent=1).encode())
    for name in storage.list(_SCORED):
        storage.remove(f"{_SCORED}/{name}")
    if not result.rows_out:
        raise DataError(f"no row of {path} remains: {result.render()}")
    return result


def read_parts(path: str) -> list[Part]:
    """List the parts of a dataset, in the order of its rows. Raises: DataError: no such file, or another kind."""
    filesystem, root = fsspec.core.url_to_fs(path)
    folder = root.rstrip("/")
    patterns = [f"{folder}/*.jsonl", f"{folder}/*.parquet"] if filesystem.isdir(folder) else [root]
    files = {file for pattern in patterns for file in filesystem.glob(pattern)}
    parts: list[Part] = []
    for file in sorted(file for file in files if file.endswith((".jsonl", ".parquet"))):
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
    if not parts:
        raise DataError(f"{path}: no rows in .jsonl or .parquet files")
    return parts


def _read(part: Part) -> pa.Table:
    with fsspec.open(part.file, "rb") as opened:
        if part.file.endswith(".parquet"):
            return pq.ParquetFile(opened).read_row_group(part.start)
        return table_of(list(_read_lines(opened, part)))


def table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Make a table with the columns of all rows; `Table.from_pylist` has only those of the first row."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names})


def _read_lines(opened: Any, part: Part) -> Iterator[dict[str, Any]]:
    number = 0
    for line_number, line in enumerate(opened, start=1):
        if not line.strip():
            continue
        if number >= part.start + part.count:
            return
        if number >= part.start:
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{part.file}:{line_number}: not a line of JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{part.file}:{line_number}: not an object {{column: value}}")
            yield row
        number += 1


def _score(parts: Sequence[Part], out: str, steps: Steps, pipeline: Pipeline | None, number: int) -> dict[str, Any]:
    """Filter and score a part, unless that was done before.

    Returns: "hash" and "score" of its rows; "dropped": for --where and each operator of Data-Juicer the number of rows
    that it dropped, and the first of them.
    """
    storage, name, part = open_storage(out), f"{_SCORED}/{number:06d}.parquet", parts[number]
    try:
        table = pq.read_table(pa.BufferReader(storage.get(name)))
    except NotFoundError:
        table = _read(part)
        if SOURCE not in table.column_names:
            table = table.append_column(SOURCE, pa.array([part.source(row) for row in range(len(table))]))
        places, dropped = np.arange(len(table)), [np.zeros(0, np.int64)]
        if steps.where:
            places = _matching(table, steps.where)
            table = table.take(pa.array(places))
            dropped = [np.setdiff1d(np.arange(part.count), places)]
        if pipeline is not None:
            table, dropped_by = _run_juicer(table, pipeline)
            dropped += [places[rows] for rows in dropped_by]
        if steps.score:
            table = _with_scores(table, steps.score)
        counts = [(len(rows), [part.source(row) for row in rows[:NUM_EXAMPLES]]) for rows in dropped]
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), _DROPPED: json.dumps(counts).encode()})
        storage.put(name, _parquet(table))
    score = table["score"].to_numpy(zero_copy_only=False) if steps.score else np.zeros(len(table))
    hashes = _hashes(table, steps.unique) if steps.unique else np.zeros(len(table), "S16")
    return {"hash": hashes, "score": score, "dropped": json.loads(table.schema.metadata[_DROPPED])}


def _run_juicer(table: pa.Table, pipeline: Pipeline) -> tuple[pa.Table, list[Sequence[int]]]:
    """Run Data-Juicer; return its table, and the numbers of the rows that each operator dropped."""
    rows, results = table.to_pylist(), list[OperatorResult]()
    with open_juicer(pipeline, "--juicer") as juicer:
        remaining = sorted(juicer.run(rows, results.append), key=lambda result: result.row)
    kept = table.take(pa.array([result.row for result in remaining], "int64"))
    # Columns that no operator changed keep their types.
    statistics = {name for result in remaining for name in result.stats}
    for name in dict.fromkeys(name for result in remaining for name in (*result.changed, *result.stats)):
        values = [{**rows[result.row], **result.changed, **result.stats}.get(name) for result in remaining]
        is_number = name in statistics and all(isinstance(value, int | float | None) for value in values)
        # Always floats: the parts are one dataset, even if all numbers of one part are integers.
        column, index = pa.array(values, "float64" if is_number else None), kept.schema.get_field_index(name)
        kept = kept.append_column(name, column) if index < 0 else kept.set_column(index, name, column)
    removed = {name for result in remaining for name in result.removed}
    kept = kept.drop_columns([name for name in kept.column_names if name in removed])
    return kept, [result.dropped for result in results]


def _matching(table: pa.Table, where: str) -> np.ndarray:
    """Return the numbers of the rows that match a SQL condition."""
    try:
        import duckdb  # late: an extra
    except ImportError:
        raise UserError("--where is SQL, which needs DuckDB: pip install 'rftdask[sql]'") from None
    with duckdb.connect(":memory:") as connection:
        connection.execute("set python_enable_replacements = false")
        connection.register("rows", table.append_column("__place", pa.array(range(len(table)), "int64")))
        try:
            places = connection.sql(f"select __place from rows where ({where}) order by __place").to_arrow_table()
        except duckdb.Error as error:
            raise UserError(f"--where {where!r}: {error}\n(columns: {', '.join(table.column_names)})") from error
    return np.asarray(places["__place"].to_numpy())


def _with_scores(table: pa.Table, score: str) -> pa.Table:
    function = find_part("score", score, {})
    rows: list[Mapping[str, float]] = []
    for row in table.to_pylist():
        try:
            value = function(row)
            numbers = dict(value) if isinstance(value, Mapping) else {"score": value}
            rows.append({name: float(number) for name, number in numbers.items()})
        except Exception as error:  # from the user's function
            raise DataError(f"--score {score}, row {row[SOURCE]}: {type(error).__name__}: {error}") from error
        if "score" not in rows[-1] or np.isnan(rows[-1]["score"]):
            raise DataError(f"--score {score}, row {row[SOURCE]}: {rows[-1]} has no number `score`")
    for name in sorted({name for numbers in rows for name in numbers} or {"score"}):
        if name in table.column_names:
            raise DataError(f"--score {score}: the dataset has a column {name} already")
        table = table.append_column(name, pa.array([numbers.get(name) for numbers in rows], "float64"))
    return table


def _hashes(table: pa.Table, columns: Sequence[str]) -> np.ndarray:
    if missing := [column for column in columns if column not in table.column_names]:
        raise UserError(f"--unique {', '.join(missing)}: no such column; columns: {', '.join(table.column_names)}")
    hashes = []
    for row in table.select(list(columns)).to_pylist():
        texts = [" ".join(str(value).casefold().split()) for value in row.values()]
        hashes.append(hashlib.blake2b("\0".join(texts).encode(), digest_size=16).hexdigest()[:16])
    return np.array(hashes, "S16")


def _select(out: str, reasons: Sequence[np.ndarray], number: int) -> dict[int, list[str]]:
    """Write the remaining rows of a part. Returns: the first rows that were dropped for reason 1, and for 2."""
    storage, part_reasons = open_storage(out), reasons[number]
    table = pq.read_table(pa.BufferReader(storage.get(f"{_SCORED}/{number:06d}.parquet")))
    if (part_reasons == 0).any():
        metadata = {key: value for key, value in table.schema.metadata.items() if key != _DROPPED}
        kept = table.filter(pa.array(part_reasons == 0)).replace_schema_metadata(metadata)
        storage.put(f"part-{number:06d}.parquet", _parquet(kept))
    sources = np.array(table[SOURCE].to_pylist(), object)
    return {reason: sources[part_reasons == reason][:NUM_EXAMPLES].tolist() for reason in (1, 2)}


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()
