"""`rftdask report`, `experiences`, `trace`, `perf` and `track`: views of a run from its files."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from rftdask.cli.common import Run, say, warn, write_text
from rftdask.errors import UserError
from rftdask.reports.lineage.browse import Browser
from rftdask.reports.lineage.sql import OVERVIEW, query, to_csv, to_json, to_terminal
from rftdask.reports.lineage.tables import RunTables
from rftdask.reports.lineage.trace import trace as read_trace
from rftdask.reports.page.curves import trace_events
from rftdask.reports.page.rendering import render_experiences
from rftdask.reports.page.report_file import report_run
from rftdask.reports.run_reader import open_stages
from rftdask.reports.tracking import track as track_run
from rftdask.storage.safe_text import safe, safe_console

_POLL_INTERVAL_S = 1.0


def report(run: Run) -> None:
    """Write the report of a run as one HTML page.

    It prints the location of the page, which has no external files.
    """
    say(report_run(run))


def experiences(
    run: Run,
    sql: Annotated[str, typer.Option(help="SQL query over the tables of docs/lineage.md (default: an overview)")] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all rows as CSV")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all rows as JSON")] = False,
) -> None:
    """Query the experiences of a run with SQL.

    The tables are views of the run's files.
    """
    tables = RunTables(run)
    rows = query(tables, sql or OVERVIEW)
    warn(tuple(f"left out: {problem}" for problem in tables.problems))
    if as_csv or as_json:
        # Programs get every byte; terminals get escaped text, as from all commands.
        text = to_csv(rows) if as_csv else to_json(rows)
        sys.stdout.write(safe(text) if sys.stdout.isatty() else text)
    else:
        safe_console().print(to_terminal(rows))


def trace(
    run: Run,
    uid: Annotated[str, typer.Argument(help="Experience as taskset/epoch/task/rollout/row, or a served session")],
) -> None:
    """Print the history of one experience.

    It shows the weights that sampled it, the step that trained it, and the result.
    """
    say(read_trace(run, uid).render())


def perf(run: Run, path: Annotated[str, typer.Argument(metavar="FILE", help="Output file")] = "timeline.json") -> None:
    """Write a timeline of a run for Perfetto.

    It shows for each step what trainer and explorers did and waited for. Open it at ui.perfetto.dev or chrome://tracing.
    """
    events = trace_events(open_stages(run))
    if not events:
        raise UserError(f"{run} has not finished a step yet, so it has no timeline; try again after a step")
    write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    say(path)


def track(
    run: Run,
    to: Annotated[
        str, typer.Option(metavar="TRACKER", help="Tracker: tensorboard, wandb, mlflow, swanlab, trackio or your own")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Tracker arguments, as in monitor.monitor_args")
    ] = None,
    follow: Annotated[bool, typer.Option(help="Continue until the run ends, or Ctrl-C")] = False,
) -> None:
    """Send the metrics of a run to a tracker.

    It reads the run's files, so it also works for a run that has ended, and in an environment with little more than the
    tracker's package. Rows that the tracker already has are not sent again.
    """
    arguments: dict[str, Any] = {}
    for arg in args or []:
        key, sign, value = arg.partition("=")
        if not sign:
            raise UserError(f"{arg!r} is not KEY=VALUE; pass tracker arguments in this form, such as mode=offline")
        arguments[key] = yaml.safe_load(value)

    def wait() -> bool:
        time.sleep(_POLL_INTERVAL_S)
        return True

    num_rows = track_run(run, to, arguments, wait if follow else None)
    say(f"{to}: {num_rows} rows of metrics")


def write_experiences_page(run: str | Path, html: str, limit: int) -> None:
    """Write the experiences of a run as one HTML page. Raises: UserError: the file cannot be written."""
    write_text(html, render_experiences(Browser(run), limit), "--html ")
