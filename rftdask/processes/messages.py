"""Messages between two processes: frozen dataclasses at both ends, plain values that msgpack carries between them.

    CODEC: Codec[Load | Loaded] = Codec(Load, Loaded)
    CODEC.encode(Load(7, ("a.safetensors",))) == ["Load", 7, ("a.safetensors",)]
    CODEC.decode(["Load", 7, ["a.safetensors"]]) == Load(7, ("a.safetensors",))

A field may hold a dataclass of its own, None in place of one, or a tuple of them; its type says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

Message = TypeVar("Message")
_Convert = Callable[[Any], Any]


class Codec(Generic[Message]):
    """The one encode/decode pair of a channel whose messages are of the classes `kinds`."""

    def __init__(self, *kinds: type[Message]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._ways: dict[type, tuple[_Convert, _Convert]] = {}
        """encode and decode of each class, made when it is first needed: its types may be defined after the codec."""

    def encode(self, message: Message) -> list[Any]:
        """The class's name and the values of its fields, in their order."""
        encode, _ = self._way_of(type(message))
        return [type(message).__name__, *encode(message)]

    def decode(self, plain: Any) -> Message:
        """What `encode` was given. Raises: ValueError, TypeError: no such class, or not its fields."""
        if not isinstance(plain, list | tuple) or not plain or plain[0] not in self._kinds:
            raise ValueError(f"not one of the messages {', '.join(self._kinds)}: {plain!r:.100}")
        _, decode = self._way_of(self._kinds[plain[0]])
        message: Message = decode(plain[1:])
        return message

    def _way_of(self, kind: type) -> tuple[_Convert, _Convert]:
        if kind in self._ways:
            return self._ways[kind]
        hints = get_type_hints(kind)
        names = [field.name for field in fields(kind)]
        ways = [self._way_of_type(hints[name]) for name in names]
        pairs = [(name, encode) for name, (encode, _) in zip(names, ways, strict=True)]

        def encode_one(value: Any) -> list[Any]:
            return [encode(getattr(value, name)) for name, encode in pairs]

        def decode_one(plain: Any) -> Any:
            if not isinstance(plain, list | tuple) or len(plain) != len(ways):
                raise ValueError(f"not the fields of {kind.__name__}: {plain!r:.100}")
            return kind(*(decode(value) for (_, decode), value in zip(ways, plain, strict=True)))

        self._ways[kind] = encode_one, decode_one
        return self._ways[kind]

    def _way_of_type(self, hint: Any) -> tuple[_Convert, _Convert]:
        if is_dataclass(hint) and isinstance(hint, type):
            return self._way_of(hint)
        arguments = get_args(hint)
        if get_origin(hint) in (Union, UnionType) and len(arguments) == 2 and type(None) in arguments:
            encode, decode = self._way_of_type(next(kind for kind in arguments if kind is not type(None)))
            return (
                lambda value: None if value is None else encode(value),
                lambda plain: None if plain is None else decode(plain),
            )
        if get_origin(hint) in (tuple, Sequence) and arguments:
            encode, decode = self._way_of_type(arguments[0])
            if (encode, decode) == (_same, _same):
                return _same, tuple  # of token ids there may be thousands: they are not looked at one by one
            return (
                lambda values: [encode(value) for value in values],
                lambda plain: tuple(decode(value) for value in plain),
            )
        return _same, _same


def _same(value: Any) -> Any:
    return value
