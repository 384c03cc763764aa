"""Pages: what the studio shows, as HTML.

Invariants: what models wrote is untrusted: every value goes through the autoescaping of the templates, and invisible
characters become visible; no page has a script of its own, and the policy that each carries lets the browser run the
files of `static` alone, where a page needs them, and load nothing from anywhere else.
"""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from rftdask.buffer.log.schema import conversation
from rftdask.monitor.progress import duration
from rftdask.reports.lineage.browse import LEVELS, Browser, Filter
from rftdask.reports.summary import percent, shorten
from rftdask.storage.safe_text import cell, printable

if TYPE_CHECKING:
    from jinja2 import Environment, Template

_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'{}; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
NO_SCRIPTS = _POLICY.format("")
"""Content security policy of a page that is read and clicked."""
OWN_SCRIPTS = _POLICY.format(" 'self'; script-src 'self'; connect-src 'self'")
"""Of one that draws curves or refreshes itself."""
_PLACE = ("stage", "shard", "row")


def render(template: str, *, scripts: bool = False, **values: Any) -> str:
    """The page of a template. scripts: whether it may run the files of `static`."""
    values = {"policy": OWN_SCRIPTS if scripts else NO_SCRIPTS, **values}
    return get_template(template).render(values)


def get_template(name: str) -> Template:
    """The template of a name, compiled."""
    return _environment().get_template(name)


def static_page(browser: Browser, num_rows: int) -> str:
    """Render the first `num_rows` experiences as one page that needs no server."""
    page = browser.page(Filter(), 1, size=num_rows)
    places = dict.fromkeys((row["stage"], row["shard"], row["row"]) for row in page.rows)
    experiences = [shown for place in places if (shown := browser.show(*place)) is not None]
    return render(
        "files/static.html.j2", browser=browser, experiences=experiences, num_rows=page.num_rows, levels=LEVELS
    )


@cache
def _environment() -> Environment:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined  # late: only pages need it

    def finalize(value: Any) -> Any:
        # Every value is made printable before it is escaped; what is HTML already has been through it.
        is_text = isinstance(value, str) and not hasattr(value, "__html__")
        return printable(value, keep="\n\t") if is_text else value

    environment = Environment(
        loader=ChoiceLoader([PackageLoader("rftdask.studio", folder) for folder in ("templates", "static")]),
        autoescape=True,
        finalize=finalize,
        # A name that the template misspells is an error; else it would be a gap that nobody notices.
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
        # Line ends and tabs of a token stand behind a sign.
        visible=lambda text: text.replace("\n", "\u21b5\n").replace("\t", "\u2192\t"),
        steps=lambda span: str(span[0]) if span[0] == span[1] else f"{span[0]} to {span[1]}",
        ago=_ago,
        # Not below 0: clocks of two machines differ.
        since=lambda at_s: _ago(max(0.0, time.time() - at_s) if at_s else None),
    )
    environment.globals.update(
        link=link,
        printed=False,
        layout="parts/run_base.html.j2",
        place=lambda row: {name: row[name] for name in _PLACE},
    )
    return environment


def link(path: str, /, *queries: Any, **query: Any) -> str:
    """A relative URL, so that pages work below any prefix; empty values are left out."""
    merged: dict[str, Any] = {}
    for part in (*queries, query):
        merged |= part
    # Not by equality: row 0 is a row.
    said = {key: value for key, value in merged.items() if value is not None and value is not False and value != ""}
    text = urlencode(said, doseq=True)
    return f"{path}?{text}" if text else path


def _ago(seconds: float | None) -> str:
    """Example: "12 s ago", "3 h ago"."""
    if seconds is None:
        return "never"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
