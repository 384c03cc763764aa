"""A configuration's source as one plain tree: YAML read, overrides applied, interpolations resolved, and what a site
says once put below it: the profile that it names, and its template of scripts.

Knows OmegaConf, and of the schema those two keys alone. Every problem is collected; the rest is a tree of dicts, lists,
scalars.
Invariant: a text that whoever uses it completes from the environment stays as it was written, so that no copy of the
tree has what is in the environment.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml.parser import ParserError
from yaml.scanner import ScannerError

from rftdask.errors import ConfigError

T = TypeVar("T")

Problem = tuple[str, str]
"""(path of the key, what is wrong and what is allowed)."""
_PROFILE = "cluster.slurm.profile"
_TEMPLATE = "cluster.slurm.template"


def read_tree(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str],
    problems: list[Problem],
    is_completed: Callable[[str, str], bool] = lambda path, value: False,
) -> dict[str, Any] | None:
    """The tree of `source` with `overrides` (key.sub=value) applied; None when there is no source to speak of.

    Adds to `problems` what cannot be read, applied or resolved.

    is_completed: whether the text at a path, which has the given value now, is completed from the environment where it
        is used (`fill_from_environment`).
    """
    if not overrides and isinstance(source, Mapping):
        try:
            copy: dict[str, Any] = _plain(source)
            return copy
        except (_NotPlainError, RecursionError):
            pass
    root = _read(source, problems)
    if root is None:
        return None
    # In their order, each on what the one before it left.
    for override in overrides:
        _apply(root, override, problems)
    tree: dict[str, Any] = _Resolver(problems, is_completed).resolve(root, "")
    return tree


class _NotPlainError(Exception):
    """There is something that OmegaConf would change, resolve or refuse."""


def _plain(value: Any) -> Any:
    """A copy of data that means what it says, as OmegaConf would give it, and much faster: run.json is read at every
    turn. Raises: _NotPlainError.
    """
    kind = type(value)
    if kind is dict and all(type(key) is str for key in value):
        return {key: _plain(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return [_plain(item) for item in value]
    if value is None or kind in (bool, int, float) or (kind is str and "${" not in value and value != "???"):
        return value
    raise _NotPlainError


def escape(value: Any) -> Any:
    """Plain data as `read_tree` must be given it to mean literally what it says: every "${" is escaped."""
    if isinstance(value, Mapping):
        return {key: escape(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escape(item) for item in value]
    if isinstance(value, str):
        # Backslashes before it are doubled, as OmegaConf halves them.
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def to_yaml(tree: dict[str, Any]) -> str:
    """A tree as YAML; texts that OmegaConf's loader would take for something else are quoted."""
    return OmegaConf.to_yaml(OmegaConf.create(tree))


_VARIABLE = re.compile(r"\$\{oc\.env: *(\w+) *(?:, *([^{}]*?) *)?\}")


def names_environment(value: Any) -> bool:
    """Whether a value, or a text in it, has still to be completed from the environment."""
    if isinstance(value, Mapping):
        return any(map(names_environment, value.values()))
    if isinstance(value, list | tuple):
        return any(map(names_environment, value))
    return isinstance(value, str) and bool(_VARIABLE.search(value))


def fill_from_environment(value: T) -> T:
    """`value` with the environment variables that its texts name (${oc.env:NAME} or ${oc.env:NAME,default}), for the
    process that uses it: what is written down never has them. Raises: ConfigError: one is not set.
    """

    def look_up(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if name not in os.environ and default is None:
            raise ConfigError([f"{match[0]} cannot be completed: the environment variable {name!r} is not set"])
        return os.environ.get(name, (default or "").strip("\"'"))

    def fill(part: Any) -> Any:
        if isinstance(part, Mapping):
            return type(part)({key: fill(item) for key, item in part.items()})  # type: ignore[call-arg]
        if isinstance(part, list | tuple):
            return type(part)(fill(item) for item in part)
        return _VARIABLE.sub(look_up, part) if isinstance(part, str) else part

    filled: T = fill(value) if names_environment(value) else value
    return filled


def _read(source: str | Path | Mapping[str, Any], problems: list[Problem]) -> DictConfig | None:
    try:
        # A FIFO or a device would be waited for without end.
        if not isinstance(source, Mapping) and Path(source).exists() and not Path(source).is_file():
            problems.append(("", f"{source} is no file; give the YAML file of a configuration"))
            return None
        root = OmegaConf.create(dict(source)) if isinstance(source, Mapping) else OmegaConf.load(source)
    except FileNotFoundError:
        problems.append(("", f"there is no file {source}"))
    except (OSError, UnicodeDecodeError) as error:
        problems.append(("", f"{source} cannot be read: {error}"))
    except RecursionError:
        problems.append(("", "not valid YAML: it nests too deep"))
    except yaml.MarkedYAMLError as error:
        mark, begun = error.problem_mark, error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        since = ""
        # A colon or a bracket that is missing is missed some lines later.
        if isinstance(error, ScannerError | ParserError) and mark and begun and begun.line < mark.line:
            since = f" {error.context} that begins in line {begun.line + 1}"
        problems.append(("", f"not valid YAML: {where}{error.problem}{since}"))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        problems.append(("", f"not valid YAML: {_first_line(error)}"))
    else:
        if isinstance(root, DictConfig):
            return root
        problems.append(("", "the file must hold sections (key: value), not a list"))
    return None


def _apply(root: DictConfig, override: str, problems: list[Problem]) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        problems.append(("", f"override {override!r} is not of the form key.sub=value"))
        return
    try:
        # Parsed under a key of its own, because `key` may address an item of a list.
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)["value"]  # type: ignore[index,call-overload]
        OmegaConf.update(root, key, value, merge=True, force_add=True)
    except RecursionError:
        problems.append((key, "the override cannot be applied: it nests too deep"))
    except (OmegaConfBaseException, yaml.YAMLError, IndexError, AttributeError, TypeError, ValueError) as error:
        problems.append((key, f"the override cannot be applied: {_first_line(error)}"))


