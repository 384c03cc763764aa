"""Values in a table: short, and in one line."""

from __future__ import annotations

from typing import Any

from rftdask.safe_text import printable

_WIDEST = 80
_MOST_ITEMS = 6


def cell(value: Any) -> str:
    """A value in one line of a table."""
    if value is None:
        return ""
    if isinstance(value, bool | int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    if isinstance(value, list):
        shown = ", ".join(cell(item) for item in value[:_MOST_ITEMS])
        return f"[{shown}{', ...' if len(value) > _MOST_ITEMS else ''}]"
    text = printable(str(value))
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
