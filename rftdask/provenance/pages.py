"""Pages: HTML of a list of experiences and of one of them.

What models wrote is untrusted: every value goes through the autoescaping of the templates, invisible characters become
visible, there is no script on a page, and the policy of the pages forbids the browser to run or load anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from rftdask.provenance.browse import PROBABILITY_LEVELS, SORTS, Browser, Filter, Shown
from rftdask.provenance.text import cell, printable

CONTENT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_LEVELS = tuple(
    f"{high:.0%} to {low:.0%}" if high < 1 else f"above {low:.0%}"
    for high, low in zip((1.0, *PROBABILITY_LEVELS), (*PROBABILITY_LEVELS, 0.0), strict=True)
)


def list_page(browser: Browser, wanted: Filter, number: int) -> str:
    """Page `number` of the experiences that `wanted` lets through."""
    page = browser.page(wanted, number)
    states = sorted({*browser.choices("state"), *browser.choices("reason")})
    menus = {"stage": browser.choices("stage"), "status": browser.choices("status"), "state": states}
    return _render("list.html.j2", browser=browser, wanted=wanted, page=page, menus=menus, sorts=SORTS)


def experience_page(browser: Browser, shown: Shown) -> str:
    """One experience with its tokens."""
    return _render("experience.html.j2", browser=browser, shown=shown, levels=_LEVELS)


def static_page(browser: Browser, num_rows: int) -> str:
    """The first `num_rows` experiences in one page that needs no server."""
    page = browser.page(Filter(), 1, size=num_rows)
    places = dict.fromkeys((row["stage"], row["shard"], row["row"]) for row in page.rows)
    found = [shown for place in places if (shown := browser.show(*place)) is not None]
    return _render("static.html.j2", browser=browser, experiences=found, num_rows=page.num_rows, levels=_LEVELS)


def message_page(title: str, text: str) -> str:
    """A page with nothing but a message, for errors."""
    return _render("message.html.j2", title=title, text=text)


def _render(template: str, **values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # late: only pages need it

    environment = Environment(
        loader=PackageLoader("rftdask.provenance", "templates"),
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(cell=cell, link=_link, visible=_visible)
    return environment.get_template(template).render(policy=CONTENT_POLICY, **values)


def _link(row: Mapping[str, Any]) -> str:
    """Address of the page of one experience."""
    return "/experience?" + urlencode({"stage": row["stage"], "shard": row["shard"], "row": row["row"]})


def _visible(text: str) -> str:
    """Text of a token, its line ends and tabs behind a sign."""
    return text.replace("\n", "\u21b5\n").replace("\t", "\u2192\t")


def _finalize(value: Any) -> Any:
    """Make every value of a template printable before it is escaped; what is HTML already has been through it."""
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return printable(value, keep="\n\t") if is_text else value
