"""Imported: a configuration made from another system's file, and the record of what was translated and what was not.

It knows no system. Invariant: every key of the other file is reported, as taken or as left.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rftdask.config.trinity.translate import give


@dataclass(frozen=True)
class Key:
    """Translation of one key of another system."""

    ours: str = ""
    """Key here; "": there is none."""
    default: Any = None
    """Default in the other system if it differs from ours. None: not set."""
    why: str = ""
    """Reason why a key is left, or what to do instead."""


def read_keys(table: str) -> dict[str, Key]:
    """Return a table of keys.toml."""
    tables = tomllib.loads(Path(__file__).with_name("keys.toml").read_text(encoding="utf-8"))
    return {key: Key(entry) if isinstance(entry, str) else Key(**entry) for key, entry in tables[table].items()}


@dataclass
class Imported:
    """Translation of a file.

    Example:
        imported = Imported("verl", given={"trainer.total_epochs": 3})
        imported.take({"trainer.total_epochs": Key("buffer.total_epochs", default=30)})
        imported.to_yaml()
    """

    system: str
    given: Mapping[str, Any]
    """Keys and values of the other system, as read."""
    tree: dict[str, Any] = field(default_factory=dict)
    """The configuration."""
    taken: dict[str, str] = field(default_factory=dict)
    """Key of the other system -> key here."""
    left: dict[str, str] = field(default_factory=dict)
    """Key of the other system -> why it is left, or what to do."""

    def get(self, key: str, default: Any) -> Any:
        """Return a value of the file, for rules with more than one key."""
        value = self.given.get(key)
        return default if value is None else value

    def set(self, ours: str, value: Any, *theirs: str) -> None:
        """Set a key here, which replaces those of the other system."""
        give(self.tree, ours, value)
        self.taken.update({key: ours for key in theirs if key in self.given})

    def take(self, keys: Mapping[str, Key]) -> None:
        """Translate the keys that correspond one to one, and record why others are left."""
        for theirs, key in keys.items():
            value = self.given.get(theirs, key.default)
            if key.ours and value is not None:
                self.set(key.ours, value, theirs)
            elif theirs in self.given and theirs not in self.taken:
                self.left[theirs] = key.why or "it is off"

    def finish(self) -> Imported:
        """Record the keys that no rule knew."""
        for key in self.given:
            if key not in self.taken:
                self.left.setdefault(key, "unknown; see `rftdask schema` for all keys")
        return self

    def to_yaml(self) -> str:
        """Return the configuration, with the untranslated keys as comments."""
        head = [
            "# yaml-language-server: $schema=rftdask.schema.json",
            f"# Made by `rftdask import {self.system}`. It includes defaults that differ from ours.",
            *["# Not translated:"] * bool(self.left),
            *(f"#   {key}: {why}" for key, why in self.left.items()),
        ]
        return "\n".join(head) + "\n\n" + yaml.safe_dump(self.tree, sort_keys=False, allow_unicode=True)
