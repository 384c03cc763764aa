"""Source of a configuration, read as one plain tree: YAML, overrides, interpolations, and the settings of a site.

A site's settings are the profile that the configuration names and its template of job scripts. The module knows
OmegaConf (imported late, because plain data and simple files need none of it) and, of the schema, those two keys only.
Every problem is collected; the rest is a tree of dicts, lists and scalars.
Invariant: a text that is filled in from the environment where it is used stays as it was written, so that no copy of
the tree has values of the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from yaml.parser import ParserError
from yaml.scanner import ScannerError

from rftdask.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

T = TypeVar("T")

Problem = tuple[str, str]
"""(path of the key, message with what is wrong and what is allowed)."""
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
    if not overrides:
        # OmegaConf reads whatever these refuse, and reports its mistakes.
        with suppress(_NotPlainError, RecursionError, OSError, ValueError, yaml.YAMLError):
            copy: dict[str, Any] = _plain(source) if isinstance(source, Mapping) else _read_plain(Path(source), stays)
            return copy
    root = _read(source, problems)
    if root is None:
        return None
    for override in overrides:
        _apply(root, override, problems)
    tree: dict[str, Any] = _Resolver(problems, stays).resolve(root, "")
    return tree


class _NotPlainError(Exception):
    """The data has something that OmegaConf would change, resolve or refuse."""


def _plain(value: Any) -> Any:
    """Return a copy of data without interpolations, as OmegaConf would, much faster. Raises: _NotPlainError."""
    kind = type(value)
    if kind is dict and all(type(key) is str for key in value):
        return {key: _plain(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return [_plain(item) for item in value]
    if value is None or kind in (bool, int, float) or (kind is str and "${" not in value and value != "???"):
        return value
    raise _NotPlainError


_INT = re.compile(r"[-+]?(?:0|[1-9]\d*)", re.ASCII)
_FLOAT = re.compile(r"[-+]?\d+(?:\.\d+(?:[eE][-+]?\d+)?|[eE][-+]?\d+)", re.ASCII)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads what YAML and OmegaConf read alike. Raises: _NotPlainError: anything else, such as 010 or 1:30."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        keys = [key.value if isinstance(key, yaml.ScalarNode) else "<<" for key, _ in node.value]
        if len(set(keys)) < len(keys) or "<<" in keys or "=" in keys:
            raise _NotPlainError

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: Any) -> str:
        if kind is yaml.ScalarNode and implicit[0] and value and value[0] in "+-.0123456789":
            for name, pattern in (("int", _INT), ("float", _FLOAT)):
                if pattern.fullmatch(value):
                    return f"tag:yaml.org,2002:{name}"
            if "/" not in value:  # a path is text, and no number
                raise _NotPlainError
        return str(super().resolve(kind, value, implicit))


_MAX_CHARS = 20_000
"""Longer files may exceed the number of nodes that OmegaConf accepts."""
_SIMPLE = re.compile(r"\$\{(?:oc\.env:(\w+)(?:,(\.{0,2}/[\w./-]*))?|([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*))\}", re.ASCII)
"""${oc.env:NAME}, ${oc.env:NAME,./default/path} or ${section.key}."""


def _read_plain(file: Path, stays: Callable[[str, str], bool]) -> dict[str, Any]:
    """Return the tree of a file whose interpolations are all `_SIMPLE`. It is the tree that OmegaConf returns, without
    the time that importing OmegaConf takes. Raises: _NotPlainError: OmegaConf must read it.
    """
    text = file.read_text(encoding="utf-8") if file.is_file() else "&"
    # An alias needs an anchor "&name".
    root = None if len(text) > _MAX_CHARS or "&" in text else yaml.load(text, _Loader)
    if type(root) is not dict:
        raise _NotPlainError
    tree: dict[str, Any] = _resolve_plain(root, stays)
    return tree


def _resolve_plain(root: dict[str, Any], stays: Callable[[str, str], bool]) -> Any:
    """Return the tree with its interpolations filled in.

    Raises: _NotPlainError: an interpolation does not match `_SIMPLE`.
    """

    def look_up(match: re.Match[str]) -> str:
        name, default, key = match.groups()
        if key is None:
            value: Any = os.environ.get(name, default)
        else:
            value = root
            for part in key.split("."):
                value = value.get(part) if type(value) is dict else None
        # OmegaConf reports a missing key or variable, copies a section, and formats numbers.
        if not isinstance(value, str) or value == "???":
            raise _NotPlainError
        if key is not None:
            return fill(value)
        if "$" in value or "\\" in value:
            raise _NotPlainError
        return value

    def fill(text: str) -> str:
        if "${" not in text:
            return text
        if "\\" in text or "$" in _SIMPLE.sub("", text):
            raise _NotPlainError
        return _SIMPLE.sub(look_up, text)

    def resolve(value: Any, path: str) -> Any:
        if type(value) is dict and all(type(key) is str for key in value):
            return {key: resolve(item, f"{path}.{key}" if path else key) for key, item in value.items()}
        if type(value) is list:
            return [resolve(item, f"{path}[{index}]") for index, item in enumerate(value)]
        if type(value) is not str or "${" not in value:
            return _plain(value)
        text = fill(value)
        return value if stays(path, text) and _names_only_environment(value) else text

    return resolve(root, "")


def escape(value: Any) -> Any:
    """Return plain data with every "${" escaped, so that `read_tree` takes it literally."""
    if isinstance(value, Mapping):
        return {key: escape(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escape(item) for item in value]
    if isinstance(value, str):
        # Backslashes before it are doubled, as OmegaConf halves them.
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def to_yaml(tree: dict[str, Any]) -> str:
    """Return a tree as YAML. Texts that OmegaConf's loader would read as another type are quoted."""
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
        name, default = match[1], match[2]
        if name not in os.environ and default is None:
            raise ConfigError([f"{match[0]} cannot be filled in: the environment variable {name!r} is not set"])
        return os.environ.get(name, (default or "").strip("\"'"))

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


