"""Keys of Trinity-RFT 0.6.0 that are not fields here, each with the message for it, read from 0.6.toml.

Files written for Trinity-RFT are read as they are. The loader reports these keys and drops them, so that no Config has
them. The module knows neither the sections nor how a tree is checked.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

TABLE: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("0.6.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Ignored:
    """Accepted without effect. A value other than the default gives one warning with the reason."""

    reason: str
    default: Any = None
    """Default in Trinity-RFT, as plain data."""


@dataclass(frozen=True)
class Missing:
    """Refused unless it has the default: the feature is not available yet."""

    feature: str
    """Missing feature, as it ends the sentence "not available in this release: ..."."""
    default: Any = None
    allowed: tuple[Any, ...] = ()
    """Further accepted values, which mean the same as the default."""


@dataclass(frozen=True)
class Derived:
    """Never set by a user: computed from other keys."""


@dataclass(frozen=True)
class Secret:
    """Never read from a file, because secrets come from environment variables. Its value is never shown."""

    instead: str
    """Advice for the user."""


@dataclass(frozen=True)
class Renamed:
    """Old name of another key of the same section, which gets the value, with a warning."""

    to: str


ReferenceKey = Ignored | Missing | Derived | Secret | Renamed | Mapping[str, "ReferenceKey"]
"""Entry of a key; a mapping is a section that has only such keys."""


def _entries(group: Mapping[str, Any]) -> dict[str, ReferenceKey]:
    """Entries of the keys of one group in the table, which share a text."""
    defaults = {**group.get("default", {}), **dict.fromkeys(group.get("unset", ()))}
    if "derived" in group:
        return dict.fromkeys(group["derived"], Derived())
    if "ignored" in group:
        return {key: Ignored(group["ignored"], default) for key, default in defaults.items()}
    if "missing" in group:
        allowed = tuple(group.get("allowed", ()))
        return {key: Missing(group["missing"], default, allowed) for key, default in defaults.items()}
    return dict.fromkeys(defaults, Secret(group["secret"]) if "secret" in group else Renamed(group["renamed"]))


def _read_keys() -> dict[str, dict[str, ReferenceKey]]:
    classes: dict[str, dict[str, ReferenceKey]] = {}
    for path, groups in TABLE["keys"].items():
        name, _, subsection = path.partition(".")
        keys = classes.setdefault(name, {})
        target = cast("dict[str, ReferenceKey]", keys.setdefault(subsection, {})) if subsection else keys
        for group in groups:
            target.update(_entries(group))
    return classes


REFERENCE_KEYS: Mapping[str, Mapping[str, ReferenceKey]] = _read_keys()
"""Class of a section -> its keys that are not fields. A class also has those of its bases."""
REFERENCE_NAMES: Mapping[str, Mapping[str, str]] = TABLE["names"]
"""Kind of a part (`PluginName.kind`) -> names of Trinity-RFT that are not available here, and what to do."""


@cache
def reference_keys(section: type) -> Mapping[str, ReferenceKey]:
    """Return the entries of a class of sections."""
    return {key: entry for cls in section.__mro__ for key, entry in REFERENCE_KEYS.get(cls.__name__, {}).items()}
