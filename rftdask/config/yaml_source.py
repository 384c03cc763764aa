"""Source of a configuration, read as one plain tree: YAML, overrides, interpolations, and the settings of a site.

A site's settings are the profile that the configuration names and its template of job scripts. Of the schema, the
module knows those two keys only. Every problem is collected; the rest is a tree of dicts, lists and scalars.
Invariant: a text that is filled in from the environment where it is used stays as it was written, so that no copy of
the tree has values of the environment.

A text may contain ${key.sub[0]}, ${.sibling}, ${oc.env:NAME}, ${oc.env:NAME,default} and ${oc.decode:text}, also one
in another. A backslash before it makes it literal.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from yaml.parser import ParserError
from yaml.scanner import ScannerError

from rftdask.config.base import Location, Problem, join
from rftdask.errors import ConfigError

T = TypeVar("T")

_PROFILE = "cluster.slurm.profile"
_TEMPLATE = "cluster.slurm.template"


def read_tree(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str],
    problems: list[Problem],
    stays: Callable[[str, str], bool] = lambda path, value: False,
) -> dict[str, Any] | None:
    """Return the tree of `source` with `overrides` (key.sub=value) applied; None: there is no tree.

    What cannot be read, applied or resolved is added to `problems`.

    stays: called with a path and the resolved text; True: the text stays as written, because it is filled in from the
        environment where it is used (`fill_from_environment`).
    """
    root = _read(source, problems)
    if root is None:
        return None
    for override in overrides:
        _apply(root, override, problems)
    tree: dict[str, Any] = _Resolver(root, problems, stays).plain(root, ())
    return tree


# ---- YAML


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Loads YAML 1.1 without dates. Numbers may be written as 1e-5, and a mapping has each key once."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if "is_flat" in vars(node):  # an alias
            return
        vars(node)["is_flat"] = True
        seen = set[str]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(None, None, f"found duplicate key {key.value}", key.start_mark)
            seen.add(key.value)
        super().flatten_mapping(node)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d[\d_]*(?:\.[\d_]*)?[eE][-+]?\d+$", re.ASCII), list("-+0123456789.")
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_MAX_VALUES = 100_000
"""Aliases can make a short text as large as anybody likes."""


def load_yaml(text: str) -> Any:
    """Return the data of a YAML text; interpolations stay as written. Raises: yaml.YAMLError, RecursionError."""
    return _copy(yaml.load(text, _Loader), itertools.count())


def _copy(value: Any, counter: Iterator[int]) -> Any:
    """Return plain data with its own dicts and lists, and texts as keys. Raises: yaml.YAMLError, RecursionError."""
    if next(counter) == _MAX_VALUES:
        raise yaml.YAMLError(f"it has more than {_MAX_VALUES:,} values")
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str | int | float)]:
            raise yaml.YAMLError(f"{wrong[0]!r} is not a key; put it in quotes")
        return {str(key): _copy(item, counter) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item, counter) for item in value]
    if not isinstance(value, str | int | float | None):
        raise yaml.YAMLError(f"{value!r} is neither text nor a number, list or section")
    return value


def _read(source: str | Path | Mapping[str, Any], problems: list[Problem]) -> dict[str, Any] | None:
    try:
        # Reading a FIFO or a device might never end.
        if not isinstance(source, Mapping) and Path(source).exists() and not Path(source).is_file():
            problems.append(("", f"{source} is not a file; give the YAML file of a configuration"))
            return None
        if isinstance(source, Mapping):
            tree = _copy(source, itertools.count())
        else:
            tree = load_yaml(Path(source).read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(("", f"file {source} does not exist"))
    except (OSError, UnicodeDecodeError) as error:
        problems.append(("", f"{source} cannot be read: {error}"))
    except RecursionError:
        problems.append(("", "not valid YAML: it nests too deep"))
    except yaml.MarkedYAMLError as error:
        mark, begun = error.problem_mark, error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        since = ""
        # A missing colon or bracket is noticed some lines later.
        if isinstance(error, ScannerError | ParserError) and mark and begun and begun.line < mark.line:
            since = f" {error.context} that begins in line {begun.line + 1}"
        problems.append(("", f"not valid YAML: {where}{error.problem}{since}"))
    except yaml.YAMLError as error:
        problems.append(("", f"not valid YAML: {_first_line(error)}"))
    else:
        if isinstance(tree, dict) or tree is None:
            return tree or {}
        kind = "a list" if isinstance(tree, list) else "a text"
        problems.append(("", f"the file must hold sections (key: value), not {kind}"))
    return None


_KEY = re.compile(r"[^.\[\]]+(?:\.[^.\[\]]+|\[\d+\])*")


def _apply(root: dict[str, Any], override: str, problems: list[Problem]) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not _KEY.fullmatch(key):
        problems.append(("", f"override {override!r} is not of the form key.sub=value"))
        return
    *above, last = _parts(key)
    try:
        value = load_yaml(text)
        node: Any = root
        for part in above:
            if not isinstance(node, list) and not isinstance(node.get(part), dict | list):
                node[part] = {}
            node = node[int(part) if isinstance(node, list) else part]
        if isinstance(node, list):
            node[int(last)] = value
        else:
            node |= merge(node, {last: value})
    except RecursionError:
        problems.append((key, "the override cannot be applied: it nests too deep"))
    except (yaml.YAMLError, IndexError, ValueError) as error:
        problems.append((key, f"the override cannot be applied: {_first_line(error)}"))


def _parts(key: str) -> list[str]:
    """Return the keys and indices of "a.b[0]"."""
    return re.findall(r"[^.\[\]]+", key)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ---- interpolations

_OPENING = re.compile(r"(\\*)\$\{")
_ENVIRONMENT = re.compile(r"oc\.env: *(\w+) *(?:, *(.*?) *)?", re.DOTALL)
_DECODE = "oc.decode:"


class _Resolver:
    """Resolves interpolations. Values that cannot be resolved are reported and become None."""

    def __init__(self, root: dict[str, Any], problems: list[Problem], stays: Callable[[str, str], bool]) -> None:
        self._root, self._problems, self._stays = root, problems, stays

    def plain(self, value: Any, loc: Location) -> Any:
        """Return the value at a location without interpolations."""
        if isinstance(value, dict):
            return {key: self.plain(item, (*loc, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self.plain(item, (*loc, number)) for number, item in enumerate(value)]
        try:
            resolved = self._resolve(value, loc)
        except (ValueError, yaml.YAMLError, RecursionError) as error:
            cause = "it refers to itself" if isinstance(error, RecursionError) else _first_line(error)
            problem = "required, and given as ???" if value == "???" else f"cannot be resolved: {cause}"
            self._problems.append((join(loc), problem))
            return None
        if isinstance(resolved, str) and resolved != value and self._stays(join(loc), resolved):
            return value if _names_only_environment(value) else resolved
        return resolved

    def _resolve(self, value: Any, loc: Location) -> Any:
        if isinstance(value, dict):
            return {key: self._resolve(item, (*loc, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self._resolve(item, (*loc, number)) for number, item in enumerate(value)]
        if value == "???":
            raise ValueError(f"{join(loc)} is given as ???")
        if not isinstance(value, str):
            return value
        parts: list[Any] = []
        end = 0
        while opening := _OPENING.search(value, end):
            parts += [value[end : opening.start()], "\\" * (len(opening[1]) // 2)]
            end = opening.end()
            if len(opening[1]) % 2:
                parts.append("${")
            else:
                close = _closing_brace(value, end)
                parts.append(self._look_up(str(self._resolve(value[end:close], loc)).strip(), loc))
                end = close + 1
        parts = [part for part in (*parts, value[end:]) if part != ""]
        # A value that is only an interpolation keeps its type.
        return parts[0] if len(parts) == 1 else "".join(map(str, parts))

    def _look_up(self, inner: str, loc: Location) -> Any:
        """Return what the text between the braces of a value at `loc` stands for."""
        if inner.startswith(_DECODE):
            return load_yaml(inner.removeprefix(_DECODE))
        if match := _ENVIRONMENT.fullmatch(inner):
            return None if match[2] == "null" and match[1] not in os.environ else _variable(match[1], match[2])
        if ":" in inner:
            raise ValueError(f"${{{inner}}} is not ${{key}}, ${{oc.env:NAME}} or ${{oc.decode:text}}")
        num_dots = len(inner) - len(inner.lstrip("."))
        at = (*loc[: len(loc) - num_dots], *_parts(inner)) if num_dots else tuple(_parts(inner))
        node: Any = self._root
        for number, part in enumerate(at):
            node = self._resolve(node, at[:number]) if isinstance(node, str) else node
            try:
                node = node[int(part) if isinstance(node, list) else part]
            except (KeyError, IndexError, TypeError, ValueError):
                raise ValueError(f"Interpolation key {inner!r} not found") from None
        return self._resolve(node, at)


def _closing_brace(text: str, begin: int) -> int:
    depth = 1
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError(f"{text!r} has a ${{ without a closing brace")


def _variable(name: str, default: str | None) -> str:
    if name in os.environ:
        return os.environ[name]
    if default is None:
        raise ValueError(f"the environment variable {name!r} is not set")
    return default.strip("\"'")


def escape(value: Any) -> Any:
    """Return plain data with every "${" escaped, so that `read_tree` takes it literally."""
    if isinstance(value, Mapping):
        return {key: escape(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escape(item) for item in value]
    if isinstance(value, str):
        # Backslashes before it are doubled, because reading halves them.
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def to_yaml(tree: dict[str, Any]) -> str:
    """Return a tree as YAML. Texts that would be read as another type are quoted."""
    return yaml.dump(tree, Dumper=_Dumper, allow_unicode=True, sort_keys=False, default_flow_style=False)


class _Dumper(getattr(yaml, "CDumper", yaml.Dumper)):  # type: ignore[misc]  # C is ten times as fast
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.Dumper, text: str) -> yaml.ScalarNode:
    try:
        float(text)
        quoted = True
    except ValueError:
        quoted = text in ("y", "Y", "n", "N")  # yaml itself quotes the other booleans
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if quoted else None)


_Dumper.add_representer(str, _represent_text)


_VARIABLE = re.compile(r"\$\{oc\.env: *(\w+) *(?:, *([^{}]*?) *)?\}")


def names_environment(value: Any) -> bool:
    """True if a value, or a text in it, contains ${oc.env:NAME}."""
    if isinstance(value, Mapping):
        return any(map(names_environment, value.values()))
    if isinstance(value, list | tuple):
        return any(map(names_environment, value))
    return isinstance(value, str) and bool(_VARIABLE.search(value))


def fill_from_environment(value: T) -> T:
    """Return `value` with ${oc.env:NAME} and ${oc.env:NAME,default} filled in, for the process that uses it.

    Files of a run never contain the result. Raises: ConfigError: a variable is not set.
    """

    def look_up(match: re.Match[str]) -> str:
        try:
            return _variable(match[1], match[2])
        except ValueError as error:
            raise ConfigError([f"{match[0]} cannot be filled in: {error}"]) from error

    def fill(part: Any) -> Any:
        if isinstance(part, Mapping):
            return type(part)({key: fill(item) for key, item in part.items()})  # type: ignore[call-arg]
        if isinstance(part, list | tuple):
            return type(part)(fill(item) for item in part)
        return _VARIABLE.sub(look_up, part) if isinstance(part, str) else part

    filled: T = fill(value) if names_environment(value) else value
    return filled


def _names_only_environment(text: str) -> bool:
    # References to other keys mean nothing without them, and an escaped text is literal.
    return bool(_VARIABLE.search(text)) and "${" not in _VARIABLE.sub("", text) and "\\${" not in text


# ---- settings of a site


def add_site(tree: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Return the tree of a configuration with its site's profile and template in it, so that jobs read no site files.

    What cannot be read is added to `problems`.
    """
    tree = _read_template(tree, Path(), problems)
    name = _slurm(tree).get("profile")
    if not isinstance(name, str):  # the check of the key reports it
        return tree
    file = _profile_file(name)
    if file is None:
        places = " nor ".join(str(folder / f"{name}.yaml") for folder in _folders())
        problems.append((_PROFILE, f"profile {name!r} does not exist: neither {places}, nor a file of that path"))
        return tree
    errors: list[Problem] = []
    profile = read_tree(file, (), errors) or {}
    errors += [("", f"a profile has only the section cluster, and not {key}") for key in profile if key != "cluster"]
    if _slurm(profile).get("profile") is not None:
        errors.append((_PROFILE, "a profile must not name another profile"))
    problems += [(_PROFILE, f"{file}: {path}{': ' * bool(path)}{message}") for path, message in errors]
    merged = merge(_read_template(profile, file.parent, problems), tree)
    merged["cluster"]["slurm"]["profile"] = None
    return merged


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated with `over`: sections are merged, anything else is replaced."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def _slurm(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    cluster = tree.get("cluster")
    slurm = cluster.get("slurm") if isinstance(cluster, Mapping) else None
    return slurm if isinstance(slurm, Mapping) else {}


def _read_template(tree: dict[str, Any], folder: Path, problems: list[Problem]) -> dict[str, Any]:
    """Return the tree with the text of the template instead of its path, which is relative to `folder`."""
    template = _slurm(tree).get("template")
    if not isinstance(template, str) or "\n" in template or "{" in template:  # already a text
        return tree
    try:
        text = (folder / Path(template).expanduser()).read_text()
    except (OSError, UnicodeDecodeError) as error:
        problems.append((_TEMPLATE, f"{template} cannot be read: {error}"))
        return tree
    return merge(tree, {"cluster": {"slurm": {"template": text}}})


def _profile_file(name: str) -> Path | None:
    places = [folder / f"{name}.yaml" for folder in _folders()] if os.sep not in name else []
    return next((place for place in (*places, Path(name).expanduser()) if place.is_file()), None)


def _folders() -> tuple[Path, Path]:
    """Folders with profiles: the user's and the site's."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home, "rftdask"), Path("/etc/rftdask")
