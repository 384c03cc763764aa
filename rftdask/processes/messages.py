"""Messages between two processes: frozen dataclasses at both ends, plain values that msgpack carries between them.

    CODEC: Codec[Load | Loaded] = Codec(Load, Loaded)
    CODEC.encode(Load(7, ("a.safetensors",))) == ["Load", 7, ("a.safetensors",)]
    CODEC.decode(["Load", 7, ["a.safetensors"]]) == Load(7, ("a.safetensors",))

A field may hold a dataclass of its own, None in place of one, or a tuple of them; its type says so.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

Message = TypeVar("Message")


class Codec(Generic[Message]):
    """The one encode/decode pair of a channel whose messages are of the classes `kinds`."""

    def __init__(self, *kinds: type[Message]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}

    def encode(self, message: Message) -> list[Any]:
        """The class's name and the values of its fields, in their order."""
        return [type(message).__name__, *_to_plain(message)]

    def decode(self, plain: Any) -> Message:
        """What `encode` was given. Raises: ValueError, TypeError: no such class, or not its fields."""
        # Checked: what comes may have been written by code that is not ours.
        if not isinstance(plain, list | tuple) or not plain or plain[0] not in self._kinds:
            raise ValueError(f"not one of the messages {', '.join(self._kinds)}: {plain!r:.100}")
        message: Message = _from_plain(self._kinds[plain[0]], plain[1:])
        return message


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Name -> type of the fields of a dataclass. Asked for with its first message: types may be defined after it."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _to_plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return [_to_plain(getattr(value, name)) for name in _hints(type(value))]
    # Of token ids there may be thousands: they are not looked at one by one.
    if isinstance(value, list | tuple) and value and not isinstance(value[0], int | float | str | bytes):
        return [_to_plain(item) for item in value]
    return value


def _from_plain(hint: Any, plain: Any) -> Any:
    if isinstance(hint, type) and is_dataclass(hint):
        hints = _hints(hint)
        # By number: both ends are of one version, so the fields are the same.
        if not isinstance(plain, list | tuple) or len(plain) != len(hints):
            raise ValueError(f"not the fields of {hint.__name__}: {plain!r:.100}")
        return hint(*map(_from_plain, hints.values(), plain))
    arguments = get_args(hint)
    if get_origin(hint) in (Union, UnionType) and len(arguments) == 2 and type(None) in arguments:
        return None if plain is None else _from_plain(next(k for k in arguments if k is not type(None)), plain)
    if get_origin(hint) in (tuple, Sequence) and arguments:
        # Token ids and logprobs come in thousands: items that need no conversion are taken as they are.
        is_flat = arguments[0] in (int, float, str, bool, bytes)
        return tuple(plain) if is_flat else tuple(_from_plain(arguments[0], item) for item in plain)
    return plain
