"""Report: one HTML file that tells a run to somebody who was not there.

The file needs nothing else: no script, no font, no picture, no network. It is drawn from a `RunSummary` and the
metrics of each stage and can be written again at any time, also while the run goes on.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from rftdask.cluster import slurm
from rftdask.cluster.jobs import read_jobs, slurm_numbers
from rftdask.monitor.charts import CHARTS, Stages, chart_svg
from rftdask.monitor.explain import DIRECTIONS, METRICS, Metric, explain
from rftdask.monitor.progress import duration
from rftdask.run.run_folder import read_end, read_run_config
from rftdask.run.summary import REPORT_NAME, RunSummary, learned, percent, summarize
from rftdask.run.view import Stage, open_stages
from rftdask.storage import Storage, open_storage

_NOT_METRICS = {"role", "step", "time_s"}
_CUSTOM = Metric("", "written by a workflow, a reward function or an operator", "", "watch", source="")


def report_run(url: str | Path) -> str:
    """Write the report of the run at `url` from its files, and return the URL of the page.

    Raises: DataError: it is no run folder; DamagedError: its experiences cannot be counted; StorageError.
    """
    storage, stages = open_storage(url), open_stages(url)
    config = read_run_config(storage)
    status, _, error = (read_end(storage) or "as found").partition(": ")
    summary = summarize(config, storage.url, stages, status=status, error=error)
    return write_report(storage, summary, stage_metrics(summary, stages))


def import_ahead() -> None:
    """Import in the background what reports are made with, so that the end of a run need not wait for it."""
    names = ("pandas", "matplotlib.figure", "matplotlib.ticker", "matplotlib.backends.backend_svg", "jinja2")
    threading.Thread(target=lambda: [import_module(name) for name in names], name="imports", daemon=True).start()


def stage_metrics(summary: RunSummary, stages: Sequence[Stage]) -> Stages:
    """(name in the summary, metrics) of each stage."""
    return [(row.name, stage.metrics) for row, stage in zip(summary.stages, stages, strict=True)]


def write_report(storage: Storage, summary: RunSummary, stages: Stages) -> str:
    """Write `report.html` at the root of the run and return its URL.

    Args: stages: (stage name, metrics as `read_metrics` gives them) in the order they ran.
    Raises: StorageError.
    """
    numbers = slurm_numbers(storage, read_jobs(storage))
    used = slurm.usage(numbers) if numbers else None
    took = "" if not numbers else slurm.NO_BOOKS if used is None else used.render()
    storage.put(REPORT_NAME, render_report(summary, stages, took).encode())
    return f"{storage.url.rstrip('/')}/{REPORT_NAME}"


def render_report(summary: RunSummary, stages: Stages, took: str = "") -> str:
    """The page of `write_report`. took: what its jobs on SLURM took, line by line."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # late: only reports need it

    environment = Environment(
        loader=PackageLoader("rftdask.run", ""),
        # Answers of the policy and names of others are on the page; none of them may become a tag or a script of it.
        autoescape=True,
        # A name that the template misspells is an error; else it would be a gap that nobody notices.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(percent=percent, duration=duration)
    numbers = {"time": duration(summary.seconds)}
    if summary.stages:
        numbers["optimizer steps"] = f"{sum(stage.steps for stage in summary.stages):,}"
    if summary.counts:
        numbers["experiences trained"] = f"{summary.counts['trained']:,}"
    drawings = [(METRICS[chart.metric], chart_svg(chart, stages)) for chart in CHARTS]
    frames = [metrics for _, metrics in stages]
    # Metrics are columns of floats; tags, such as the stage, are text.
    measured = {str(name) for frame in frames for name in frame.columns if frame[name].dtype.kind == "f"} - _NOT_METRICS
    # Those of the package first, in the order of METRICS; then those of workflows and operators.
    order = {name: number for number, name in enumerate(METRICS)}
    names = sorted(measured, key=lambda name: (explain(name) is None, order.get(name, len(order)), name))
    total_s = sum(summary.time_split.values())
    began = datetime.fromtimestamp(summary.started_at_s, UTC)
    return environment.get_template("report.html.j2").render(
        title=summary.run_name,
        summary=summary,
        date=began.strftime("%Y-%m-%d %H:%M UTC") if summary.started_at_s else "-",
        numbers=numbers,
        took=took.splitlines(),
        learned=learned(summary),
        charts=[
            {"title": m.label, "unit": m.unit, "direction": DIRECTIONS[m.direction], "svg": svg}
            for m, svg in drawings
            if svg
        ],
        time_shares=[(name, s, s / total_s if total_s else 0.0) for name, s in summary.time_split.items()],
        metrics=[(name, explain(name) or _CUSTOM) for name in names],
        directions=DIRECTIONS,
        machine=f"{platform.system()} {platform.machine()}",
    )
