"""Plug-ins by name: one table of named functions for each kind, and dotted paths for everything else."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from rftdask.buffer.datasets import nearest
from rftdask.errors import UserError


def find_plugin(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    """`known[name]`, or the object at the dotted path `name` ("package.module.function").

    Raises: UserError: no such name, module or attribute; lists what comes nearest.
    """
    if name in known:
        return known[name]
    if "." not in name:
        near = ", ".join(nearest(name, known)) or ", ".join(sorted(known))
        raise UserError(f"unknown {kind} {name!r}; nearest: {near}; or give a dotted path such as my_module.{name}")
    module_name, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:  # ValueError: an empty part, as in "a..b"
        raise UserError(f"{kind} {name!r}: cannot import {module_name!r}: {error}; is it on PYTHONPATH?") from error
    if not hasattr(module, attribute):
        near = ", ".join(nearest(attribute, dir(module))) or "nothing similar"
        raise UserError(f"{kind} {name!r}: module {module_name!r} has no {attribute!r}; it has {near}")
    return getattr(module, attribute)
