"""Compares a tree with the schema, key by key: unknown keys, the marks of known ones, then types and ranges.

Knows no key by name. Invariant: every mistake becomes one (path, message), none hides another, and no message shows a
secret. What is wrong is taken out of the tree, so that the rest can still be checked.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rftdask.config.base import Aliases, Filled, Later, Mark, Named, Section, child_of, marks_of, takes_none
from rftdask.config.error_text import allowed_values, nearest, one_of, readable, show
from rftdask.config.plugins import find_part, what_instead
from rftdask.config.schema.run import Config
from rftdask.config.schema.walk import field_at, is_completed, is_number, join, sections_with, settable_keys
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
from rftdask.config.yaml_source import Problem
from rftdask.errors import UserError
from rftdask.storage.safe_text import find_secret, is_left_to_environment, is_secret_name

MarkType = TypeVar("MarkType", bound=Mark)

_NO_KEY = ("", "EMPTY", False)
_NO_SECRETS = "does not belong in a configuration, which is written beside the run"
_DERIVED = "derived, cannot be set"


class Checker:
    """Checks one tree. Usage: `validate(clean(tree))`, then look at `problems` and `warnings`.

    has_secrets: they are not looked for: the tree is what an older start wrote down.
    """

    def __init__(self, *, has_secrets: bool = False) -> None:
        self.has_secrets = has_secrets
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []
        self.plugin_dirs: list[str] = []

    def clean(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of `tree` with old names replaced, and without what was reported."""
        explorer = tree.get("explorer")
        folders = explorer.get("plugin_dirs") if isinstance(explorer, Mapping) else None
        self.plugin_dirs = [str(folder) for folder in folders] if isinstance(folders, list | tuple) else []
        return self._section(Config, tree, "")

    def validate(self, tree: dict[str, Any]) -> Config:
        """The tree as a section. Wrong values are reported and taken out of `tree`; a required key gets a stand-in."""
        while True:  # every round takes at least one key out of the tree, or puts a missing one in
            try:
                return Config.model_validate(tree)
            except ValidationError as error:
                for detail in error.errors(include_url=False):
                    self._report(tree, detail)

    def _report(self, tree: dict[str, Any], detail: Any) -> None:
        loc, info = field_at(Config, detail["loc"])
        missing = detail["type"] == "missing"
        path = join(loc if missing else detail["loc"])
        whole_section = missing and child_of(info)  # its required keys are reported in its place
        if not whole_section and not any(path == known for known, _ in self.problems):
            self.problems.append((path, readable(detail, info)))
        # What is wrong leaves the tree, so that the next round finds the next mistake.
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
            # A key is a field, or one of the reference system of which something is told, or derived, or unknown.
            info, told = cls.model_fields.get(key), others.get(key)
            if info is None and isinstance(told, Renamed):
                if tree.get(told.to) not in (None, value):
                    self.problems.append((where, f"an old name of {told.to}, which is given as well; leave it out"))
                elif value is not None:
                    self.warnings.append((where, f"old name of {told.to}"))
                    result.update(self._key(cls.model_fields[told.to], told.to, value, where))
            elif info is not None:
                result.update(self._key(info, key, value, where))
            elif told is not None:
                self._tell(told, value, where)
            elif isinstance(getattr(cls, str(key), None), property):
                self.problems.append((where, _DERIVED))
            else:
                self.problems.append((where, self._unknown(str(key), {**cls.model_fields, **others}, path)))
        return result

    def _tell(self, told: ReferenceKey, value: Any, path: str) -> None:
        """Tell of a key that no field stands for, and is left out."""
        if value is None:  # as if the key were not there
            return
        if isinstance(told, Mapping):
            if not isinstance(value, Mapping):
                self.problems.append((path, f"{show(value)} is not a section (key: value lines)"))
                return
            for key, item in value.items():
                if key in told:
                    self._tell(told[key], item, f"{path}.{key}")
                else:
                    self.problems.append((f"{path}.{key}", self._unknown(str(key), told, path)))
        elif isinstance(told, Derived):
            self.problems.append((path, _DERIVED))
        elif isinstance(told, Secret):
            if value not in _NO_KEY:
                self.problems.append((path, f"a secret {_NO_SECRETS}: {told.instead}"))
        elif isinstance(told, Missing):
            # A file written for the reference lists such keys with their defaults, which asks for nothing.
            if value != told.default and value not in told.allowed:
                instead = f"leave it out or set {show(told.default)}"
                self.problems.append((path, _not_available(value, told.feature, instead)))
        elif isinstance(told, Ignored) and value != told.default:
            self.warnings.append((path, f"ignored: {told.reason}"))
            self._plain(value, path)

    def _key(self, info: FieldInfo, key: str, value: Any, path: str) -> Iterator[tuple[str, Any]]:
        """The (key, value) to keep for one key of the tree, or nothing."""
        child = child_of(info)
        filled = _mark(info, Filled)
        # null where null is no value of its own means "as if the key were not there".
        if value is None and (filled or not takes_none(info)):
            return
        # Files of the reference system write 0 for "as usual" at such keys.
        if filled and filled.zero and value == 0:
            return
        if child and child[0] == "section" and isinstance(value, Mapping):
            yield key, self._section(child[1], value, path)
            return
        aliases = _mark(info, Aliases)
        if aliases and isinstance(value, str) and value in aliases.values:
            self.warnings.append((path, f"{value} is taken as {aliases.values[value]}: {aliases.reason}"))
            value = aliases.values[value]
        message = self._refusal(info, value)
        if message:
            self.problems.append((path, message))
            return
        if child and child[0] == "list" and isinstance(value, list):
            # What is no section here is told of by `validate`.
            value = [
                self._section(child[1], item, f"{path}[{index}]") if isinstance(item, Mapping) else item
                for index, item in enumerate(value)
            ]
        elif child and child[0] == "dict" and isinstance(value, Mapping):
            value = {
                name: self._section(child[1], item, f"{path}.{name}") if isinstance(item, Mapping) else item
                for name, item in value.items()
            }
        else:
            value = self._plain(value, path)
        yield key, value

    def _refusal(self, info: FieldInfo, value: Any) -> str:
        """Why the value of a key cannot be taken, or an empty text. A plug-in is imported only where checks need it."""
        later, named = _mark(info, Later), _mark(info, Named)
        # What will be there some day is told before what is merely unknown.
        if later and value in later.values:
            known = sorted(named.registered()) if named else allowed_values(info.annotation)
            return _not_available(value, later.feature, f"use {one_of(known)}")
        if named and isinstance(value, str):
            registered, may_be_plugin = named.registered(), "." in value or bool(self.plugin_dirs)
            if value in registered or (may_be_plugin and not named.needed):
                return ""
            if (told := REFERENCE_NAMES.get(named.kind, {}).get(value)) and not may_be_plugin:
                return f"{show(value)} of Trinity-RFT is not here: {told}"
            if not may_be_plugin:
                return f"{show(value)} is no {named.kind}; {what_instead(value, registered)}"
            try:
                find_part(named.kind, value, registered, self.plugin_dirs)
            except UserError as error:
                return str(error)
        if isinstance(value, bool) and is_number(info):
            return f"{show(value)} is not a number"
        return ""

    def _plain(self, value: Any, path: str, name: str = "") -> Any:
        """Reports secrets in a value, found by what they look like or by their `name` in a dict whose keys are not
        ours; leaves them out. And texts with a NUL."""
        if isinstance(value, list):
            return [self._plain(item, f"{path}[{index}]", name) for index, item in enumerate(value)]
        if isinstance(value, Mapping):
            items = {key: self._plain(item, f"{path}.{key}", str(key)) for key, item in value.items()}
            return {key: item for key, item in items.items() if item is not None or value[key] is None}
        if isinstance(value, str) and "\0" in value:
            self.problems.append(
                (path, f"{show(value)} holds the character NUL, which no file name and no message can")
            )
            return None
        if self.has_secrets:
            return value
        # A secret is known by its looks, or by the name of its key in a dict of somebody else's. What is left to the
        # environment is none: only its name stands here.
        is_kept = isinstance(value, str) and is_left_to_environment(value)
        what = find_secret(value) if isinstance(value, str) else ""
        if not what and is_secret_name(name) and isinstance(value, str | int) and value not in _NO_KEY and not is_kept:
            what = "a secret"
        if not what:
            return value
        instead = (
            "put it into an environment variable and write ${oc.env:NAME} here, which is completed where it is used"
            if is_completed(Config, path)
            else "leave it in the environment of the processes, or in a file that only you may read"
        )
        self.problems.append((path, f"{what} {_NO_SECRETS}: {instead}"))
        return None

    def _unknown(self, key: str, known: Mapping[str, object], section: str) -> str:
        message = "unknown key"
        near = nearest(key, settable_keys(known))
        if near:
            message += f"; did you mean {near}?"
        # Mostly the key is right and stands in the wrong section.
        places = [place for place in sections_with(Config).get(key, ()) if place != section]
        if places:
            places.sort(key=lambda place: place.count("."))  # the likeliest first
            message += f"; {key} is a key of {', '.join(places[:3])}" + (", ..." if len(places) > 3 else "")
        if not near and not places:
            message += "; rftdask schema has all keys, rftdask import translates those of TRL, verl and Trinity-RFT"
        return message


def _mark(info: FieldInfo, kind: type[MarkType]) -> MarkType | None:
    return next((mark for mark in marks_of(info) if isinstance(mark, kind)), None)


def _not_available(value: Any, feature: str, instead: str) -> str:
    return f"{show(value)} is not available in this release ({feature}); {instead}"
