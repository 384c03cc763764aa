"""The parts that a configuration names, with their arguments: which there are, and whether each can be had.

A key names a part if it is marked `Named`, wherever it is in the schema. Names and arguments of registered parts are
checked whenever a configuration is loaded, from their source; plug-ins are imported by `check_plugins` alone, because a
process that looks at a run need not have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from rftdask.config.base import Named, Section, child_of, marks_of
from rftdask.config.plugins import argument_problems, find_part, known_part, trait
from rftdask.config.schema.run import Config
from rftdask.config.yaml_source import Problem
from rftdask.errors import ConfigError, UserError


@dataclass(frozen=True)
class NamedPart:
    """One use of a part.

    Example: NamedPart("algorithm.policy_loss_fn", Named("policy loss", ...), "ppo", {"clip_range": 0.1})
    """

    path: str
    """Key that names it."""
    named: Named
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    arguments_path: str = ""
    """Key of its arguments; "": they are not checked."""

    @property
    def registered(self) -> Any:
        """The package's own part of this name, not imported; None: it is a plug-in."""
        return self.named.registered().get(self.name)

    def problems(self, part: Any) -> Iterator[Problem]:
        """(path, message) of arguments that the part does not take."""
        named = self.named
        if not self.arguments_path:
            return
        ignored = (*trait(part, "ignored_args", ()), *named.also)
        given = {key: value for key, value in self.arguments.items() if key not in ignored}
        for argument, message in argument_problems(part, given, named.supplied):
            if argument in given or named.complete:
                yield f"{self.arguments_path}.{argument}", message


def named_parts(section: Section, path: str = "") -> Iterator[NamedPart]:
    """Every part that a section and those below it name."""
    for key, named in _keys(type(section)):
        value, where = getattr(section, key), f"{path}.{key}" if path else key
        if isinstance(value, Section):
            yield from named_parts(value, where)
        elif named is not None:
            yield from _uses(section, key, value, named, where, path)
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if isinstance(item, Section):
                    yield from named_parts(item, f"{where}[{index}]")
        elif isinstance(value, dict):
            for name, item in value.items():
                if isinstance(item, Section):
                    yield from named_parts(item, f"{where}.{name}")


@cache
def _keys(cls: type[Section]) -> tuple[tuple[str, Named | None], ...]:
    """The keys that name a part or hold sections, with their mark."""
    found = []
    for key, info in cls.model_fields.items():
        named = next((mark for mark in marks_of(info) if isinstance(mark, Named)), None)
        if named or child_of(info):
            found.append((key, named))
    return tuple(found)


def _uses(section: Section, key: str, value: Any, named: Named, where: str, path: str) -> Iterator[NamedPart]:
    if isinstance(value, tuple):  # of {name, args}
        for index, item in enumerate(value):
            at = f"{where}[{index}]"
            yield NamedPart(f"{at}.name", named, str(item.get("name", "")), item.get("args") or {}, f"{at}.args")
        return
    if value is None and named.default_from:
        value = trait(_part_at(section, named.default_from), key)
    if value:
        if not named.arguments:
            yield NamedPart(where, named, value)
        else:
            yield NamedPart(where, named, value, getattr(section, named.arguments) or {}, f"{path}.{named.arguments}")


def _part_at(section: Section, key: str) -> Any:
    """The part that another key of the section names."""
    named = next(mark for mark in marks_of(type(section).model_fields[key]) if isinstance(mark, Named))
    return known_part(named.kind, getattr(section, key), named.registered())


def argument_problems_of(config: Config) -> Iterator[Problem]:
    """(path, message) of arguments that registered parts do not take. Imports nothing."""
    for use in named_parts(config):
        if use.registered is not None:
            yield from use.problems(use.registered)


def check_plugins(config: Config) -> None:
    """Import the plug-ins that a configuration names, and hold its arguments against their signatures.

    Raises: ConfigError: all names that mean nothing, modules that cannot be imported and arguments that are not taken.
    """
    problems: list[Problem] = []
    for stage in config.stage_configs():
        for use in named_parts(stage):
            if use.registered is None:
                try:
                    part = find_part(use.named.kind, use.name, use.named.registered(), stage.explorer.plugin_dirs)
                except UserError as error:
                    problems.append((use.path, str(error)))
                else:
                    problems.extend(use.problems(part))
    if problems:
        raise ConfigError(list(dict.fromkeys(f"{path}: {message}" for path, message in problems)))
