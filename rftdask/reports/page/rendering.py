"""Rendering: templates and values to HTML.

Invariants: text written by models is untrusted, so every value is autoescaped and its invisible characters are made
visible; no page of the studio contains a script, and its policy lets the browser run only the files of `static`, where
the page needs them, and load nothing from anywhere else.
"""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from rftdask.buffer.log.schema import conversation
from rftdask.monitor.progress import duration
from rftdask.reports.lineage.browse import LEVELS, Browser, Filter
from rftdask.reports.lineage.tables import PLACE
from rftdask.reports.summary import percent, shorten
from rftdask.storage.safe_text import cell, printable

if TYPE_CHECKING:
    from jinja2 import Environment, Template

_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'{}; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
NO_SCRIPTS = _POLICY.format("")
"""Content security policy of a page without scripts."""
OWN_SCRIPTS = _POLICY.format(" 'self'; script-src 'self'; connect-src 'self'")
"""Content security policy of a page that draws curves or refreshes itself."""


def render(template: str, *, package: str = "", scripts: bool = False, **values: Any) -> str:
    """Render a template.

    Args:
        package: package with further templates, searched after those of this package.
        scripts: True lets the page run the files of `static`.
    """
    values = {"policy": OWN_SCRIPTS if scripts else NO_SCRIPTS, **values}
    return get_template(template, package).render(values)


def get_template(name: str, package: str = "") -> Template:
    return _environment(package).get_template(name)


def render_experiences(browser: Browser, num_rows: int) -> str:
    """Render the first `num_rows` experiences as one page that needs no server."""
    page = browser.page(Filter(), 1, size=num_rows)
    places = dict.fromkeys((row["stage"], row["shard"], row["row"]) for row in page.rows)
    experiences = [shown for place in places if (shown := browser.show(*place)) is not None]
    return render(
        "files/experiences.html.j2", browser=browser, experiences=experiences, num_rows=page.num_rows, levels=LEVELS
    )


@cache
def _environment(package: str) -> Environment:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined  # late: only pages need it

    def finalize(value: Any) -> Any:
        # Values are made printable before escaping; markup has already passed through here.
        is_text = isinstance(value, str) and not hasattr(value, "__html__")
        return printable(value, keep="\n\t") if is_text else value

    folders = [("rftdask.reports.page", "templates"), ("rftdask.reports.page", "static")]
    folders += [(package, "templates")] if package else []
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(*folder) for folder in folders]),
        autoescape=True,
        finalize=finalize,
        # A misspelled name in a template raises, instead of leaving a gap.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        cell=cell,
        conversation=conversation,
        duration=duration,
        percent=percent,
        shorten=shorten,
        # Signs mark the line ends and tabs of a token.
        visible=lambda text: text.replace("\n", "\u21b5\n").replace("\t", "\u2192\t"),
        steps=lambda span: str(span[0]) if span[0] == span[1] else f"{span[0]} to {span[1]}",
        ago=_ago,
        # Clamped at 0, because the clocks of two machines differ.
        since=lambda at_s: _ago(max(0.0, time.time() - at_s) if at_s else None),
    )
    environment.globals.update(
        link=link,
        is_report=False,
        layout="parts/run_base.html.j2",
        place=lambda row: {name: row[name] for name in PLACE},
    )
    return environment


def link(path: str, /, *queries: Any, **query: Any) -> str:
    """Return a relative URL, which works below any prefix; None, False and "" are left out of the query."""
    merged: dict[str, Any] = {}
    for part in (*queries, query):
        merged |= part
    # Compared by identity, because row 0 must stay.
    kept = {key: value for key, value in merged.items() if value is not None and value is not False and value != ""}
    text = urlencode(kept, doseq=True)
    return f"{path}?{text}" if text else path


def _ago(seconds: float | None) -> str:
    """Example: "12 s ago", "3 h ago"."""
    if seconds is None:
        return "never"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
