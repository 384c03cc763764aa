"""A configuration's source as one plain tree: YAML read, overrides applied, interpolations resolved.

Knows OmegaConf and nothing of the schema. Every problem is collected; the rest is a tree of dicts, lists, scalars.
Invariant: a URL whose password comes from the environment is not resolved, so no copy of the tree has the password.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rftdask.errors import ConfigError

Problem = tuple[str, str]
"""(path of the key, what is wrong and what is allowed)."""


def read_tree(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str], problems: list[Problem]
) -> dict[str, Any] | None:
    """The tree of `source` with `overrides` (key.sub=value) applied; None when there is no source to speak of.

    Adds to `problems` what cannot be read, applied or resolved.
    """
    root = _read(source, problems)
    if root is None:
        return None
    for override in overrides:
        _apply(root, override, problems)
    tree: dict[str, Any] = _resolve(root, "", problems)
    return tree


def escape(value: Any) -> Any:
    """Plain data as `read_tree` must be given it to mean literally what it says: every "${" is escaped."""
    if isinstance(value, Mapping):
        return {key: escape(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escape(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def to_yaml(tree: dict[str, Any]) -> str:
    """A tree as YAML; texts that OmegaConf's loader would take for something else are quoted."""
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def has_password(text: str) -> bool:
    """Whether `text` is a URL with a password in it."""
    return bool(re.search(r"://[^/@\s]*:[^/@\s]+@|[?&]password=[^&\s]", text))


def names_environment(text: str) -> bool:
    """Whether `text` has still to be completed from the environment."""
    return _ENVIRONMENT in text


def fill_from_environment(text: str) -> str:
    """`text` with the environment variables it names. Raises: ConfigError: one is not set."""
    try:
        return str(OmegaConf.create({"text": text})["text"])
    except OmegaConfBaseException as error:
        problem = f"{text} cannot be completed: {_first_line(error)}; set it for every process"
        raise ConfigError([problem]) from error


def _read(source: str | Path | Mapping[str, Any], problems: list[Problem]) -> DictConfig | None:
    try:
        # A FIFO or a device would be waited for without end.
        if not isinstance(source, Mapping) and Path(source).exists() and not Path(source).is_file():
            problems.append(("", f"{source} is no file"))
            return None
        root = OmegaConf.create(dict(source)) if isinstance(source, Mapping) else OmegaConf.load(source)
    except FileNotFoundError:
        problems.append(("", f"there is no file {source}"))
    except (OSError, UnicodeDecodeError) as error:
        problems.append(("", f"{source} cannot be read: {error}"))
    except RecursionError:
        problems.append(("", "not valid YAML: it nests too deep"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problems.append(("", f"not valid YAML: {where}" + str(error.problem)))
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


def _resolve(node: Any, path: str, problems: list[Problem]) -> Any:
    """Plain data with every interpolation resolved; one that cannot be is left out and reported."""
    if isinstance(node, ListConfig):
        values = [_resolve_item(node, index, f"{path}[{index}]", problems) for index in range(len(node))]
        return _UNRESOLVED if any(value is _UNRESOLVED for value in values) else values
    if isinstance(node, DictConfig):
        items = {
            str(key): _resolve_item(node, key, f"{path}.{key!s}" if path else str(key), problems)
            for key in node.keys()  # noqa: SIM118  # iterating a DictConfig resolves its values
        }
        return {key: value for key, value in items.items() if value is not _UNRESOLVED}
    return node


_UNRESOLVED = object()
_ENVIRONMENT = "${oc.env:"


def _resolve_item(node: Any, key: Any, path: str, problems: list[Problem]) -> Any:
    if OmegaConf.is_missing(node, key):
        problems.append((path, "required, and given as ???"))
        return _UNRESOLVED
    try:
        value = node[key]
    except OmegaConfBaseException as error:
        problems.append((path, f"cannot be resolved: {_first_line(error)}"))
        return _UNRESOLVED
    if isinstance(value, str) and has_password(value) and OmegaConf.is_interpolation(node, key):
        written = str(OmegaConf.to_container(node, resolve=False)[key])  # type: ignore[index]
        # A password from the environment stays there: who opens the URL completes it.
        return written if names_environment(written) else value
    return _resolve(value, path, problems)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", lines[0])
