"""Tensor files: tensors, whole or sharded over ranks, as safetensors.

`stage_tensors` gathers whole tensors into one file in host memory; `save_tensors` and `SavedTensors` save and load
shards. Files in blocks are read once, by all ranks together, which exchange what they need.

The format is that of PyTorch's HuggingFaceStorageWriter, so HuggingFaceStorageReader also reads it: one file per
writing rank, whose head holds the offset of each part in the whole tensor as JSON; a file without offsets holds whole
tensors. There is neither an index file nor pickle. Invariants: any number of ranks reads the bits that any other number
wrote; the same tensors on the same number of ranks give the same bytes.
"""

from __future__ import annotations

import json
import math
import mmap
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain, starmap, zip_longest
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rftdask import errors
from rftdask.errors import RftError, RoleError
from rftdask.processes.ranks import Ranks
from rftdask.storage.base import Data
from rftdask.synchronizer.manifest import PIECE_BYTES
from rftdask.synchronizer.tensor_heads import read_head
from rftdask.trainer.checkpoint import CheckpointFiles
from rftdask.trainer.engines.strategies.base import full, local

_SHARDING, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Keys of PyTorch in the head of a file: JSON {name: {"saved_offsets": [first row, first column, ...]}}."""

_ENDING = ".safetensors"
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def stage_tensors(
    tensors: Mapping[str, Tensor],
    ranks: Ranks,
    dtype: torch.dtype | None = None,
    *,
    shared: bool = False,
    spare: Data = b"",
) -> memoryview:
    """Copy whole tensors into a safetensors file in host memory. Called by all ranks.

    Args:
        dtype: data type of floating-point tensors in the file; None: unchanged.
        shared: True: each rank gets a file of about the same size, and each tensor is in one of them. False: rank 0
            gets all tensors.
        spare: file of an earlier call that is no longer read; its memory is reused if the size fits.
    Returns: the file; no bytes if this rank has no tensor.
    """
    kinds = {
        name: (dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype, tensor.shape)
        for name, tensor in tensors.items()
    }
    owners = _owners(kinds, ranks.size if shared else 1)
    # Converted before the transfer, which halves the bytes; in host memory the copy converts. `full` is a collective
    # call if the tensor is sharded, so all ranks make it.
    whole = (
        (name, full(value if type(value) is Tensor and value.device.type == "cpu" else value.to(kinds[name][0])))
        for name, value in tensors.items()
    )
    on_gpu = any(tensor.device.type == "cuda" for tensor in tensors.values())
    own_kinds = {name: kind for name, kind in kinds.items() if owners[name] == ranks.rank}
    # transformers requires the format "pt".
    file = _make_file(own_kinds, {"format": "pt"}, whole, pinned=on_gpu, spare=spare)
    return file if own_kinds else memoryview(b"")


_Kinds: TypeAlias = Mapping[str, tuple[torch.dtype, Sequence[int]]]  # data type and shape by name


def _owners(kinds: _Kinds, size: int) -> dict[str, int]:
    """Assign each tensor to a rank, so that all get about the same bytes; the result is the same on all ranks."""
    num_bytes, owners = [0] * size, {}
    sizes = {name: dtype.itemsize * math.prod(shape) for name, (dtype, shape) in kinds.items()}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):  # the largest first
        owners[name] = min(range(size), key=lambda rank: (num_bytes[rank], rank))
        num_bytes[owners[name]] += sizes[name]
    return owners


def _make_file(
    kinds: _Kinds, metadata: Mapping[str, str], tensors: Iterable[tuple[str, Tensor]], *, pinned: bool, spare: Data
) -> memoryview:
    """Create a safetensors file in host memory; with a single dtype, in the layout of safetensors' own writer.

    Args:
        tensors: those of other names than in `kinds` are ignored.
        pinned: True if a tensor is on a GPU.
        spare: memory that is reused if it has the right size.
    """
    begins, end, head = dict[str, int](), 0, dict[str, Any](__metadata__=dict(metadata))
    # The widest dtype first, so that each tensor is aligned to its element size.
    for name, (dtype, shape) in sorted(kinds.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        begins[name], end = end, end + dtype.itemsize * math.prod(shape)
        head[name] = {"dtype": _NAMES[dtype], "shape": [*shape], "data_offsets": [begins[name], end]}
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    if len(spare) == start + end:
        memory = torch.frombuffer(spare, dtype=torch.uint8)
    elif pinned:  # PyTorch caches pinned memory: pinning takes longer than the copy
        memory = torch.empty(start + end, dtype=torch.uint8, pin_memory=True)
    else:
        pages = mmap.mmap(-1, start + end)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Faulting in small pages takes five times as long as the copy into them.
            with suppress(OSError):  # the kernel may lack huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
    file = memory.numpy().data
    file[:start] = len(text).to_bytes(8, "little") + text
    for name, tensor in tensors:
        if name in kinds:
            (dtype, shape), begin = kinds[name], start + begins[name]
            view = memory[begin : begin + dtype.itemsize * math.prod(shape)].view(dtype).view([*shape])
            view.copy_(tensor, non_blocking=True)
    if pinned:
        torch.cuda.synchronize()
    return file


def _part_of(tensor: Tensor) -> tuple[list[int], Tensor]:
    """Return the offset of this rank's part in the whole tensor, and the part, sharing memory."""
    offset = [0] * tensor.dim()
    if isinstance(tensor, DTensor):
        offset = [*compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1]]
    return offset, local(tensor).detach()


