"""Delta: what turns one file of weights into the next, exactly: which of its 16-bit words changed, and how.

At the learning rates of reinforcement learning an optimizer step changes one bfloat16 value in a hundred. Of each
block of a file (manifest.BLOCK_BYTES) the gaps between words that changed and the XOR of old and new are kept, byte
plane by byte plane, compressed by zstd, with the hash of the new words. It knows neither versions nor storage, and of
tensors no more than that they lie one after another.

Measured (docs/weights.md), gaps and XOR take half of what gaps and new values take, and a third of the XOR of all
values, compressed.
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
"""Of the bytes of the whole, beyond which a delta saves too little for what it costs to apply."""
_MAX_CHANGED = 0.25
"""Of the words, beyond which no delta is tried. In float32 an optimizer changes every value, and so half of them."""
_SAMPLE_STRIDE = 1009  # a prime, so that no column of a matrix is all that is looked at
_MIN_SAMPLE = 100
_NUM_THREADS = 4
_ZSTD = pa.Codec("zstd", compression_level=1)

Words: TypeAlias = NDArray[np.uint16]


def compute_delta(old: Data, new: Data) -> bytes | None:
    """The file by which `DeltaFile` makes `new` of `old`; None: it would be more than half of `new`, or they are no two
    versions of one file.
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
        # Most gaps are below 256: the other planes are zeros, which cost nothing.
        gaps = _compress(np.diff(positions, prepend=-1).astype(np.uint32).view(np.uint8).reshape(-1, 4))
        xors = _compress((ones[part][positions] ^ changed).view(np.uint8).reshape(-1, 2))
        return gaps, xors, len(positions), hashlib.sha256(changed.tobytes()).hexdigest()

    tensors, told = {}, []
    starts = range(0, len(others), BLOCK_BYTES // 2)
    for number, (gaps, xors, count, digest) in enumerate(in_order(encode, starts, _NUM_THREADS)):
        tensors[f"{number}.gaps"] = np.frombuffer(gaps, np.uint8)
        tensors[f"{number}.xors"] = np.frombuffer(xors, np.uint8)
        told.append([count, digest])
    data = save(tensors, {"format": "rftdask-delta-1", "blocks": json.dumps(told)})
    return data if len(data) <= _MAX_SHARE * len(new) else None


class DeltaFile:
    """What `compute_delta` made, in a file, of which each block can be read by itself; from any thread.

    Example:
        delta = DeltaFile(path)
        for number in range(delta.num_blocks):
            positions, xors = delta.changes(number)   # of 16-bit words, from the beginning of the block
            words[number][positions] ^= xors
    """

    def __init__(self, path: Path) -> None:
        """Raises: DamagedError: it is none, or of another format."""
        try:
            opened: Any = safe_open(path, framework="np")
            self._file, self._told = opened, json.loads((opened.metadata() or {})["blocks"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise DamagedError(
                f"{path} is no delta of weights that this version of rftdask reads: {error!r}"
            ) from error

    @property
    def num_blocks(self) -> int:
        """Of the file that it changes."""
        return len(self._told)

    def changes(self, number: int) -> tuple[NDArray[np.int64], Words]:
        """Positions in a block of the words that change, ascending, and the XOR of old and new."""
        count = self._told[number][0]
        gaps = _decompress(self._file.get_tensor(f"{number}.gaps"), count, 4).view(np.uint32)
        xors = _decompress(self._file.get_tensor(f"{number}.xors"), count, 2).view(np.uint16)
        return np.cumsum(gaps, dtype=np.int64) - 1, xors

    def is_result(self, number: int, changed: bytes) -> bool:
        """Whether these are the new words of a block at the positions that change: they are not if the old ones were
        not those of which the delta was made.
        """
        return bool(hashlib.sha256(changed).hexdigest() == self._told[number][1])


def _compress(planes: NDArray[np.uint8]) -> bytes:
    return bytes(_ZSTD.compress(np.ascontiguousarray(planes.T), asbytes=True))


def _decompress(data: NDArray[np.uint8], count: int, size: int) -> NDArray[np.uint8]:
    if not count:
        return np.empty(0, np.uint8)
    planes = np.frombuffer(_ZSTD.decompress(data, count * size), np.uint8)
    return np.ascontiguousarray(planes.reshape(size, count).T).ravel()
