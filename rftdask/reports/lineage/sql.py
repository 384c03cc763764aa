"""SQL over a run: its tables in an in-memory DuckDB.

Invariant: a query reads only the tables that it names, and can use neither Python variables nor downloaded extensions.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from rftdask.errors import UserError
from rftdask.reports.lineage.tables import TABLES, RunTables
from rftdask.storage.safe_text import cell, printable

if TYPE_CHECKING:
    import duckdb

_CONFINED_MEMORY = "4GB"
"""Memory for the sorting and grouping of a confined statement, not counting the tables of the run."""
_CONFINED_THREADS = 4

OVERVIEW = """
select experiences.stage, explore_step as explored, max(max_policy_version) as version, count(*) as rows,
  count(*) filter (state = 'trained') as trained, count(*) filter (state = 'dropped') as dropped,
  count(*) filter (state = 'waiting') as waiting, avg(reward) as reward,
  avg(len(tokens) - prompt_length) as tokens, max(states.step) as step
from experiences join states using (stage, shard, row)
group by experiences.stage, explore_step order by all
"""
"""Statement with a line per explore step: the states of its rollouts."""


def open_tables(url: str | Path) -> duckdb.DuckDBPyConnection:
    """Connect to all tables of the run at `url`; see `TABLES`.

    Warns: a file could not be read. Raises: UserError: duckdb is not installed; DataError: not a run folder.
    """
    tables = RunTables(url)
    connection = _connect(tables, TABLES)
    warn_of(tables.problems)
    return connection


def query(
    tables: RunTables, sql: str, *, confined: bool = False, deadline_s: float | None = None, max_rows: int | None = None
) -> pa.Table:
    """Run a statement over the tables that it names and return its rows.

    Args:
        confined: True denies access to files and extensions, for untrusted statements such as one in a URL.
        deadline_s: interrupt the statement after this many seconds. None: no limit.
        max_rows: return at most this many rows. None: all.
    Raises: UserError: duckdb is not installed, or rejects the statement.
    """
    connection = _connect(tables, [name for name in TABLES if re.search(rf"\b{name}\b", sql, re.IGNORECASE)])
    import duckdb  # late, as below

    if confined:
        # First: without external access, DuckDB still allows the files of its temporary folder.
        connection.execute("set temp_directory = ''")
        connection.execute("set enable_external_access = false")
        connection.execute(f"set threads = {min(_CONFINED_THREADS, os.cpu_count() or 1)}")
        connection.execute(f"set memory_limit = '{_CONFINED_MEMORY}'")
        connection.execute("set lock_configuration = true")
    timer = threading.Timer(math.inf if deadline_s is None else deadline_s, connection.interrupt)
    timer.daemon = True
    if deadline_s is not None:
        timer.start()
    try:
        result = connection.sql(sql)
        if result is None:
            return pa.table({})
        return (result if max_rows is None else result.limit(max_rows)).to_arrow_table()
    except duckdb.Error as error:
        raise UserError(f"{error}\n(tables: {', '.join(TABLES)}; docs/lineage.md explains their columns)") from error
    finally:
        timer.cancel()
        connection.close()


def warn_of(problems: Iterable[str]) -> None:
    """Emit a Python warning for each file that was left out."""
    for problem in problems:
        warnings.warn(f"left out: {problem}", stacklevel=3)


def to_csv(table: pa.Table) -> str:
    """Format a table as CSV with a header; lists and maps as JSON."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(table.column_names)
    for row in table.to_pylist():
        writer.writerow([json.dumps(v, default=str) if isinstance(v, list | dict) else v for v in row.values()])
    return sink.getvalue()


def to_json(table: pa.Table) -> str:
    """Format a table as a JSON list of objects, one per row; NaN and infinities are null."""

    def plain(value: Any) -> Any:
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return json.dumps(plain(table.to_pylist()), indent=1, default=str, allow_nan=False)


def to_terminal(table: pa.Table, max_rows: int = 100) -> Group:
    """Format the first `max_rows` rows for a terminal, with a line below if there are more."""
    shown = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for field in table.schema:
        is_number = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        # Text instead of str, so that rich does not parse brackets as markup.
        shown.add_column(Text(printable(field.name)), justify="right" if is_number else "left", overflow="fold")
    for row in table.slice(0, max_rows).to_pylist():
        shown.add_row(*(Text(cell(value)) for value in row.values()))
    more = [Text(f"{max_rows} of {table.num_rows:,} rows; --csv prints all")] * (table.num_rows > max_rows)
    return Group(shown, *more)


def _connect(tables: RunTables, names: Iterable[str]) -> duckdb.DuckDBPyConnection:
    try:
        import duckdb  # late: an optional package
    except ImportError:
        raise UserError("SQL over a run needs DuckDB: pip install 'rftdask[sql]'") from None
    connection = duckdb.connect(":memory:")
    # Otherwise DuckDB would look up unknown names among Python's variables.
    connection.execute("set python_enable_replacements = false")
    connection.execute("set autoinstall_known_extensions = false")
    for name in names:
        # DuckDB reads the Arrow memory without a copy.
        connection.register(name, tables.table(name))
    return connection