def _read(source: str | Path | Mapping[str, Any], problems: list[Problem]) -> DictConfig | None:
    from omegaconf import DictConfig, OmegaConf  # late: heavy
    from omegaconf.errors import OmegaConfBaseException

    try:
        # Reading a FIFO or a device might never end.
        if not isinstance(source, Mapping) and Path(source).exists() and not Path(source).is_file():
            problems.append(("", f"{source} is not a file; give the YAML file of a configuration"))
            return None
        root = OmegaConf.create(dict(source)) if isinstance(source, Mapping) else OmegaConf.load(source)
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
    from omegaconf import OmegaConf  # late: heavy
    from omegaconf.errors import OmegaConfBaseException

    try:
        # Parsed under another key, because `key` may address an item of a list.
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)["value"]  # type: ignore[index,call-overload]
        OmegaConf.update(root, key, value, merge=True, force_add=True)
    except RecursionError:
        problems.append((key, "the override cannot be applied: it nests too deep"))
    except (OmegaConfBaseException, yaml.YAMLError, IndexError, AttributeError, TypeError, ValueError) as error:
        problems.append((key, f"the override cannot be applied: {_first_line(error)}"))


_UNRESOLVED = object()


class _Resolver:
    """Resolves interpolations. Keys that cannot be resolved are reported and left out."""

    def __init__(self, problems: list[Problem], stays: Callable[[str, str], bool]) -> None:
        self._problems, self._stays = problems, stays

    def resolve(self, node: Any, path: str) -> Any:
        """Return plain data."""
        from omegaconf import DictConfig, ListConfig  # late: heavy

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
        from omegaconf import OmegaConf  # late: heavy
        from omegaconf.errors import OmegaConfBaseException

        if OmegaConf.is_missing(node, key):
            self._problems.append((path, "required, and given as ???"))
            return _UNRESOLVED
        try:
            value = node[key]
        except OmegaConfBaseException as error:
            self._problems.append((path, f"cannot be resolved: {_first_line(error)}"))
            return _UNRESOLVED
        if isinstance(value, str) and OmegaConf.is_interpolation(node, key) and self._stays(path, value):
            # The text before interpolation: it names the variable and does not have its value.
            written = str(node._get_node(key)._value())
            if _names_only_environment(written):
                return written
        return self.resolve(value, path)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", lines[0])


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
