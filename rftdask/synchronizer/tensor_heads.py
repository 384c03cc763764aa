"""Headers of safetensors files: the description of each tensor, and the offset of the first tensor byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from rftdask.storage.base import Data

Head: TypeAlias = tuple[dict[str, Any], int]
"""(header, offset): the header maps tensor names and "__metadata__" to their entries; the offset is in bytes."""


def head_bytes(beginning: Data) -> int:
    """Offset of the first tensor byte. beginning: at least the first 8 bytes of a file."""
    # 8 bytes with the length of the header, then the header as JSON.
    return 8 + int.from_bytes(beginning[:8], "little")


def read_head(part: Callable[[int, int], Data]) -> Head:
    """Read the header of a file. part(begin, end): returns these bytes; calls are in file order.

    Raises: ValueError: not a safetensors file.
    """
    start = head_bytes(part(0, 8))
    return json.loads(bytes(part(8, start))), start


def read_file_head(file: Path) -> Head:
    """Like `read_head`, for a local file. Raises: OSError."""
    with file.open("rb") as opened:
        return read_head(lambda begin, end: opened.read(end - begin))
