"""Typed messages between two processes: frozen dataclasses, encoded by msgspec as a pair of plain values, which any
channel can carry.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec

Message = TypeVar("Message")


def plain_value(value: Any) -> Any:
    """The value as its built-in base type, such as a float for a numpy.float64. Raises: TypeError: it has none."""
    kinds: tuple[type[Any], ...] = (int, float, str, dict, list, tuple)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a message cannot contain {type(value).__name__}")


@cache  # made for the first message, since types of fields may be defined after the codec
def _decoder(kind: Any) -> Any:
    return msgspec.msgpack.Decoder(kind)


class Codec(Generic[Message]):
    """Encoder and decoder of a channel for messages of the classes `kinds`."""

    def __init__(self, *kinds: type[Message], enc_hook: Callable[[Any], Any] = plain_value) -> None:
        """enc_hook: converts values of types that msgspec does not know."""
        self._kinds: dict[str, Any] = {kind.__name__: kind for kind in kinds}
        self._enc_hook = enc_hook

    def encode(self, message: Message) -> list[Any]:
        """Name of the class, and its fields in msgpack."""
        return [type(message).__name__, msgspec.msgpack.encode(message, enc_hook=self._enc_hook)]

    def decode(self, encoded: Any) -> Message:
        """The message that was encoded. Raises: ValueError: not a message of this channel."""
        # Checked, because the sender may run foreign code.
        match encoded:
            case [str(name), bytes(fields)] if name in self._kinds:
                try:
                    message: Message = _decoder(self._kinds[name]).decode(fields)
                    return message
                except msgspec.MsgspecError as error:
                    raise ValueError(f"not the fields of {name}: {error}") from error
        raise ValueError(f"not one of the messages {', '.join(self._kinds)}: {encoded!r:.100}")
