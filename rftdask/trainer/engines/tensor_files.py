"""Tensor files: tensors, whole or sharded over ranks, as safetensors.

`stage_tensors` gathers whole tensors into one file in host memory. `save_tensors` and `SavedTensors` save and load
shards by `torch.distributed.checkpoint`: PyTorch plans which rank writes and reads which parts; here its planners get
bytes by file name instead of a file system. Files in blocks are read once, by all ranks together, which exchange what
they need. The module knows neither models nor storage.

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
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, chain, starmap, zip_longest
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from rftdask.errors import RftError, RoleError
from rftdask.processes.ranks import Ranks
from rftdask.storage.base import Data
from rftdask.synchronizer.manifest import PIECE_BYTES
from rftdask.synchronizer.tensor_heads import read_head
from rftdask.trainer.checkpoint import CheckpointFiles
from rftdask.trainer.engines.strategies.base import full

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
    on_gpu = any(tensor.device.type == "cuda" for tensor in tensors.values())
    owners = _owners(kinds, ranks.size if shared else 1)
    own_kinds = {name: kind for name, kind in kinds.items() if owners[name] == ranks.rank}
    # transformers requires the format "pt".
    file, views = _lay_out(own_kinds, {"format": "pt"}, pinned=on_gpu, spare=spare)
    for name, tensor in tensors.items():
        # Converted before the transfer, which halves the bytes; in host memory the copy converts.
        narrow = tensor if type(tensor) is Tensor and tensor.device.type == "cpu" else tensor.to(kinds[name][0])
        whole = full(narrow)  # a collective call if the tensor is sharded
        if name in views:
            views[name].copy_(whole, non_blocking=True)
    if on_gpu:
        torch.cuda.synchronize()
    return file if own_kinds else memoryview(b"")


_Kinds: TypeAlias = Mapping[str, tuple[torch.dtype, Sequence[int]]]
"""Data type and shape by name."""


def _owners(kinds: _Kinds, size: int) -> dict[str, int]:
    """Assign each tensor to a rank, so that all get about the same bytes; the result is the same on all ranks."""
    num_bytes, owners = [0] * size, {}
    sizes = {name: dtype.itemsize * math.prod(shape) for name, (dtype, shape) in kinds.items()}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):  # the largest first
        owners[name] = min(range(size), key=lambda rank: (num_bytes[rank], rank))
        num_bytes[owners[name]] += sizes[name]
    return owners


def _lay_out(
    kinds: _Kinds, metadata: Mapping[str, str], *, pinned: bool = False, spare: Data = b""
) -> tuple[memoryview, dict[str, Tensor]]:
    """Allocate a safetensors file in host memory, write its head, and return it with views of its tensors to fill.

    With a single dtype, the layout is that of safetensors' own writer.

    Args: spare: memory that is reused if it has the right size.
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
    views = {}
    for name, (dtype, shape) in kinds.items():
        begin = start + begins[name]
        views[name] = memory[begin : begin + dtype.itemsize * math.prod(shape)].view(dtype).view([*shape])
    return file, views


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
    writer = _Writer(file, (spare or {}).get(file, b""))
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=spread
    )
    # Sorted: the assignment to ranks depends on the order.
    state = dict(sorted(tensors.items()))
    with _translate_errors(f"{name} cannot be saved"):
        save_checkpoint(state, storage_writer=writer, planner=planner, process_group=ranks.group)
    return writer.files


_Range: TypeAlias = tuple[str, int, int]
"""A file, a first byte, and the byte after the last."""
_Head: TypeAlias = tuple[str, bool, list[tuple[str, str, list[int], list[int], int]]]
"""A file, True if its head has offsets, and for each tensor: name, dtype, offsets, sizes, first byte in the file. JSON
types."""
_Block: TypeAlias = tuple[str, int]
"""A file and the number of a block in it."""


class _NoPath:
    """Methods of PyTorch's storage interface that only concern storages with a path."""

    def reset(self, checkpoint_id: object = None) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return this rank's plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Return the plans of all ranks unchanged."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Return False: PyTorch cannot select this storage by a path."""
        return False