_UNRESOLVED = object()


class _Resolver:
    """Plain data with every interpolation resolved; one that cannot be is left out and reported."""

    def __init__(self, problems: list[Problem], is_completed: Callable[[str, str], bool]) -> None:
        self._problems = problems
        self._is_completed = is_completed

    def resolve(self, node: Any, path: str) -> Any:
        if isinstance(node, ListConfig):
            values = [self._item(node, index, f"{path}[{index}]") for index in range(len(node))]
            return _UNRESOLVED if any(value is _UNRESOLVED for value in values) else values
        if isinstance(node, DictConfig):
            items = {
                str(key): self._item(node, key, f"{path}.{key!s}" if path else str(key))
                for key in node.keys()  # noqa: SIM118  # iterating a DictConfig resolves its values
            }
            return {key: value for key, value in items.items() if value is not _UNRESOLVED}
        return node

    def _item(self, node: Any, key: Any, path: str) -> Any:
        if OmegaConf.is_missing(node, key):
            self._problems.append((path, "required, and given as ???"))
            return _UNRESOLVED
        try:
            value = node[key]
        except OmegaConfBaseException as error:
            self._problems.append((path, f"cannot be resolved: {_first_line(error)}"))
            return _UNRESOLVED
        if isinstance(value, str) and OmegaConf.is_interpolation(node, key) and self._is_completed(path, value):
            # The text before interpolation: what is written down names the variable and never has its value.
            written = str(node._get_node(key)._value())
            # What names other keys as well means nothing without them, and an escaped text is meant as it stands.
            if _VARIABLE.search(written) and "${" not in _VARIABLE.sub("", written) and "\\${" not in written:
                return written
        return self.resolve(value, path)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", lines[0])


# ---- what a site says once


def add_site(tree: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """The tree of a configuration with what its site says; a job finds it there, and reads no file of the site.

    Adds to `problems` what cannot be read.
    """
    tree = _read_template(tree, Path(), problems)
    name = _slurm(tree).get("profile")
    if not isinstance(name, str):  # what is no name is told by the check of the key
        return tree
    file = _profile_file(name)
    if file is None:
        places = " nor ".join(str(folder / f"{name}.yaml") for folder in _folders())
        problems.append((_PROFILE, f"there is no profile {name!r}: neither {places}, nor a file of that path"))
        return tree
    found: list[Problem] = []
    profile = read_tree(file, (), found) or {}
    found += [("", f"a profile has the section cluster alone, and not {key}") for key in profile if key != "cluster"]
    if _slurm(profile).get("profile") is not None:
        found.append((_PROFILE, "a profile names no other"))
    problems += [(_PROFILE, f"{file}: {path}{': ' * bool(path)}{message}") for path, message in found]
    merged = merge(_read_template(profile, file.parent, problems), tree)
    merged["cluster"]["slurm"]["profile"] = None
    return merged


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `over`, field by field: sections are merged, anything else is replaced."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def _slurm(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    cluster = tree.get("cluster")
    found = cluster.get("slurm") if isinstance(cluster, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _read_template(tree: dict[str, Any], folder: Path, problems: list[Problem]) -> dict[str, Any]:
    """The tree with the text of the template in the place of its path, which starts at `folder`."""
    template = _slurm(tree).get("template")
    if not isinstance(template, str) or "\n" in template or "{" in template:  # it is the text already
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
    """The user's and the site's."""
    own = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(own, "rftdask"), Path("/etc/rftdask")
