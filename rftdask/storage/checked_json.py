"""JSON objects with a checksum: field "crc32" is the checksum of the other fields.

Without it, a flipped bit could turn one digit into another without anybody noticing. This module knows no schema.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

_KEY = "crc32"


def dump_checked(tree: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Return `tree` as JSON with its checksum."""
    return json.dumps({**tree, _KEY: _checksum(tree)}, sort_keys=True, indent=indent).encode()


def parse_json(data: bytes | str) -> Any:
    """Parse untrusted JSON. Raises: ValueError: invalid JSON, or nested deeper than Python's recursion limit."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


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
