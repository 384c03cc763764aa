"""Compares a tree with the schema, key by key: unknown keys, the marks of known ones, then types and ranges.

Knows no key by name. Invariant: every mistake becomes one (path, message), none hides another, and no message shows a
secret. What is wrong is taken out of the tree, so that the rest can still be checked.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rftdask.config.base import (
    Aliases,
    Derived,
    Filled,
    Ignored,
    Later,
    Mark,
    Named,
    Renamed,
    Secret,
    Section,
    child_of,
    default_of,
    marks_of,
    plain,
)
from rftdask.config.error_text import allowed_values, nearest, one_of, readable, show
from rftdask.config.plugins import find_part, what_instead
from rftdask.config.schema.walk import field_at, is_number, join, sections_with, settable_keys
from rftdask.config.yaml_source import Problem
from rftdask.errors import UserError

Schema = TypeVar("Schema", bound=Section)
MarkType = TypeVar("MarkType", bound=Mark)

_SECRET_NAME = re.compile(r"api_?key|passw|secret|credential|(^|_)(auth|access|bearer|api|hf)_?token$", re.IGNORECASE)
_NO_KEY = ("", "EMPTY", False)
_NO_SECRETS = "a secret does not belong in a configuration"


class Checker(Generic[Schema]):
    """Checks one tree. Usage: `validate(clean(tree))`, then look at `problems` and `warnings`."""

    def __init__(self, schema: type[Schema]) -> None:
        self.schema = schema
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []
        self.plugin_dirs: list[str] = []

    def clean(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of `tree` with old names replaced, and without what was reported."""
        explorer = tree.get("explorer")
        folders = explorer.get("plugin_dirs") if isinstance(explorer, Mapping) else None
        self.plugin_dirs = [str(folder) for folder in folders] if isinstance(folders, list | tuple) else []
        return self._section(self.schema, tree, "", None)

    def validate(self, tree: dict[str, Any]) -> Schema:
        """The tree as a section. Wrong values are reported and taken out of `tree`; a required key gets a stand-in."""
        while True:  # every round takes at least one key out of the tree, or puts a missing one in
            try:
                return self.schema.model_validate(tree)
            except ValidationError as error:
                for detail in error.errors(include_url=False):
                    self._report(tree, detail)

    def _report(self, tree: dict[str, Any], detail: Any) -> None:
        loc, info = field_at(self.schema, detail["loc"])
        missing = detail["type"] == "missing"
        path = join(loc if missing else detail["loc"])
        whole_section = missing and child_of(info)  # its required keys are reported in its place
        if not whole_section and not any(path == known for known, _ in self.problems):
            self.problems.append((path, readable(detail, info)))
        node: Any = tree
        for part in loc[:-1]:
            node = node[part]
        node.pop(loc[-1], None)
        if info.is_required():
            node[loc[-1]] = {} if child_of(info) else "stand-in"

    def _section(
        self, cls: type[Section], tree: Mapping[str, Any], path: str, inherited: Later | None
    ) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in tree.items():
            where = f"{path}.{key}" if path else str(key)
            info = cls.model_fields.get(key)
            if info is None:
                self.problems.append((where, self._unknown(cls, str(key), path)))
                continue
            renamed = _mark(info, Renamed)
            if renamed and tree.get(renamed.to) not in (None, value):
                self.problems.append((where, f"an old name of {renamed.to}, which is given as well; leave it out"))
                continue
            if renamed and value is not None:
                self.warnings.append((where, f"old name of {renamed.to}"))
                key, info = renamed.to, cls.model_fields[renamed.to]
            result.update(self._key(info, str(key), value, where, inherited))
        return result

    def _key(
        self, info: FieldInfo, key: str, value: Any, path: str, inherited: Later | None
    ) -> Iterator[tuple[str, Any]]:
        """The (key, value) to keep for one key of the tree, or nothing."""
        later = _mark(info, Later) or (None if marks_of(info) else inherited)
        child = child_of(info)
        if _means_absent(info, value):
            return
        if child and child[0] == "section" and isinstance(value, Mapping):
            yield key, self._section(child[1], value, path, later)
            return
        value = self._new_value(info, value, path)
        message = self._refusal(info, later, value)
        if message:
            self.problems.append((path, message))
            return
        if _mark(info, Ignored) and value != plain(default_of(info)):
            self.warnings.append((path, f"ignored: {_mark(info, Ignored).reason}"))  # type: ignore[union-attr]
        if child and child[0] == "list" and isinstance(value, list):
            value = [self._item(child[1], item, f"{path}[{index}]") for index, item in enumerate(value)]
        elif child and child[0] == "dict" and isinstance(value, Mapping):
            value = {name: self._item(child[1], item, f"{path}.{name}") for name, item in value.items()}
        else:
            value = self._without_secrets(value, path)
        yield key, value

    def _item(self, cls: type[Section], item: Any, path: str) -> Any:
        return self._section(cls, item, path, None) if isinstance(item, Mapping) else item

    def _new_value(self, info: FieldInfo, value: Any, path: str) -> Any:
        aliases = _mark(info, Aliases)
        if not aliases or not isinstance(value, str) or value not in aliases.values:
            return value
        new = aliases.values[value]
        self.warnings.append((path, f"{value} is taken as {new}: {aliases.reason}"))
        return new

    def _refusal(self, info: FieldInfo, later: Later | None, value: Any) -> str:
        """Why the value of a key cannot be taken, or an empty text."""
        default = plain(default_of(info))
        secret = _mark(info, Secret)
        if _mark(info, Derived):
            return "derived, cannot be set"
        if secret:
            return f"{_NO_SECRETS}: {secret.instead}"
        if later and later.refuses(value, default):
            allowed = _known_values(info) if later.values else []
            instead = f"use {one_of(allowed)}" if allowed else f"leave it out or set {show(default)}"
            return f"{show(value)} is not available in this release ({later.feature}); {instead}"
        named = _mark(info, Named)
        if named and isinstance(value, str):
            return self._unknown_part(named, value)
        if isinstance(value, bool) and is_number(info):
            return f"{show(value)} is not a number"
        return ""

    def _unknown_part(self, named: Named, name: str) -> str:
        """Why `name` names no part, or an empty text. Plug-ins that the checks do not need are not imported here."""
        registered = named.registered()
        if name in registered or (not named.needed and ("." in name or self.plugin_dirs)):
            return ""
        if "." not in name and not self.plugin_dirs:
            return f"{show(name)} is no {named.kind}; {what_instead(name, registered)}"
        try:
            find_part(named.kind, name, registered, self.plugin_dirs)
        except UserError as error:
            return str(error)
        return ""

    def _without_secrets(self, value: Any, path: str) -> Any:
        """Reports secrets in the dicts whose keys are not ours, and leaves them out."""
        if isinstance(value, list):
            return [self._without_secrets(item, f"{path}[{index}]") for index, item in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        result = {}
        for key, item in value.items():
            where = f"{path}.{key}"
            named_so = _SECRET_NAME.search(key) and not key.endswith("_env")
            if named_so and isinstance(item, str | int) and item not in _NO_KEY:
                self.problems.append((where, f"{_NO_SECRETS}: set it in the environment of the processes"))
            else:
                result[key] = self._without_secrets(item, where)
        return result

    def _unknown(self, cls: type[Section], key: str, section: str) -> str:
        if isinstance(getattr(cls, key, None), property):
            return "derived, cannot be set"
        message = "unknown key"
        near = nearest(key, settable_keys(cls))
        if near:
            message += f"; did you mean {near}?"
        places = [place for place in sections_with(self.schema).get(key, ()) if place != section]
        if places:
            message += f"; {key} is a key of {', '.join(places[:3])}" + (", ..." if len(places) > 3 else "")
        return message


def _mark(info: FieldInfo, kind: type[MarkType]) -> MarkType | None:
    return next((mark for mark in marks_of(info) if isinstance(mark, kind)), None)


def _known_values(info: FieldInfo) -> list[Any]:
    """The values of a Literal, or the registered names of a part; empty for other keys."""
    named = _mark(info, Named)
    return sorted(named.registered()) if named else allowed_values(info.annotation)


def _means_absent(info: FieldInfo, value: Any) -> bool:
    """Whether the value says "as if the key were not there": null where null is no value of its own, and its like."""
    filled, secret = _mark(info, Filled), _mark(info, Secret)
    if value is None:
        return bool(filled or secret or _mark(info, Derived) or info.is_required() or default_of(info) is not None)
    return bool(filled and filled.zero and value == 0) or bool(secret and value in _NO_KEY)