def save_tensors(
    name: str, tensors: Mapping[str, Tensor], ranks: Ranks, *, spread: bool, spare: Mapping[str, Data] | None = None
) -> dict[str, Data]:
    """Save tensors as files, and return those that this rank must write. Called by all ranks, with the same names.

    Args:
        name: name of rank 0's file; for `optim.safetensors` that of rank 1 is `optim-1.safetensors`.
        spread: True if each rank holds different parts. The lowest rank then writes the parts that several ranks hold,
            so that a rank later reads them from one file; otherwise the ranks share the work.
        spare: files of an earlier call, whose memory is reused if the size fits.
    """
    file = f"{name.removesuffix(_ENDING)}-{ranks.rank}{_ENDING}" if ranks.rank else name
    parts = {key: _part_of(tensor) for key, tensor in tensors.items()}
    kinds: _Kinds = {key: (part.dtype, part.shape) for key, (_, part) in parts.items()}
    if spread:
        lower = ranks.all_gather([[key, *offset] for key, (offset, _) in parts.items()])[: ranks.rank]
        written = {tuple(part) for rank_parts in lower for part in rank_parts}
        kinds = {key: kind for key, kind in kinds.items() if (key, *parts[key][0]) not in written}
    else:
        owners = _owners(kinds, ranks.size)
        kinds = {key: kind for key, kind in kinds.items() if owners[key] == ranks.rank}
    if not kinds:
        return {}
    offsets = json.dumps({key: {_OFFSETS: parts[key][0]} for key in kinds}, sort_keys=True)
    own_parts = [(key, parts[key][1]) for key in kinds]
    pinned = any(part.device.type == "cuda" for _, part in own_parts)
    memory = (spare or {}).get(file, b"")
    return {file: _make_file(kinds, {_SHARDING: offsets}, own_parts, pinned=pinned, spare=memory)}


_Range: TypeAlias = tuple[str, int, int]  # a file, a first byte, and the byte after the last
_Head: TypeAlias = tuple[str, bool, list[tuple[str, str, list[int], list[int], int]]]
"""A file, True if its head has offsets, and for each tensor: name, dtype, offsets, sizes, first byte in the file. JSON
types."""
_Part: TypeAlias = tuple[str, torch.dtype, list[int], list[int], int]
"""Saved part of a tensor: file, dtype, offset in the whole tensor, sizes, first byte in the file."""
_Block: TypeAlias = tuple[str, int]  # a file and the number of a block in it


