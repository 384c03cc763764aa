"""Messages between two processes: frozen dataclasses at both ends, plain values that msgpack carries between them.

    CODEC: Codec[Load | Loaded] = Codec(Load, Loaded)
    CODEC.encode(Load(7, ("a.safetensors",))) == ["Load", 7, ("a.safetensors",)]
    CODEC.decode(["Load", 7, ["a.safetensors"]]) == Load(7, ("a.safetensors",))

A field may hold a dataclass of its own, None in place of one, or a tuple of them; its type says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from operator import attrgetter
from types import UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

Message = TypeVar("Message")


class Codec(Generic[Message]):
    """The one encode/decode pair of a channel whose messages are of the classes `kinds`."""

    def __init__(self, *kinds: type[Message]) -> None:
        self._kinds: dict[str, Any] = {kind.__name__: kind for kind in kinds}

    def encode(self, message: Message) -> list[Any]:
        """The class's name and the values of its fields, in their order."""
        kind: Any = type(message)
        write = _writer(kind)
        assert write is not None
        return [type(message).__name__, *write(message)]

    def decode(self, plain: Any) -> Message:
        """What `encode` was given. Raises: ValueError, TypeError: no such class, or not its fields."""
        # Checked: what comes may have been written by code that is not ours.
        if not isinstance(plain, list | tuple) or not plain or plain[0] not in self._kinds:
            raise ValueError(f"not one of the messages {', '.join(self._kinds)}: {plain!r:.100}")
        read = _reader(self._kinds[plain[0]])
        assert read is not None
        message: Message = read(plain[1:])
        return message


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Name -> type of the fields of a dataclass. Asked for with its first message: types may be defined after it."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


@functools.cache
def _writer(hint: Any) -> Callable[[Any], Any] | None:
    """What makes a plain value of one of this type; None: it is one. Made once for each type, since a message may hold
    a thousand of it."""
    if isinstance(hint, type) and is_dataclass(hint):
        names, writers = [*_hints(hint)], [_writer(each) for each in _hints(hint).values()]
        if len(names) < 2:  # of which `attrgetter` gives no tuple
            return lambda value: [
                getattr(value, name) if write is None else write(getattr(value, name))
                for name, write in zip(names, writers, strict=True)
            ]
        values_of = attrgetter(*names)
        if not any(writers):
            return values_of
        return lambda value: [
            each if write is None else write(each) for write, each in zip(writers, values_of(value), strict=True)
        ]
    inner = _inner(hint)
    write_one = None if inner is None else _writer(inner)
    if write_one is None:
        return None
    if _is_optional(hint):
        return lambda value: None if value is None else write_one(value)
    return lambda value: [*map(write_one, value)]


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType) and len(get_args(hint)) == 2 and type(None) in get_args(hint)


def _inner(hint: Any) -> Any | None:
    """The type that may be None, or that of the items of a sequence; None: it is neither."""
    if _is_optional(hint):
        return next(kind for kind in get_args(hint) if kind is not type(None))
    return get_args(hint)[0] if get_origin(hint) in (tuple, Sequence) and get_args(hint) else None


@functools.cache
def _reader(hint: Any) -> Callable[[Any], Any] | None:
    """What makes a value of this type of a plain one, as `_writer` does the other way."""
    if isinstance(hint, type) and is_dataclass(hint):
        readers = [_reader(each) for each in _hints(hint).values()]

        def read_fields(plain: Any) -> Any:
            # By number: both ends are of one version, so the fields are the same.
            if not isinstance(plain, list | tuple) or len(plain) != len(readers):
                raise ValueError(f"not the fields of {hint.__name__}: {plain!r:.100}")
            return hint(*[v if read is None else read(v) for read, v in zip(readers, plain, strict=True)])

        return read_fields
    inner = _inner(hint)
    if inner is None:
        return None
    read_one = _reader(inner)
    if _is_optional(hint):
        return None if read_one is None else lambda plain: None if plain is None else read_one(plain)
    # Token ids and logprobs come in thousands: items that need no conversion are taken as they are.
    return tuple if read_one is None else lambda plain: tuple(map(read_one, plain))
