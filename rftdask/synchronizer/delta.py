"""Delta: an exact difference between two files of weights, as the 16-bit words that changed and how.

At the learning rates of reinforcement learning, one optimizer step changes about 1 % of the bfloat16 values. For each
block of a file (manifest.BLOCK_BYTES) a delta stores the gaps between changed words and the XOR of old and new words,
as byte planes compressed with zstd, plus a hash of the new words. It knows neither versions nor storage nor tensors.

Gaps and XOR take half the space of gaps and new values, and a third of the XOR of all values, compressed
(docs/weights.md).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from rftdask.errors import DamagedError
from rftdask.storage.base import Data, in_order
from rftdask.synchronizer.manifest import BLOCK_BYTES

ENDING = ".delta"
_MAX_SHARE = 0.5
"""Largest size of a delta, as a share of the complete file. A larger delta is not worth applying."""
_MAX_CHANGED = 0.25
"""Largest share of changed words in a sample. In float32 every value changes, and so half of all words."""
_SAMPLE_STRIDE = 1009  # a prime, so that the sample is not a single column of a matrix
_MIN_SAMPLE = 100
_NUM_THREADS = 4
_ZSTD = pa.Codec("zstd", compression_level=1)

Words: TypeAlias = NDArray[np.uint16]


def compute_delta(old: Data, new: Data) -> bytes | None:
    """Delta file from `old` to `new`, for `DeltaFile`.

    None: it would be larger than half of `new`, or the two are not versions of one file.
    """
    if len(old) != len(new) or len(new) % 2 or not new:
        return None
    ones, others = np.frombuffer(old, np.uint16), np.frombuffer(new, np.uint16)
    sample = ones[::_SAMPLE_STRIDE] != others[::_SAMPLE_STRIDE]
    if len(sample) >= _MIN_SAMPLE and np.mean(sample) > _MAX_CHANGED:
        return None

    def encode(start: int) -> tuple[bytes, bytes, int, str]:
        part = slice(start, start + BLOCK_BYTES // 2)
        positions = np.flatnonzero(ones[part] != others[part])
        changed = others[part][positions]
        # Most gaps are below 256, so the other byte planes are zeros and compress to nothing.
        gaps = _compress(np.diff(positions, prepend=-1).astype(np.uint32).view(np.uint8).reshape(-1, 4))
        xors = _compress((ones[part][positions] ^ changed).view(np.uint8).reshape(-1, 2))
        return gaps, xors, len(positions), hashlib.sha256(changed.tobytes()).hexdigest()

    tensors, checks = {}, []
    starts = range(0, len(others), BLOCK_BYTES // 2)
    for number, (gaps, xors, count, digest) in enumerate(in_order(encode, starts, _NUM_THREADS)):
        tensors[f"{number}.gaps"] = np.frombuffer(gaps, np.uint8)
        tensors[f"{number}.xors"] = np.frombuffer(xors, np.uint8)
        checks.append([count, digest])
    data = save(tensors, {"format": "rftdask-delta-1", "blocks": json.dumps(checks)})
    return data if len(data) <= _MAX_SHARE * len(new) else None


class DeltaFile:
    """Reader of a delta file. Blocks can be read in any order and from any thread.

    Example:
        delta = DeltaFile(path)
        for number in range(delta.num_blocks):
            positions, xors = delta.changes(number)   # 16-bit words, counted from the start of the block
            words[number][positions] ^= xors
    """

    def __init__(self, path: Path) -> None:
        """Raises: DamagedError: not a delta file, or another format."""
        try:
            opened: Any = safe_open(path, framework="np")
            self._file, self._checks = opened, json.loads((opened.metadata() or {})["blocks"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise DamagedError(f"{path} is not a delta that this version of rftdask can read: {error!r}") from error

    @property
    def num_blocks(self) -> int:
        return len(self._checks)

    def changes(self, number: int) -> tuple[NDArray[np.int64], Words]:
        """Positions of the changed words in a block, ascending, and the XOR of old and new words."""
        count = self._checks[number][0]
        gaps = _decompress(self._file.get_tensor(f"{number}.gaps"), count, 4).view(np.uint32)
        xors = _decompress(self._file.get_tensor(f"{number}.xors"), count, 2).view(np.uint16)
        return np.cumsum(gaps, dtype=np.int64) - 1, xors

    def is_result(self, number: int, changed: bytes) -> bool:
        """True if `changed` are the new words of the block. False means that the delta was applied to other weights."""
        return bool(hashlib.sha256(changed).hexdigest() == self._checks[number][1])


def _compress(planes: NDArray[np.uint8]) -> bytes:
    return bytes(_ZSTD.compress(np.ascontiguousarray(planes.T), asbytes=True))


def _decompress(data: NDArray[np.uint8], count: int, size: int) -> NDArray[np.uint8]:
    if not count:
        return np.empty(0, np.uint8)
    planes = np.frombuffer(_ZSTD.decompress(data, count * size), np.uint8)
    return np.ascontiguousarray(planes.reshape(size, count).T).ravel()