class SavedTensors:
    """Reads the files that `save_tensors` returned on all ranks, or one file of whole tensors."""

    def __init__(self, name: str, files: Mapping[str, Data], ranks: Ranks) -> None:
        """Read the heads of the files. Called by all ranks.

        Args: files: of `CheckpointFiles` each rank reads some blocks, and the ranks exchange what they need.
        Raises: RoleError: the files are missing, or hold parts without offsets.
        """
        self._name, self._files, self._ranks = name, files, ranks
        self._cached: tuple[str, Data] = ("", b"")
        stem = re.escape(name.removesuffix(_ENDING))
        pattern = rf"{stem}(-\d+(-of-\d+)?)?{re.escape(_ENDING)}"
        # By length, then by name: rank 10 comes after rank 9.
        names = sorted((file for file in files if re.fullmatch(pattern, file)), key=lambda file: (len(file), file))
        if not names:
            raise RoleError(f"the checkpoint has no {name}")
        # Each rank reads the heads of some files: its own if as many ranks wrote, or those whose first blocks it has.
        own_names = names[ranks.rank :: ranks.size]
        if isinstance(files, CheckpointFiles):
            own_blocks = set(files.blocks[ranks.rank :: ranks.size])
            own_names = [file for file in names if (file, 0) in own_blocks]
        heads = ranks.all_gather([self._read_head(file) for file in own_names])
        self._parts = defaultdict[str, list[_Part]](list)
        self._shapes: dict[str, list[int]] = {}  # shapes of the whole tensors
        for file, has_offsets, chunks in (head for rank_heads in heads for head in rank_heads):
            if not has_offsets and len(names) > 1 and "-of-" not in file:
                raise RoleError(
                    f"{file} of the checkpoint has parts of tensors and no {_SHARDING} in its head, so another version "
                    "of rftdask wrote it; start a new run from the output of `rftdask convert`"
                )
            for key, dtype_name, offset, sizes, begin in chunks:
                # The whole extends to the end of its last part.
                ends = [start + size for start, size in zip(offset, sizes, strict=True)]
                self._shapes[key] = [*map(max, self._shapes.get(key, ends), ends)]
                self._parts[key].append((file, _DTYPES[dtype_name], offset, sizes, begin))

    @property
    def names(self) -> Collection[str]:
        """Names of the tensors."""
        return self._parts.keys()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill `tensors`; of sharded ones this rank's part. Called by all ranks, with the same names.

        Raises: RoleError: names or shapes differ. DamagedError: a file has changed since it was written.
        """
        lacking, unknown = tensors.keys() - self._parts.keys(), self._parts.keys() - tensors.keys()
        if lacking or unknown:
            raise RoleError(
                f"{self._name} of the checkpoint does not fit the model, or another version of rftdask wrote it: "
                f"missing {sorted(lacking)}, unexpected {sorted(unknown)}"
            )
        items: list[tuple[_Range, _Target]] = []
        for name, tensor in sorted(tensors.items()):
            if self._shapes[name] != [*tensor.shape]:
                raise RoleError(
                    f"{self._name} of the checkpoint does not fit the model: {name} is {self._shapes[name]}, in the "
                    f"model {[*tensor.shape]}"
                )
            to_offset, to_part = _part_of(tensor)
            for file, dtype, offset, sizes, begin in self._parts[name]:
                # The overlap of both parts in the whole tensor, by dimension.
                first = [*map(max, offset, to_offset)]
                last = [min(o + n, to + m) for o, n, to, m in zip(offset, sizes, to_offset, to_part.shape, strict=True)]
                if any(stop <= start for start, stop in zip(first, last, strict=True)):
                    continue
                box, to_box = (
                    [slice(start - o, stop - o) for start, stop, o in zip(first, last, origin, strict=True)]
                    for origin in (offset, to_offset)
                )
                # Whole rows, which are contiguous; of sharded weights a rank has some rows.
                row_bytes = math.prod(sizes[1:]) * dtype.itemsize
                rows = box[0] if box else slice(0, 1)
                needed = (file, begin + rows.start * row_bytes, begin + rows.stop * row_bytes)
                items.append((needed, _Target(to_part[tuple(to_box)], dtype, sizes, box)))
        # Ranges of the cached file first.
        items.sort(key=lambda item: (item[0][0] != self._cached[0], item[0]))
        error: RftError | None = None
        try:
            for number, at, data in self._read_ranges([needed for needed, _ in items]):
                items[number][1].write(at, data)
        except RftError as raised:
            error = raised
        self._cached = ("", b"")
        # All ranks raise the error of the lowest failed rank, for which they would wait in their next call.
        failures = self._ranks.all_gather(None if error is None else [type(error).__name__, str(error)])
        for kind, text in filter(None, failures):
            raise getattr(errors, kind, RoleError)(text) from error

    def _read_ranges(self, ranges: Sequence[_Range]) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield (number of the range, offset in it, bytes) in any order until all ranges are covered. Called by all
        ranks, each with its own ranges."""
        if isinstance(self._files, CheckpointFiles):
            yield from _exchange_ranges(self._files, ranges, self._ranks)
            return
        for number, (file, start, stop) in enumerate(ranges):
            # Copied: torch warns of read-only memory.
            yield number, 0, np.frombuffer(bytearray(self._read_cached(file)[start:stop]), np.uint8)

    def _read_cached(self, file: str) -> Data:
        """Read a whole file; the last one is cached."""
        if self._cached[0] != file:
            self._cached = ("", b"")  # two files may not fit into memory
            self._cached = (file, self._files[file])
        return self._cached[1]

    def _read_head(self, file: str) -> _Head:
        data = self._files.head(file) if isinstance(self._files, CheckpointFiles) else self._read_cached(file)
        head, start = read_head(lambda begin, end: data[begin:end])
        metadata = head.pop("__metadata__", {})
        sharding = json.loads(metadata[_SHARDING]) if _SHARDING in metadata else None
        chunks = []
        for name, entry in head.items():
            # Without offsets the file holds whole tensors, which begin at 0.
            offsets = [0] * len(entry["shape"]) if sharding is None else list(sharding[name][_OFFSETS])
            chunks.append((name, entry["dtype"], offsets, entry["shape"], start + entry["data_offsets"][0]))
        return file, sharding is not None, chunks


