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
from types import UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

Message = TypeVar("Message")
_FLAT = (int, float, str, bytes)
"""Of a sequence that begins with one all items are."""


class Codec(Generic[Message]):
    """The one encode/decode pair of a channel whose messages are of the classes `kinds`."""

    def __init__(self, *kinds: type[Message]) -> None:
        self._kinds: dict[str, Any] = {kind.__name__: kind for kind in kinds}

    def encode(self, message: Message) -> list[Any]:
        """The class's name and the values of its fields, in their order."""
        return [type(message).__name__, *_to_plain(message)]

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


def _to_plain(value: Any) -> Any:
    kind = type(value)
    if kind in _FLAT or value is None:  # most are
        return value
    # Of token ids there may be thousands: they are not looked at one by one.
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value] if value and not isinstance(value[0], _FLAT) else value
    return [_to_plain(getattr(value, name)) for name in _hints(kind)] if is_dataclass(kind) else value


@functools.cache
def _reader(hint: Any) -> Callable[[Any], Any] | None:
    """What makes a value of this type of a plain one; None: it is one. Made once for each type, since a message may
    hold a thousand of it."""
    arguments = get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        readers = [_reader(each) for each in _hints(hint).values()]

        def read_fields(plain: Any) -> Any:
            # By number: both ends are of one version, so the fields are the same.
            if not isinstance(plain, list | tuple) or len(plain) != len(readers):
                raise ValueError(f"not the fields of {hint.__name__}: {plain!r:.100}")
            return hint(*[v if read is None else read(v) for read, v in zip(readers, plain, strict=True)])

        return read_fields
    if get_origin(hint) in (Union, UnionType) and len(arguments) == 2 and type(None) in arguments:
        read_some = _reader(next(kind for kind in arguments if kind is not type(None)))
        return None if read_some is None else lambda plain: None if plain is None else read_some(plain)
    if get_origin(hint) in (tuple, Sequence) and arguments:
        # Token ids and logprobs come in thousands: items that need no conversion are taken as they are.
        read_item = _reader(arguments[0])
        return tuple if read_item is None else lambda plain: tuple(map(read_item, plain))
    return None
