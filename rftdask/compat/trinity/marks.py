"""Marks that user code puts above its classes; they change nothing here."""

from __future__ import annotations

from typing import TypeVar

_Marked = TypeVar("_Marked")


def Deprecated(marked: _Marked) -> _Marked:
    """Return it as it is."""
    return marked


Experimental = Deprecated