class _Target:
    """A tensor that is filled in place from the bytes of whole rows, which arrive in pieces, in any order."""

    def __init__(self, tensor: Tensor, dtype: torch.dtype, sizes: Sequence[int], box: Sequence[slice]) -> None:
        """dtype, sizes: of the stored part. box: slice of each of its dimensions that `tensor` gets."""
        self.tensor, self._dtype, self._sizes, self._columns = tensor, dtype, sizes[1:], box[1:]
        self._row_bytes = math.prod(self._sizes) * dtype.itemsize
        self._incomplete: dict[int, tuple[bytearray, list[int]]] = {}
        """Row number -> its buffer and [number of missing bytes]."""
        # Bytes are copied directly if the tensor has the layout of the file.
        same = dtype == tensor.dtype and self._columns == [slice(0, size) for size in self._sizes]
        self._bytes = tensor.view(-1).view(torch.uint8) if same and tensor.is_contiguous() else None

    def write(self, offset: int, data: np.ndarray) -> None:
        """Write bytes at an offset into the rows."""
        if self._bytes is not None:
            self._bytes[offset : offset + len(data)].copy_(torch.from_numpy(data))
            return
        while len(data):
            number, begin = divmod(offset, self._row_bytes)
            size = len(data) - len(data) % self._row_bytes
            if begin or not size:
                size = min(self._row_bytes - begin, len(data))
                row, missing = self._incomplete.setdefault(number, (bytearray(self._row_bytes), [self._row_bytes]))
                row[begin : begin + size] = data[:size].data
                missing[0] -= size
                if not missing[0]:
                    self._copy_rows(number, self._incomplete.pop(number)[0])
            else:
                self._copy_rows(number, bytearray(data[:size]))
            offset, data = offset + size, data[size:]

    def _copy_rows(self, number: int, data: bytearray) -> None:
        rows = torch.frombuffer(data, dtype=self._dtype).view([-1, *self._sizes])
        target = self.tensor if self.tensor.dim() else self.tensor.view(1)
        target[number : number + len(rows)].copy_(rows[(slice(None), *self._columns)])


