"""Ways through a schema of sections: every key, the key at a place, where a name is used. Knows no key."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from rftdask.config.base import Completed, Section, child_of, marks_of
from rftdask.config.trinity.reference_keys import Derived, ReferenceKey, Renamed, Secret, reference_keys

Location = tuple[str | int, ...]
"""Keys and list positions from the top, for example ("buffer", "tasksets", 0, "path")."""


def join(loc: Location) -> str:
    """("tasksets", 0, "path") -> "tasksets[0].path"."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def walk(schema: type[Section], path: str = "") -> Iterator[tuple[str, FieldInfo | ReferenceKey]]:
    """Every key below `schema` with its dotted path, sections before their keys; those in a list as name[].key.

    A key without a field comes with its entry of `REFERENCE_KEYS`.
    """
    for key, info in schema.model_fields.items():
        where = f"{path}.{key}" if path else key
        yield where, info
        child = child_of(info)
        if child:
            yield from walk(child[1], where + {"section": "", "list": "[]", "dict": ".<name>"}[child[0]])
    own = {key: told for key, told in reference_keys(schema).items() if key not in schema.model_fields}
    yield from _walk_reference(own, path)


def _walk_reference(keys: Mapping[str, ReferenceKey], path: str) -> Iterator[tuple[str, ReferenceKey]]:
    for key, told in keys.items():
        where = f"{path}.{key}" if path else key
        yield where, told
        if isinstance(told, Mapping):
            yield from _walk_reference(told, where)


def field_at(schema: type[Section], loc: Location) -> tuple[Location, FieldInfo]:
    """The deepest key of the schema on the way along `loc`, and its location."""
    found: tuple[Location, FieldInfo] | None = None
    cls: type[Section] | None = schema
    for depth, part in enumerate(loc):
        # Below a key that holds no section.
        if cls is None:
            break
        if isinstance(part, str) and part in cls.model_fields:
            info = cls.model_fields[part]
            found = loc[: depth + 1], info
            child = child_of(info)
            cls = child[1] if child else None
    assert found is not None, loc
    return found


def is_users(schema: type[Section], path: str) -> bool:
    """Whether the value at a path is somebody else's: an argument of a workflow, a reward, a loss, a tracker."""
    return _key_at(schema, path, lambda info: any(get_origin(kind) is dict for kind in _types(info.annotation)))


def is_completed(schema: type[Section], path: str) -> bool:
    """Whether the text at a path is completed from the environment where it is used: an argument, or a key marked
    `Completed`."""
    return is_users(schema, path) or _key_at(
        schema, path, lambda info: any(isinstance(mark, Completed) for mark in marks_of(info))
    )


def _key_at(schema: type[Section], path: str, holds: Callable[[FieldInfo], bool]) -> bool:
    # A stage has parts of the other sections.
    loc = tuple(re.findall(r"[^.\[\]]+", re.sub(r"^stages\[\d+\]\.", "", path)))
    return bool(loc) and loc[0] in schema.model_fields and holds(field_at(schema, loc)[1])


def settable_keys(keys: Mapping[str, object]) -> list[str]:
    """Those of a section's keys, with what is told of them, that are the user's."""
    return [key for key, told in keys.items() if not isinstance(told, Derived | Secret | Renamed)]


@cache
def sections_with(schema: type[Section]) -> dict[str, list[str]]:
    """Key name -> paths of the sections that have it."""
    index: dict[str, list[str]] = {}
    for path, told in walk(schema):
        section, _, key = path.rpartition(".")
        if not isinstance(told, Derived):
            index.setdefault(key, []).append(section or "the top level")
    return index


def is_number(info: FieldInfo) -> bool:
    """Whether a key holds an int or float (YAML's true is neither)."""
    types = set(_types(info.annotation))
    return bool(types & {int, float}) and bool not in types


def _types(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _types(part)
    elif get_origin(annotation) in (Annotated, tuple):
        yield from _types(get_args(annotation)[0])
    else:
        yield annotation
