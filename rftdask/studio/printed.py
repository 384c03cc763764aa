"""Printed: the pages of a run in one file, its report, to be kept, sent and opened anywhere.

Invariants: the file needs nothing else and loads nothing; its only scripts are those of `static`, which draw its
curves, named by their hashes in its policy, so nothing that a model wrote can run; what it costs does not grow with the
run: of many experiences some are read, evenly from the first to the last.
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

from rftdask.reports.lineage.browse import some_answers
from rftdask.reports.summary import REPORT_NAME, RunSummary
from rftdask.run.run_folder import read_run
from rftdask.storage import open_storage
from rftdask.studio import contents
from rftdask.studio.curves import charts_of, curves_of
from rftdask.studio.folder import HERE, Folder
from rftdask.studio.pages import get_template, render

_MOST_ROLLOUTS = 5000
"""Whose rewards and lengths are drawn."""
_MOST_ANSWERS = 2000
"""To evaluations."""
_STATIC = Path(__file__).parent / "static"
_SCRIPTS = ("uPlot.iife.min.js", "studio.js")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src {}; form-action 'none'; base-uri 'none'"
_PARTS = ("files/printed", "parts/bare", "parts/base", "parts/macros")
"""Templates of the file beside those of its pages."""
_SECTIONS = {
    "run": "What happened",
    "samples": "Answers over time",
    "distributions": "Distributions",
    "cluster": "Cluster",
    "about": "About",
}
"""Page -> its title in the file."""


def report_run(url: str | Path) -> str:
    """Write the report of the run at `url` from its files, and return the URL of the page.

    Raises: DataError: it is no run folder; DamagedError: its experiences cannot be counted; StorageError.
    """
    read_run(open_storage(url))  # raises, with the words for it, where there is none
    return write_report(str(url), Folder(url).summary(HERE))


def write_report(url: str, summary: RunSummary) -> str:
    """Write `report.html` at the root of the run and return its URL. Raises: StorageError."""
    storage = open_storage(url)
    storage.put(REPORT_NAME, print_run(url, summary).encode())
    return f"{storage.url.rstrip('/')}/{REPORT_NAME}"


def import_ahead() -> None:
    """Import and compile in the background what reports are made with, so that no end of a run waits for it."""

    def prepare() -> None:
        for name in ("pandas", "pyarrow.compute"):
            import_module(name)
        for name in (*_SECTIONS, *_PARTS):
            get_template(f"{name}.html.j2")

    threading.Thread(target=prepare, name="imports", daemon=True).start()


def print_run(url: str, summary: RunSummary) -> str:
    """The file of `write_report`. Its state is that of the summary: a run that ends prints it while it still runs."""
    folder = Folder(url)
    stages = folder.stages(HERE)
    line = replace(folder.line(HERE), state=summary.status, why=summary.error)
    rollouts, num_rollouts = some_answers(url, most=_MOST_ROLLOUTS)
    answers, _ = some_answers(url, evals=True, most=_MOST_ANSWERS)
    evals = len(answers) > 0
    shown: dict[str, dict[str, Any]] = {
        "run": contents.overview(folder, HERE, summary),
        # One page of them, so there is none to go on to.
        "samples": contents.samples(answers if evals else rollouts, evals, {}) | {"num_pages": 1},
        "distributions": contents.distributions(rollouts),
        "cluster": contents.cluster(folder, HERE),
        "about": contents.about(folder, HERE, summary),
    }
    common: dict[str, Any] = {
        "run": HERE,
        "line": line,
        "printed": True,
        "layout": "parts/bare.html.j2",
        "link": _anchor,
    }
    pages = {title: render(f"{page}.html.j2", **shown[page], **common) for page, title in _SECTIONS.items()}
    scripts = [(_STATIC / name).read_text() for name in _SCRIPTS]
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    run = {"run": summary.run_name, "arm": summary.run_name, "state": line.state, "stages": curves_of(stages)}
    # In a script element the only text that could end it begins with "<".
    data = json.dumps({"charts": charts_of(stages), "runs": [run]}).replace("<", "\\u003c")
    began = datetime.fromtimestamp(summary.started_at_s, UTC)
    return render(
        "files/printed.html.j2",
        policy=_POLICY.format(" ".join(f"'sha256-{each}'" for each in hashes)),
        summary=summary,
        line=line,
        date=began.strftime("%Y-%m-%d %H:%M UTC") if summary.started_at_s else "-",
        pages=list(zip(_SECTIONS, pages.items(), strict=True)),
        own_scripts=scripts,
        data=data,
        num_read=len(rollouts),
        num_rollouts=num_rollouts,
    )


def _anchor(path: str, /, *_: Any, **__: Any) -> str:
    """What a link of a page is in the file."""
    return f"#{path}" if path in _SECTIONS else "#top"
