"""Checks a tree against the schema, key by key: unknown keys, marks, secrets, then types and ranges through pydantic.

Knows no key by name. Invariant: every mistake becomes one (path, message), none hides another, and no message shows a
secret. Wrong values are removed from the tree, so that the rest can be checked. Pydantic does not suffice: it has no
warnings, and a validator of a section stops at its first error.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rftdask.config.base import (
    Aliases,
    Computed,
    Later,
    Mark,
    PluginName,
    Problem,
    Section,
    child_of,
    field_at,
    is_env_interpolated,
    join,
    marks_of,
    show,
    types_of,
)
from rftdask.config.plugins import find_part, suggest_names
from rftdask.config.schema.run import Config
from rftdask.config.trinity.reference_keys import (
    REFERENCE_NAMES,
    Derived,
    Ignored,
    Missing,
    ReferenceKey,
    Renamed,
    Secret,
    reference_keys,
)
from rftdask.errors import UserError
from rftdask.storage.safe_text import find_secret, is_left_to_environment, is_secret_name

MarkType = TypeVar("MarkType", bound=Mark)

_NO_KEY = ("", "EMPTY", False)
_NO_SECRETS = "does not belong in a configuration, which is written to the run folder"
_DERIVED = "derived, cannot be set"
_NOT_A_SECTION = "a section (key: value lines)"
_SHORT_WORD = 3


class Checker:
    """Checks one tree. Usage: `validate(clean(tree))`, then read `problems` and `warnings`.

    has_secrets: accept secrets: an earlier start wrote the tree.
    """

    def __init__(self, *, has_secrets: bool = False) -> None:
        self.has_secrets = has_secrets
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []
        self.plugin_dirs: list[str] = []

    def clean(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of `tree` with old names replaced and reported keys removed."""
        explorer = tree.get("explorer")
        folders = explorer.get("plugin_dirs") if isinstance(explorer, Mapping) else None
        self.plugin_dirs = [str(folder) for folder in folders] if isinstance(folders, list | tuple) else []
        return self._section(Config, tree, "")

    def validate(self, tree: dict[str, Any]) -> Config:
        """Return the tree as a Config. Wrong values are reported and removed from `tree`."""
        while True:  # each round removes a key from the tree, or adds a missing one
            try:
                return Config.model_validate(tree)
            except ValidationError as error:
                for detail in error.errors(include_url=False):
                    self._report(tree, detail)

    def _report(self, tree: dict[str, Any], detail: Any) -> None:
        loc, info = field_at(Config, detail["loc"])
        missing = detail["type"] == "missing"
        path = join(loc if missing else detail["loc"])
        whole_section = missing and child_of(info)  # its required keys are reported instead
        if not whole_section and not any(path == known for known, _ in self.problems):
            self.problems.append((path, readable(detail, info)))
        # Removed, so that the next round finds the next mistake.
        node: Any = tree
        for part in loc[:-1]:
            node = node[part]
        node.pop(loc[-1], None)
        if info.is_required():
            node[loc[-1]] = {} if child_of(info) else "stand-in"

    def _section(self, cls: type[Section], tree: Mapping[str, Any], path: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        others = reference_keys(cls)
        for key, value in tree.items():
            where = f"{path}.{key}" if path else str(key)
            info, reference = cls.model_fields.get(key), others.get(key)
            if info is not None:
                result.update(self._key(info, key, value, where))
            elif isinstance(reference, Renamed):
                if tree.get(reference.to) not in (None, value):
                    message = f"an old name of {reference.to}, which is given as well; leave it out"
                    self.problems.append((where, message))
                elif value is not None:
                    self.warnings.append((where, f"old name of {reference.to}"))
                    result.update(self._key(cls.model_fields[reference.to], reference.to, value, where))
            elif reference is not None:
                self._report_reference(reference, value, where)
            elif isinstance(getattr(cls, str(key), None), property):
                self.problems.append((where, _DERIVED))
            else:
                self.problems.append((where, _unknown(str(key), {**cls.model_fields, **others}, path)))
        return result

    def _report_reference(self, reference: ReferenceKey, value: Any, path: str) -> None:
        """Report a key of Trinity-RFT that is not a field; it is not kept."""
        if value is None:  # the same as an absent key
            return
        if isinstance(reference, Mapping):
            if not isinstance(value, Mapping):
                self.problems.append((path, f"{show(value)} is not {_NOT_A_SECTION}"))
                return
            for key, item in value.items():
                if key in reference:
                    self._report_reference(reference[key], item, f"{path}.{key}")
                else:
                    self.problems.append((f"{path}.{key}", _unknown(str(key), reference, path)))
        elif isinstance(reference, Derived):
            self.problems.append((path, _DERIVED))
        elif isinstance(reference, Secret):
            if value not in _NO_KEY:
                self.problems.append((path, f"a secret {_NO_SECRETS}: {reference.instead}"))
        elif isinstance(reference, Missing):
            # Files for Trinity-RFT list such keys with their defaults, which ask for nothing.
            if value != reference.default and value not in reference.allowed:
                instead = f"leave it out or set {show(reference.default)}"
                self.problems.append((path, _not_available(value, reference.feature, instead)))
        elif isinstance(reference, Ignored) and value != reference.default:
            self.warnings.append((path, f"ignored: {reference.reason}"))
            self._plain(value, path)

    def _key(self, info: FieldInfo, key: str, value: Any, path: str) -> Iterator[tuple[str, Any]]:
        """Yield the (key, value) to keep for one key of the tree, or nothing."""
        child, computed = child_of(info), _mark(info, Computed)
        # null is the same as an absent key, unless None is a value of the key.
        if value is None and (computed or type(None) not in get_args(info.annotation)):
            return
        # Files for Trinity-RFT write 0 for the default of such keys.
        if computed and computed.zero and value == 0:
            return
        if child and child[0] == "section" and isinstance(value, Mapping):
            yield key, self._section(child[1], value, path)
            return
        aliases = _mark(info, Aliases)
        if aliases and isinstance(value, str) and value in aliases.values:
            self.warnings.append((path, f"{value} is taken as {aliases.values[value]}: {aliases.reason}"))
            value = aliases.values[value]
        if message := self._refusal(info, value):
            self.problems.append((path, message))
            return
        items: dict[Any, str] = {}
        if child and child[0] == "list" and isinstance(value, list):
            items = {index: f"{path}[{index}]" for index in range(len(value))}
        elif child and child[0] == "dict" and isinstance(value, Mapping):
            items = {name: f"{path}.{name}" for name in value}
        else:
            value = self._plain(value, path)
        if child and items:
            # Items that are not sections are reported by `validate`.
            cleaned = {
                item: self._section(child[1], value[item], at) if isinstance(value[item], Mapping) else value[item]
                for item, at in items.items()
            }
            value = list(cleaned.values()) if isinstance(value, list) else cleaned
        yield key, value

    def _refusal(self, info: FieldInfo, value: Any) -> str:
        """Return why the value of a key is refused, or "". A plug-in is imported only if checks need it."""
        later, named = _mark(info, Later), _mark(info, PluginName)
        if later and value in later.values:
            known = sorted(named.registered()) if named else allowed_values(info.annotation)
            return _not_available(value, later.feature, f"use {one_of(known)}")
        if named and isinstance(value, str):
            registered, may_be_plugin = named.registered(), "." in value or bool(self.plugin_dirs)
            if value in registered or (may_be_plugin and not named.needed):
                return ""
            if (why := REFERENCE_NAMES.get(named.kind, {}).get(value)) and not may_be_plugin:
                return f"{show(value)} of Trinity-RFT is not available: {why}"
            if not may_be_plugin:
                return f"unknown {named.kind} {show(value)}; {suggest_names(value, registered)}"
            try:
                find_part(named.kind, value, registered, self.plugin_dirs)
            except UserError as error:
                return str(error)
        types = set(types_of(info.annotation))
        if isinstance(value, bool) and types & {int, float} and bool not in types:
            return f"{show(value)} is not a number"
        return ""

    def _plain(self, value: Any, path: str, name: str = "") -> Any:
        """Return a value without secrets and without texts that hold a NUL, which are reported.

        name: key of the value in an OpenDict, which may show that it is a secret.
        """
        if isinstance(value, list):
            return [self._plain(item, f"{path}[{index}]", name) for index, item in enumerate(value)]
        if isinstance(value, Mapping):
            items = {key: self._plain(item, f"{path}.{key}", str(key)) for key, item in value.items()}
            return {key: item for key, item in items.items() if item is not None or value[key] is None}
        if isinstance(value, str) and "\0" in value:
            self.problems.append((path, f"{show(value)} holds a NUL character; remove it"))
            return None
        if self.has_secrets:
            return value
        # The name of an environment variable is not a secret.
        is_kept = isinstance(value, str) and is_left_to_environment(value)
        what = find_secret(value) if isinstance(value, str) else ""
        if not what and is_secret_name(name) and isinstance(value, str | int) and value not in _NO_KEY and not is_kept:
            what = "a secret"
        if not what:
            return value
        instead = (
            "put it into an environment variable and write ${oc.env:NAME} here, which is filled in where it is used"
            if is_env_interpolated(Config, path)
            else "leave it in the environment of the processes, or in a file that only you may read"
        )
        self.problems.append((path, f"{what} {_NO_SECRETS}: {instead}"))
        return None


def _mark(info: FieldInfo, kind: type[MarkType]) -> MarkType | None:
    return next((mark for mark in marks_of(info) if isinstance(mark, kind)), None)


# ---- every key of the schema


def walk(schema: type[Section], path: str = "") -> Iterator[tuple[str, FieldInfo | ReferenceKey]]:
    """Yield every key below `schema` with its dotted path, sections before their keys; items of a list as name[].key.

    A key that is not a field comes with its entry in `reference_keys`.
    """
    for key, info in schema.model_fields.items():
        where = f"{path}.{key}" if path else key
        yield where, info
        if child := child_of(info):
            yield from walk(child[1], where + {"section": "", "list": "[]", "dict": ".<name>"}[child[0]])
    others = {key: entry for key, entry in reference_keys(schema).items() if key not in schema.model_fields}
    yield from _walk_reference(others, path)


def _walk_reference(keys: Mapping[str, ReferenceKey], path: str) -> Iterator[tuple[str, ReferenceKey]]:
    for key, entry in keys.items():
        where = f"{path}.{key}" if path else key
        yield where, entry
        if isinstance(entry, Mapping):
            yield from _walk_reference(entry, where)


@cache
def _sections_with(schema: type[Section]) -> dict[str, list[str]]:
    """Return key name -> paths of the sections that have it."""
    index: dict[str, list[str]] = {}
    for path, entry in walk(schema):
        section, _, key = path.rpartition(".")
        if not isinstance(entry, Derived):
            index.setdefault(key, []).append(section or "the top level")
    return index


# ---- messages


_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "string": "text; put it in quotes",
    "bool": "true or false",
    "tuple": "a list",
    "dict": _NOT_A_SECTION,
    "model": _NOT_A_SECTION,
}
_BOUNDS = {
    "greater_than_equal": ("too small", "at least", "ge"),
    "greater_than": ("too small", "more than", "gt"),
    "less_than_equal": ("too large", "at most", "le"),
    "less_than": ("too large", "less than", "lt"),
}


