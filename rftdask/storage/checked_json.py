"""JSON that proves itself: one object whose field "crc32" is the checksum of the others.

Without it a single flipped bit can turn a digit into another digit, and nobody would ever know. It knows no schema.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

_KEY = "crc32"


def dump_checked(tree: Mapping[str, Any], indent: int | None = None) -> bytes:
    """`tree` as JSON with its checksum."""
    return json.dumps({**tree, _KEY: _checksum(tree)}, sort_keys=True, indent=indent).encode()


def parse_json(data: bytes | str) -> Any:
    """What JSON says that somebody else may have written.

    Raises: ValueError: it is no JSON, or nests deeper than Python follows.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def parse_object(data: bytes | str) -> dict[str, Any]:
    """The same of a JSON object. Raises: ValueError: it is none."""
    tree = parse_json(data)
    if not isinstance(tree, dict):
        raise ValueError(f"it holds no object but {data[:20]!r}")
    return tree


def load_checked(data: bytes) -> dict[str, Any]:
    """The object without its checksum. One without a checksum is taken as it is: an earlier version wrote it.

    Raises: ValueError: it is not JSON, no object, or not what was written.
    """
    tree = parse_object(data)
    was = tree.pop(_KEY, None)
    if was is not None and was != _checksum(tree):
        raise ValueError(f"its content has the checksum {_checksum(tree)}, and it says {was}")
    return tree


def _checksum(tree: Mapping[str, Any]) -> str:
    # Of the content, not of the bytes: indentation and the order of keys may change on the way.
    return f"{zlib.crc32(json.dumps(tree, sort_keys=True).encode()):08x}"