class SavedTensors(_NoPath, StorageReader):
    """Reads the files that `save_tensors` returned on all ranks, or one file of whole tensors.

    Example:
        saved = SavedTensors("actor/optim.safetensors", files, ranks)
        saved.load(tensors)
    """

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
        self._parts: dict[dcp.MetadataIndex, tuple[str, torch.dtype, list[int], int]] = {}
        """File, dtype, sizes and first byte of each part of a tensor."""
        self._tensors: dict[str, dcp.TensorStorageMetadata] = {}
        for file, has_offsets, chunks in (head for rank_heads in heads for head in rank_heads):
            if not has_offsets and len(names) > 1 and "-of-" not in file:
                raise RoleError(
                    f"{file} of the checkpoint has parts of tensors and no {_SHARDING} in its head, so another version "
                    "of rftdask wrote it; start a new run from the output of `rftdask convert`"
                )
            for key, dtype_name, offsets, sizes, begin in chunks:
                dtype = _DTYPES[dtype_name]
                # The whole extends to the end of its last part.
                ends = torch.Size(start + size for start, size in zip(offsets, sizes, strict=True))
                empty = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype), ends, [])
                known = self._tensors.setdefault(key, empty)
                known.size = torch.Size(map(max, known.size, ends))
                known.chunks.append(dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                self._parts[dcp.MetadataIndex(key, offsets)] = (file, dtype, sizes, begin)

    @property
    def names(self) -> Collection[str]:
        """Names of the tensors."""
        return self._tensors.keys()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill `tensors`; of sharded ones this rank's part. Called by all ranks, with the same names.

        Raises: RoleError: names or shapes differ. DamagedError: a file has changed since it was written.
        """
        lacking, unknown = tensors.keys() - self._tensors.keys(), self._tensors.keys() - tensors.keys()
        if lacking or unknown:
            raise RoleError(
                f"{self._name} of the checkpoint does not fit the model, or another version of rftdask wrote it: "
                f"missing {sorted(lacking)}, unexpected {sorted(unknown)}"
            )
        # Detached: PyTorch's loader writes in place.
        targets = {name: tensor.detach() for name, tensor in tensors.items()}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _translate_errors(f"{self._name} of the checkpoint does not fit the model"):
            load_checkpoint(targets, storage_reader=self, planner=planner, process_group=self._ranks.group)
        self._cached = ("", b"")

    # ---- called by PyTorch

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Return sizes and parts of all tensors."""
        return dcp.Metadata(dict(self._tensors))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of this rank's plan, those of the cached file first."""
        items = [(self._parts[item.storage_index], item) for item in plan.items]
        items.sort(key=lambda item: (item[0][0] != self._cached[0], item[0][0], item[0][3]))
        targets, ranges = [], []
        for (file, dtype, sizes, begin), item in items:
            box = [slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True)]
            # Whole rows, which are contiguous; of sharded weights a rank has some rows.
            row_bytes = math.prod(sizes[1:]) * dtype.itemsize
            first, last = (box[0].start, box[0].stop) if box else (0, 1)
            tensor = planner.resolve_tensor(item)
            ranges.append((file, begin + first * row_bytes, begin + (last if tensor.numel() else first) * row_bytes))
            targets.append(_Target(tensor, dtype, sizes, box))
        for number, offset, data in self._read_ranges(ranges):
            targets[number].write(offset, data)
        for (_, item), target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target.tensor)
        return _done(None)

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    # ----

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
    """Deal neighboring blocks to ranks, about the same bytes to each.

    If as many ranks load as saved, each reads little more than it needs.
    """
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


class _Writer(_NoPath, StorageWriter):
    """Keeps the file of one rank."""

    def __init__(self, name: str, spare: Data) -> None:
        self._name, self._spare = name, spare
        self.files: dict[str, Data] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Create this rank's file from the parts of its plan."""
        tensors: dict[str, Tensor] = {}
        offsets: dict[str, dict[str, list[int]]] = {}
        for item in plan.items:
            tensor, index = planner.resolve_data(item), item.index
            assert isinstance(tensor, Tensor) and index.offset is not None and index.fqn not in tensors
            tensors[index.fqn] = tensor.detach()
            offsets[index.fqn] = {_OFFSETS: list(index.offset)}
        if tensors:
            kinds = {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
            pinned = any(tensor.device.type == "cuda" for tensor in tensors.values())
            metadata = {_SHARDING: json.dumps(offsets, sort_keys=True)}
            file, views = _lay_out(kinds, metadata, pinned=pinned, spare=self._spare)
            for key, tensor in tensors.items():
                views[key].copy_(tensor, non_blocking=True)
            if pinned:
                torch.cuda.synchronize()
            self.files[self._name] = file
        return _done([])

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: the format has no index file, and the manifest of the checkpoint makes its files visible."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


@contextmanager
def _translate_errors(what: str) -> Iterator[None]:
    """Raise an RftError for errors that PyTorch gathered from the ranks; the same one on all ranks."""
    with warnings.catch_warnings():
        # Expected in a run with a single rank.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as error:  # a BaseException
            # All ranks raise the error of the lowest failed rank.
            rank, (cause, _) = min(error.failures.items())
            if isinstance(cause, RftError):
                raise cause from error
            raise RoleError(f"{what}: {type(cause).__name__} on rank {rank}: {cause}") from error
