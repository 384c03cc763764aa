"""Workflows and reward functions by the names that a configuration gives them.

Those of this package are read from their source, by the decorator that registers them, so that checking a configuration
imports none; a plug-in adds its own when it is imported.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from rftdask.config.plugins import RegisteredPart, read_functions


@cache
def registered_workflows() -> dict[str, Any]:
    """name -> the workflow, or its RegisteredPart; `rollouts.workflows.registry.workflow` adds to it."""
    return dict(read_functions("rftdask.rollouts.workflows", "workflow"))


@cache
def registered_rewards() -> dict[str, Any]:
    """name -> the reward function, or its RegisteredPart; `rollouts.rewards.registry.reward` adds to it."""
    return dict(read_functions("rftdask.rollouts.rewards", "reward"))


def register(kind: str, registered: dict[str, Any], name: str, part: Any) -> None:
    """Make `part` known as `name`. Raises: ValueError: the name is that of another."""
    known = registered.get(name, part)
    if isinstance(known, RegisteredPart) and known.module == getattr(part, "__module__", ""):
        known = part  # this package's own, whose module is imported just now
    if known is not part:
        raise ValueError(f"{kind} {name!r} exists already; choose another name")
    registered[name] = part
