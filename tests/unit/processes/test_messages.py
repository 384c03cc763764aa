"""Promises of messages between processes: decoding restores a message, and a foreign message is refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
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
def test_decoding_restores_the_message(message: Order | Cancel) -> None:
    assert CODEC.decode(msgpack.unpackb(msgpack.packb(CODEC.encode(message)))) == message


def test_numpy_scalars_arrive_as_numbers() -> None:
    message = Order((), None, options={"loss": np.float64(0.5), "names": [np.str_("a")]})
    assert CODEC.decode(CODEC.encode(message)) == Order((), None, options={"loss": 0.5, "names": ["a"]})
    with pytest.raises(TypeError, match="cannot contain object"):
        CODEC.encode(Order((), None, options={"a": object()}))


@pytest.mark.parametrize(
    "encoded",
    [
        None,
        [],
        {"a": 1},
        ["Part", msgpack.packb({"name": "a"})],
        ["Cancel"],
        ["Cancel", 1],
        ["Cancel", msgpack.packb({"number": "x"})],
        ["Order", msgpack.packb({"parts": []})],
        ["Order", b"?"],
    ],
)
def test_a_foreign_message_is_refused(encoded: Any) -> None:
    with pytest.raises(ValueError, match=r"not (one of the messages|the fields of)"):
        CODEC.decode(encoded)
