"""Report file: the pages of a run as one HTML file that can be kept, sent and opened anywhere.

Invariants: the file is self-contained and loads nothing; it allows only the scripts of `static`, by their hashes, so
nothing that a model wrote can run; its cost does not grow with the run, because it samples long runs evenly.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from rftdask.reports.jobs import read_run_jobs
from rftdask.reports.lineage.browse import sample_answers
from rftdask.reports.lineage.tables import RunTables
from rftdask.reports.page import contents
from rftdask.reports.page.curves import charts_of, curves_of
from rftdask.reports.page.rendering import get_template, render
from rftdask.reports.run_reader import open_stages
from rftdask.reports.status import read_line, stage_status
from rftdask.reports.summary import REPORT_NAME, RunSummary, summarize
from rftdask.run.run_folder import read_run_config
from rftdask.storage import open_storage

_MAX_ROLLOUTS = 5000
"""Number of rollouts in the distributions of rewards and lengths."""
_MAX_ANSWERS = 2000
_STATIC = Path(__file__).parent / "static"
_SCRIPTS = ("uPlot.iife.min.js", "studio.js")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src {}; form-action 'none'; base-uri 'none'"
_PARTS = ("files/report", "parts/bare", "parts/base", "parts/macros")
_SECTIONS = {
    "run": "Overview",
    "samples": "Answers over time",
    "distributions": "Distributions",
    "cluster": "Cluster",
    "about": "About",
}


def report_run(url: str | Path) -> str:
    """Write the report of a run and return its URL. Raises: DataError: not a run; DamagedError; StorageError."""
    stages = open_stages(url)
    line = read_line("", str(url), stages)
    config = read_run_config(open_storage(url))
    return write_report(str(url), summarize(config, str(url), stages, status=line.state, error=line.why))


def write_report(url: str, summary: RunSummary) -> str:
    """Write `report.html` at the root of the run and return its URL. Raises: StorageError."""
    storage = open_storage(url)
    storage.put(REPORT_NAME, render_report(url, summary).encode())
    return f"{storage.url.rstrip('/')}/{REPORT_NAME}"


def import_ahead() -> None:
    """Import modules and compile templates in the background, so that the end of a run does not wait for them."""

    def prepare() -> None:
        for name in ("pandas", "pyarrow.compute"):
            import_module(name)
        for name in (*_SECTIONS, *_PARTS):
            get_template(f"{name}.html.j2")

    threading.Thread(target=prepare, name="imports", daemon=True).start()


def render_report(url: str, summary: RunSummary) -> str:
    """Render the report. The summary determines the run's state, because a run that ends writes its own report."""
    tables = RunTables(url)
    stages = tables.stages
    status = [stage_status(stage) for stage in stages]
    line = replace(read_line("", url, stages), state=summary.status, why=summary.error)
    rollouts, num_rollouts = sample_answers(tables, max_rows=_MAX_ROLLOUTS)
    answers, _ = sample_answers(tables, evals=True, max_rows=_MAX_ANSWERS)
    evals = len(answers) > 0
    values: dict[str, dict[str, Any]] = {
        "run": contents.overview(stages, status, summary),
        # One page only, since a file cannot load the next one.
        "samples": contents.samples(answers if evals else rollouts, evals, {}) | {"num_pages": 1},
        "distributions": contents.distributions(rollouts),
        "cluster": contents.cluster(stages, status, read_run_jobs(url)),
        "about": contents.about(stages, summary),
    }
    common: dict[str, Any] = {
        "run": "",
        "line": line,
        "is_report": True,
        "layout": "parts/bare.html.j2",
        "link": lambda path, *_, **__: f"#{path}" if path in _SECTIONS else "#top",  # links become anchors
    }
    pages = {title: render(f"{page}.html.j2", **values[page], **common) for page, title in _SECTIONS.items()}
    scripts = [(_STATIC / name).read_text() for name in _SCRIPTS]
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    run = {"run": summary.run_name, "arm": summary.run_name, "state": line.state, "stages": curves_of(stages)}
    # Inside a script element, only a text that begins with "<" could end it.
    data = json.dumps({"charts": charts_of(stages), "runs": [run]}).replace("<", "\\u003c")
    began = datetime.fromtimestamp(summary.started_at_s, UTC)
    return render(
        "files/report.html.j2",
        policy=_POLICY.format(" ".join(f"'sha256-{text_hash}'" for text_hash in hashes)),
        summary=summary,
        line=line,
        date=began.strftime("%Y-%m-%d %H:%M UTC") if summary.started_at_s else "-",
        pages=list(zip(_SECTIONS, pages.items(), strict=True)),
        own_scripts=scripts,
        data=data,
        num_read=len(rollouts),
        num_rollouts=num_rollouts,
    )
