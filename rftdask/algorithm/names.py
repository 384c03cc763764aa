"""Choose a part of an algorithm by its name and build it with its arguments.

Knows nothing of algorithms: a table is a plain dict from name to frozen dataclass, the arguments are that class's
fields. Invariant: a wrong name or argument raises ValueError here, before anything starts; nothing is ever ignored.
"""

import dataclasses
import difflib
import warnings
from collections.abc import Mapping
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

Part = TypeVar("Part")

_warned: set[tuple[str, str]] = set()


def resolve(kind: str, name: str, valid: Mapping[str, object], deprecated: Mapping[str, str] | None = None) -> str:
    """The name to look up in `valid`; a deprecated twin gives the name it duplicates and one warning per process.

    Raises: ValueError: unknown name; the message lists near matches, then every valid name.
    """
    if deprecated and name in deprecated:
        _warn_once(f"{kind} {name!r}", f"is deprecated: it is {deprecated[name]!r}")
        return deprecated[name]
    if isinstance(name, str) and name in valid:
        return name
    near = difflib.get_close_matches(str(name), valid, n=3)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise ValueError(f"unknown {kind} {name!r}.{hint} Valid names: {', '.join(sorted(valid))}")


def build(
    kind: str,
    name: str,
    table: Mapping[str, type[Part]],
    args: Mapping[str, Any] | None,
    deprecated: Mapping[str, str] | None = None,
) -> Part:
    """One part: `table[name](**args)`. Arguments left out keep the class's defaults.

    Raises: ValueError: unknown name, an argument the part does not take, a value of the wrong type or out of range.
    """
    cls = table[resolve(kind, name, table, deprecated)]
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    given = dict(args or {})
    for key in sorted(set(given) & set(getattr(cls, "ignored_args", ()))):
        _warn_once(
            f"{kind} {name!r}", f"argument {key!r} is ignored: the whole batch is known here, nothing is rescaled"
        )
        del given[key]
    unknown = sorted(set(given) - set(fields))
    if unknown:
        takes = ", ".join(fields) or "no arguments"
        near = [match for key in unknown for match in difflib.get_close_matches(key, fields, n=1)]
        hint = f" Did you mean {', '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"{kind} {name!r} does not take {', '.join(map(repr, unknown))}.{hint} It takes: {takes}")
    checked = {key: _checked(f"{kind} {name!r} argument {key!r}", value, fields[key]) for key, value in given.items()}
    try:
        return cls(**checked)
    except ValueError as error:
        raise ValueError(f"{kind} {name!r}: {error}") from error


def _warn_once(what: str, message: str) -> None:
    if (what, message) not in _warned:
        _warned.add((what, message))
        warnings.warn(f"{what} {message}", FutureWarning, stacklevel=4)


def _checked(where: str, value: Any, field: dataclasses.Field[Any]) -> Any:
    """`value` if it has one of the field's types; an int where a float is meant becomes one."""
    kinds = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
    allowed = [get_origin(kind) or kind for kind in kinds]
    if type(value) is int and float in allowed and int not in allowed:
        return float(value)
    if type(value) not in allowed:
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
        raise ValueError(f"{where} is {value!r}; expected {names}")
    return value


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition`; for the checks in the parts' constructors."""
    if not condition:
        raise ValueError(message)


def one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    require(value in allowed, f"{field} is {value!r}; allowed: {', '.join(allowed)}")
