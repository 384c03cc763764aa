"""JSON objects with a checksum: field "crc32" is the checksum of the other fields.

Without it, a flipped bit could turn one digit into another without anybody noticing. This module knows no schema.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

from rftdask.storage.safe_text import encodable

_KEY = "crc32"
MAX_DEPTH = 100
"""Deepest nesting of `parse_portable`. Templates and encoders take several frames per level."""
_MAX_INTEGER_BITS = 1023
"""Bits of the largest integers that float64 can hold."""


def dump_checked(tree: Mapping[str, Any], indent: int | None = None) -> bytes:
    return json.dumps({**tree, _KEY: _checksum(tree)}, sort_keys=True, indent=indent).encode()


def parse_json(data: bytes | str) -> Any:
    """Parse untrusted JSON. Raises: ValueError: invalid JSON, or nested deeper than Python's recursion limit."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_portable(data: bytes | str) -> Any:
    """Parse untrusted JSON that later becomes text, rows or JSON again.

    Raises: ValueError: as `parse_json`; nested deeper than MAX_DEPTH; text invalid in UTF-8; a number that float64
    cannot hold.
    """
    tree = parse_json(data)
    parts = [(tree, 1)]
    while parts:
        part, depth = parts.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        if isinstance(part, dict):
            parts += ((item, depth + 1) for pair in part.items() for item in pair)
        elif isinstance(part, list):
            parts += ((item, depth + 1) for item in part)
        elif isinstance(part, str):
            if not part.isascii() and encodable(part) != part:
                raise ValueError(f"it contains {part!r:.60}, which is not text in UTF-8")
        elif (isinstance(part, float) and not math.isfinite(part)) or (
            isinstance(part, int) and part.bit_length() > _MAX_INTEGER_BITS
        ):
            raise ValueError(f"it contains {part!r:.60}, which is not a number of float64")
    return tree


def parse_object(data: bytes | str) -> dict[str, Any]:
    """Parse an untrusted JSON object. Raises: ValueError: as `parse_json`, or not an object."""
    tree = parse_json(data)
    if not isinstance(tree, dict):
        raise ValueError(f"expected a JSON object, got {data[:20]!r}")
    return tree


def load_checked(data: bytes) -> dict[str, Any]:
    """Return the object without its checksum. An object without a checksum, by an earlier version, is accepted.

    Raises: ValueError: as `parse_object`, or the checksum does not match.
    """
    tree = parse_object(data)
    checksum = tree.pop(_KEY, None)
    if checksum is not None and checksum != _checksum(tree):
        raise ValueError(f"its content has the checksum {_checksum(tree)}, but it records {checksum}")
    return tree


def _checksum(tree: Mapping[str, Any]) -> str:
    # Of the content, not of the bytes: indentation and the order of keys may change.
    return f"{zlib.crc32(json.dumps(tree, sort_keys=True).encode()):08x}"
