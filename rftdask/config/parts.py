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

from rftdask.config.base import Named, Section, child_of, marks_of, plain
from rftdask.config.plugins import argument_problems, find_part, known_part, trait
from rftdask.config.schema.run import Config
from rftdask.config.schema.walk import is_completed
from rftdask.config.yaml_source import Problem, fill_from_environment
from rftdask.errors import ConfigError, NotInstalledError, UserError


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
        given = {key: _filled(value) for key, value in self.arguments.items() if key not in ignored}
        for argument, message in argument_problems(part, given, named.supplied):
            # A required argument that is missing may come from elsewhere, unless the mark says that all are here.
            if argument in given or named.complete:
                yield f"{self.arguments_path}.{argument}", message


def named_parts(section: Section, path: str = "") -> Iterator[NamedPart]:
    """Every part that a section and those below it name."""
    for key, named in _keys(type(section)):
        value, where = getattr(section, key), f"{path}.{key}" if path else key
        if named is None:  # a section, or a list or dict of them
            items: list[tuple[str, Any]] = [(where, value)]
            if isinstance(value, tuple):
                items = [(f"{where}[{index}]", item) for index, item in enumerate(value)]
            elif isinstance(value, dict):
                items = [(f"{where}.{name}", item) for name, item in value.items()]
            for at, item in items:
                if isinstance(item, Section):
                    yield from named_parts(item, at)
        elif isinstance(value, tuple):  # of {name, args}
            for index, item in enumerate(value):
                at = f"{where}[{index}]"
                yield NamedPart(f"{at}.name", named, str(item.get("name", "")), item.get("args") or {}, f"{at}.args")
        else:
            # The type chooses the part, and the arguments beside the absent key are still that part's.
            if value is None and named.default_from:
                owner = dict(_keys(type(section)))[named.default_from]
                assert owner is not None
                value = trait(known_part(owner.kind, getattr(section, named.default_from), owner.registered()), key)
            if value and named.arguments:
                arguments = getattr(section, named.arguments) or {}
                yield NamedPart(where, named, value, arguments, f"{path}.{named.arguments}")
            elif value:
                yield NamedPart(where, named, value)


@cache
def _keys(cls: type[Section]) -> tuple[tuple[str, Named | None], ...]:
    """The keys that name a part, with their mark, and those that hold sections."""
    marks = {
        key: next((mark for mark in marks_of(info) if isinstance(mark, Named)), None)
        for key, info in cls.model_fields.items()
    }
    return tuple((key, named) for key, named in marks.items() if named or child_of(cls.model_fields[key]))


def _filled(value: Any) -> Any:
    try:
        # With its value, as the part will be given it: choices are checked as well as types.
        return fill_from_environment(value)
    except ConfigError:  # whoever looks at a run need not have its environment
        return value


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """(path, text) of every text in plain data."""
    if isinstance(value, str):
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _texts(item, f"{path}[{key}]" if isinstance(value, list) else f"{path}.{key}" if path else str(key))


def check_plugins(config: Config, unchecked: list[str] | None = None) -> None:
    """Import the plug-ins that a configuration names, hold its arguments against their signatures, and look up the
    environment variables that they name.

    unchecked: takes what is not installed on this machine, where the run will be on another; None: it is a mistake.
    Raises: ConfigError: all names that mean nothing, modules that cannot be imported, arguments that are not taken and
        variables that are not set.
    """
    problems: list[Problem] = []
    for stage in config.stage_configs():
        # First what has to be completed from the environment, for a part may be given such an argument.
        for path, text in _texts(plain(stage), ""):
            try:
                if is_completed(Config, path):
                    fill_from_environment(text)
            except ConfigError as error:
                problems.append((path, error.problems[0]))
        for use in named_parts(stage):
            if use.registered is None:
                try:
                    part = find_part(use.named.kind, use.name, use.named.registered(), stage.explorer.plugin_dirs)
                except UserError as error:
                    if unchecked is not None and isinstance(error, NotInstalledError):
                        unchecked.append(str(error))
                    else:
                        problems.append((use.path, str(error)))
                else:
                    problems.extend(use.problems(part))
    # What explorer_input gives to its taskset is told where it is written.
    told = [
        (path, message)
        for path, message in dict.fromkeys(problems)
        if (path.replace(".taskset.", "."), message) not in problems or ".taskset." not in path
    ]
    if told:
        raise ConfigError([f"{path}: {message}" for path, message in told])
