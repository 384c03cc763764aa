"""Named parts: every part that a configuration names, and checks of its arguments.

A key names a part if it is marked `PluginName`. Names and arguments of registered parts are checked from their source
whenever a configuration is loaded. Plug-ins are imported only by `check_plugins`, because a process that looks at a run
need not have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from rftdask.config.base import PluginName, Problem, Section, is_env_interpolated, join, marks_of, plain, sections_of
from rftdask.config.plugins import argument_problems, find_part, lookup_part, trait
from rftdask.config.schema.run import Config
from rftdask.config.yaml_source import fill_from_environment
from rftdask.errors import ConfigError, NotInstalledError, UserError


@dataclass(frozen=True)
class NamedPart:
    """One use of a part.

    Example: NamedPart("algorithm.policy_loss_fn", PluginName("policy loss", ...), "ppo", {"clip_range": 0.1})
    """

    path: str
    """Key that names it."""
    named: PluginName
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    arguments_path: str = ""
    """Key of its arguments; "": they are not checked."""

    @property
    def registered(self) -> Any:
        """The package's own part of this name, not imported; None: the part is a plug-in."""
        return self.named.registered().get(self.name)

    def problems(self, part: Any) -> Iterator[Problem]:
        """Yield (path, message) for arguments that the part does not take."""
        if not self.arguments_path:
            return
        ignored = (*trait(part, "ignored_args", ()), *self.named.also)
        arguments = {key: _try_fill(value) for key, value in self.arguments.items() if key not in ignored}
        for argument, message in argument_problems(part, arguments, self.named.supplied):
            # A required argument may come from elsewhere, unless the mark is complete.
            if argument in arguments or self.named.complete:
                yield f"{self.arguments_path}.{argument}", message


def named_parts(config: Section) -> Iterator[NamedPart]:
    """Yield every part that a section and those below it name."""
    for place, section in sections_of(config):
        names = _names(type(section))
        for key, named in names.items():
            value, where = getattr(section, key), join((*place, key))
            if isinstance(value, tuple):  # of {name, args}
                for index, item in enumerate(value):
                    at, args = f"{where}[{index}]", item.get("args") or {}
                    yield NamedPart(f"{at}.name", named, str(item.get("name", "")), args, f"{at}.args")
                continue
            usual: Mapping[str, Any] = {}
            if named.default_from:
                owner = names[named.default_from]
                kind = lookup_part(owner.kind, getattr(section, named.default_from), owner.registered())
                # If the key is absent, the algorithm type chooses the part, which still takes the arguments given here.
                if (default := trait(kind, key)) is not None and value in (None, default):
                    value, usual = default, trait(kind, f"{key}_args", {})
            if value and named.arguments:
                arguments = {**usual, **(getattr(section, named.arguments) or {})}
                yield NamedPart(where, named, value, arguments, join((*place, named.arguments)))
            elif value:
                yield NamedPart(where, named, value)


@cache
def _names(cls: type[Section]) -> dict[str, PluginName]:
    """Keys that name a part, each with its mark."""
    marks = ((key, mark) for key, info in cls.model_fields.items() for mark in marks_of(info))
    return {key: mark for key, mark in marks if isinstance(mark, PluginName)}


def _try_fill(value: Any) -> Any:
    try:
        # Choices and types are checked with the value that the part will get.
        return fill_from_environment(value)
    except ConfigError:  # a process that looks at a run need not have its environment
        return value


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield (path, text) for every text in plain data."""
    if isinstance(value, str):
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _texts(item, f"{path}[{key}]" if isinstance(value, list) else f"{path}.{key}" if path else str(key))


def check_plugins(config: Config, unchecked: list[str] | None = None) -> None:
    """Import the plug-ins that a configuration names, check their arguments, and look up the environment variables.

    unchecked: receives messages about packages that this machine lacks; the run will be on another. None: they are
        problems.
    Raises: ConfigError: unknown names, modules that cannot be imported, unknown arguments and unset variables, all of
        them.
    """
    problems: dict[Problem, None] = {}
    for stage in config.stage_configs():
        # First the environment, because a part may be given such an argument.
        for path, text in _texts(plain(stage), ""):
            try:
                if is_env_interpolated(Config, path):
                    fill_from_environment(text)
            except ConfigError as error:
                problems[path, error.problems[0]] = None
        for use in named_parts(stage):
            if use.registered is not None:
                continue
            try:
                part = find_part(use.named.kind, use.name, use.named.registered(), stage.explorer.plugin_dirs)
            except UserError as error:
                if unchecked is not None and isinstance(error, NotInstalledError):
                    unchecked.append(str(error))
                else:
                    problems[use.path, str(error)] = None
            else:
                problems |= dict.fromkeys(use.problems(part))
    # A taskset repeats the problems of explorer_input, whose keys it takes over.
    lines = [
        f"{path}: {message}"
        for path, message in problems
        if ".taskset." not in path or (path.replace(".taskset.", "."), message) not in problems
    ]
    if lines:
        raise ConfigError(lines)
