"""Text that others wrote, as people may be shown it: nothing in it that a terminal would obey, and no secrets.

Invariant: `safe(safe(text)) == safe(text)`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rftdask.text.secrets import mask

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

_WIDEST = 80
_MOST_ITEMS = 6


def printable(text: str, keep: str = "") -> str:
    """`text` with every character that is not plainly visible, but for those of `keep`, as an escape."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def safe(text: str) -> str:
    """`text` for a terminal, a log or a page: secrets masked; all but line ends and tabs as `printable`."""
    return mask(printable(text, keep="\n\t"))


class SafeFormatter(logging.Formatter):
    """Formats records of a log as `safe` text, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        """The line with its traceback, masked as a whole: a secret may stand in either."""
        return safe(super().format(record))


def safe_console() -> Console:
    """A console of rich that writes out whatever a terminal would obey, in every text that it draws."""
    from rich.console import Console  # late: 50 ms that `import rftdask` does not need

    class SafeConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                # Control segments are rich's own, such as those that move the cursor; no text of others becomes one.
                is_plain = segment.control or segment.text.isprintable()
                yield segment if is_plain else segment._replace(text=printable(segment.text, keep="\n"))

    return SafeConsole()


def cell(value: Any) -> str:
    """A value in one line of a table."""
    if value is None:
        return ""
    if isinstance(value, bool | int):
        return str(value)
    if isinstance(value, float):
        # Four digits of what is small; a large number whole, because 1.234e+06 reads badly in a column.
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    if isinstance(value, list):
        shown = ", ".join(cell(item) for item in value[:_MOST_ITEMS])
        return f"[{shown}{', ...' if len(value) > _MOST_ITEMS else ''}]"
    text = printable(str(value))
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