def readable(detail: Mapping[str, Any], info: FieldInfo) -> str:
    """Return one line for one of pydantic's errors on the key `info`."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "missing":
        return "required, and not given" if isinstance(detail["loc"][-1], str) else "the list is too short"
    if kind == "literal_error":
        allowed = allowed_values(info.annotation)
        hint = _nearest(str(value), map(str, allowed))
        return f"{show(value)} is not {one_of(allowed)}" + (f"; did you mean {hint}?" if hint else "")
    if kind in _BOUNDS:
        wrong, bound, name = _BOUNDS[kind]
        return f"{show(value)} is {wrong}; it must be {bound} {context[name]:g}"
    if kind == "value_error":
        return f"{show(value)} is {context['error']}"
    if kind in ("string_too_short", "string_pattern_mismatch"):
        return f"{show(value)} is not a usable name" if value else "must not be empty"
    if kind == "too_long":
        return f"the list has {context['actual_length']} items; it must have {context['max_length']}"
    # Pydantic's other kinds begin with the type that was wanted: int_parsing, float_type, bool_parsing.
    wanted = _WANTED.get(kind.split("_")[0])
    return f"{show(value)} is not {wanted}" if wanted else f"{show(value)}: {detail['msg']}"


def one_of(values: Iterable[Any]) -> str:
    """Return "a", "a or b", or "one of a, b, c"."""
    words = [str(value) for value in values]
    return " or ".join(words) if len(words) < 3 else "one of " + ", ".join(words)


def _nearest(word: str, words: Iterable[str]) -> str:
    """Return the words most like `word`, as "a or b"; "": none is like it."""
    by_lower = {item.lower(): item for item in words}
    near = difflib.get_close_matches(word.lower(), by_lower, n=2, cutoff=0.7)
    if not near and len(word) <= _SHORT_WORD:
        near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)  # "rl" and "lr" are half alike
    return " or ".join(by_lower[match] for match in near)


def allowed_values(annotation: Any) -> list[Any]:
    """Return the values of a Literal type, also in a union; empty for other types."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return [value for part in get_args(annotation) for value in allowed_values(part)]
    return []


def _unknown(key: str, known: Mapping[str, object], section: str) -> str:
    message = "unknown key"
    settable = [name for name, entry in known.items() if not isinstance(entry, Derived | Secret | Renamed)]
    if near := _nearest(key, settable):
        message += f"; did you mean {near}?"
    # Mostly the key is right and the section is wrong.
    if places := [place for place in _sections_with(Config).get(key, ()) if place != section]:
        places.sort(key=lambda place: place.count("."))  # the likeliest first
        message += f"; {key} is a key of {', '.join(places[:3])}" + (", ..." if len(places) > 3 else "")
    if not near and not places:
        message += "; rftdask schema lists all keys, rftdask import translates those of TRL, verl and Trinity-RFT"
    return message


def _not_available(value: Any, feature: str, instead: str) -> str:
    return f"{show(value)} is not available in this release ({feature}); {instead}"