def _deal(files: CheckpointFiles, blocks: Iterable[_Block], size: int) -> list[list[_Block]]:
    """Deal neighboring blocks to ranks, about the same bytes to each. If as many ranks load as saved, each reads little
    more than it needs."""
    ordered = sorted(blocks, key=lambda block: (len(block[0]), block))  # optim-10 after optim-9
    ends = list(accumulate(stop - start for start, stop in starmap(files.span, ordered)))
    dealt: list[list[_Block]] = [[] for _ in range(size)]
    for block, begin, end in zip(ordered, [0, *ends], ends, strict=False):
        dealt[(begin + end) * size // (2 * ends[-1] + 1)].append(block)  # by the middle of the block
    return dealt


def _exchange_ranges(
    files: CheckpointFiles, ranges: Sequence[_Range], ranks: Ranks
) -> Iterator[tuple[int, int, np.ndarray]]:
    """See `SavedTensors._read_ranges`. Each rank reads its blocks piece by piece, in step with the others, and sends
    each byte only to the ranks that need it. A rank holds a few pieces, and one of each other rank.
    """
    requests: dict[_Block, list[tuple[int, int, int, int]]] = defaultdict(list)
    """(rank, number of its range, first byte in the file, byte after the last) by block; the same on all ranks."""
    for rank, rank_ranges in enumerate(ranks.all_gather([list(item) for item in ranges])):
        for number, (file, start, stop) in enumerate(rank_ranges):
            _, length = files.span(file, 0)
            for block in range(start // length, -(-stop // length)) if start < stop else ():
                begin, end = files.span(file, block)
                requests[file, block].append((rank, number, max(start, begin), min(stop, end)))
    dealt = _deal(files, requests, ranks.size)
    pieces, failed = files.stream(dealt[ranks.rank]), None
    for blocks in zip_longest(*dealt):  # one of each rank
        spans = [(0, 0) if block is None else files.span(*block) for block in blocks]
        for offset in range(0, max(stop - start for start, stop in spans), PIECE_BYTES):
            bounds = [(start + offset, min(start + offset + PIECE_BYTES, stop)) for start, stop in spans]
            sent = [  # of the piece of each rank
                [
                    (rank, number, max(first, begin), min(last, end))
                    for rank, number, first, last in requests.get(block, ())
                    if first < end and begin < last
                ]
                for block, (begin, end) in zip(blocks, bounds, strict=True)
            ]
            begin, end = bounds[ranks.rank]
            send, rows = [0] * ranks.size, [np.empty(0, np.uint8)]
            if begin < end:
                try:
                    data = np.frombuffer(next(pieces) if failed is None else bytes(end - begin), np.uint8)
                except RftError as error:
                    # Raised after the last piece: the others wait for this rank at every piece.
                    data, failed = np.zeros(end - begin, np.uint8), error
                for rank, _, first, last in sent[ranks.rank]:
                    send[rank] += last - first
                    rows.append(data[first - begin : last - begin])
            if not any(sent):
                continue
            received = [[request for request in piece if request[0] == ranks.rank] for piece in sent]
            receive = [sum(last - first for _, _, first, last in piece) for piece in received]
            data = ranks.all_to_all(torch.from_numpy(np.concatenate(rows)), send, receive).numpy()
            begin = 0
            for _, number, first, last in chain.from_iterable(received):
                yield number, first - ranges[number][1], data[begin : begin + last - first]
                begin += last - first
    if failed is not None:
        raise failed
