"""Imported: a configuration made of another system's file, with what of that file it says and what it cannot say.

It knows no system. Invariant: every key of the other file is told, as taken or as left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from rftdask.config.trinity.translate import give


@dataclass(frozen=True)
class Key:
    """What a key of another system becomes here."""

    ours: str
    """Key here that takes its place; "": none does."""
    default: Any = None
    """What it is there where a file does not say it, if that differs from ours; None: nothing to say."""
    why: str = ""
    """Of a key that is left: why, or what to do instead."""


@dataclass
class Imported:
    """What was made of a file.

    Example:
        found = Imported("verl", given={"trainer.total_epochs": 3})
        found.take({"trainer.total_epochs": Key("buffer.total_epochs", default=30)})
        found.to_yaml()
    """

    system: str
    given: Mapping[str, Any]
    """Their keys and values, as read."""
    tree: dict[str, Any] = field(default_factory=dict)
    """The configuration."""
    taken: dict[str, str] = field(default_factory=dict)
    """Their key -> ours."""
    left: dict[str, str] = field(default_factory=dict)
    """Their key -> why it is not here, or what is to be seen to."""

    def get(self, key: str, default: Any) -> Any:
        """A value of theirs, for a rule that needs more than one."""
        value = self.given.get(key)
        return default if value is None else value

    def say(self, ours: str, value: Any, *theirs: str) -> None:
        """Set a key of ours, in the place of those of theirs."""
        give(self.tree, ours, value)
        self.taken.update({key: ours for key in theirs if key in self.given})

    def take(self, keys: Mapping[str, Key]) -> None:
        """Everything that is said by one key here and there, and the reason for what is not."""
        for theirs, key in keys.items():
            value = self.given.get(theirs, key.default)
            if key.ours and value is not None:
                self.say(key.ours, value, theirs)
            elif theirs in self.given and theirs not in self.taken:
                self.left[theirs] = key.why or "it is off"

    def finish(self) -> Imported:
        """Say of what no rule knew that nothing was made of it."""
        for key in self.given:
            if key not in self.taken:
                self.left.setdefault(key, "it is not known here; see `rftdask schema` for what there is")
        return self

    def to_yaml(self) -> str:
        """The configuration, and below its head what of the file is not in it."""
        head = [
            "# yaml-language-server: $schema=rftdask.schema.json",
            f"# Made by `rftdask import {self.system}`. Their defaults that differ from ours are written out.",
            *["# Not translated:"] * bool(self.left),
            *(f"#   {key}: {why}" for key, why in self.left.items()),
        ]
        return "\n".join(head) + "\n\n" + yaml.safe_dump(self.tree, sort_keys=False, allow_unicode=True)
