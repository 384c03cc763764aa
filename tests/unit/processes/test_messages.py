"""Promises of messages between processes: what is decoded equals what was encoded, tuples and parts included, and what
is no message of the channel is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import pytest

from rftdask.processes.messages import Codec


@dataclass(frozen=True)
class Part:
    name: str
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Order:
    parts: tuple[Part, ...]
    gift: Part | None
    pairs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    options: Mapping[str, Any] | None = None
    places: tuple[Part | None, ...] = ()


@dataclass(frozen=True)
class Cancel:
    number: int


CODEC: Codec[Order | Cancel] = Codec(Order, Cancel)


@pytest.mark.parametrize(
    "message",
    [
        Cancel(3),
        Order((), None),
        Order((Part("a", (1, 2)), Part("b")), Part("c", (7,)), pairs=(((1,), (2, 3)),), options={"a": [1]}),
        Order((), None, places=(None, Part("a"), None)),
    ],
)
def test_what_is_decoded_equals_what_was_encoded(message: Order | Cancel) -> None:
    assert CODEC.decode(msgpack.unpackb(msgpack.packb(CODEC.encode(message)))) == message


@pytest.mark.parametrize(
    "plain", [None, [], {"a": 1}, ["Part", "a", []], ["Cancel"], ["Cancel", 1, 2], ["Order", 1, 2]]
)
def test_what_is_no_message_of_the_channel_is_refused(plain: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        CODEC.decode(plain)
