"""Heads of safetensors files: what they say of each tensor, and where the bytes of the tensors begin."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from rftdask.storage.base import Data

Head: TypeAlias = tuple[dict[str, Any], int]
"""What a file says by the names of its tensors, "__metadata__" among them, and the place of their first byte."""


def head_bytes(beginning: Data) -> int:
    """Where the bytes of the tensors begin, by 8 bytes of a file at least."""
    # 8 bytes of the length of the head, then the head as JSON.
    return 8 + int.from_bytes(beginning[:8], "little")


def read_head(part: Callable[[int, int], Data]) -> Head:
    """The head of a file of which `part` gives the bytes from one place up to another, asked in the order of the file.

    Raises: ValueError: it is no safetensors file.
    """
    start = head_bytes(part(0, 8))
    return json.loads(bytes(part(8, start))), start


def read_file_head(file: Path) -> Head:
    """As `read_head`, of a file on this machine. Raises: OSError."""
    with file.open("rb") as opened:
        return read_head(lambda begin, end: opened.read(end - begin))
