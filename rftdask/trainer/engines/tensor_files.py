"""Tensor files: tensors, whole or spread over ranks, as safetensors: their wholes as one file in host memory, for who
loads them whole (`stage_tensors`), or saved and loaded by `torch.distributed.checkpoint`.

PyTorch plans who writes what, of what several ranks hold one alone, and which part of which file a rank is to get. Its
planners are given bytes by name here, where they expect a file system. Nothing is known of models, nor where files go.
Of files that are in blocks each rank reads some, and the ranks give each other what they want of them.

The format is that of PyTorch's HuggingFaceStorageWriter, so HuggingFaceStorageReader reads it too: a file for each rank
that writes, whose head says in JSON where each tensor begins in the whole; a file whose head does not, holds whole
tensors. There is no index beside the heads, and no pickle. Invariants: any number of ranks reads what any other number
wrote, to the bit; the same tensors on as many ranks give the same bytes.
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
from itertools import accumulate, starmap, zip_longest
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from rftdask.errors import RftError, RoleError
from rftdask.storage.base import Data
from rftdask.synchronizer.manifest import PIECE_BYTES
from rftdask.synchronizer.tensor_heads import read_head
from rftdask.trainer.engines.strategies.base import full
from rftdask.trainer.ranks import Ranks

_SHARDING, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""In the head of a file: JSON {name: {"saved_offsets": [first row, first column, ...]}}. The names are PyTorch's."""

_ENDING = ".safetensors"
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
"""By the names in the heads of files."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def stage_tensors(
    tensors: Mapping[str, Tensor],
    ranks: Ranks,
    dtype: torch.dtype | None = None,
    *,
    shared: bool = False,
    spare: Data = b"",
) -> memoryview:
    """The wholes of `tensors` as a safetensors file in host memory: a copy, which no later step changes, made in one
    pass over them. Called by all ranks; of no bytes on those other than 0.

    Args:
        dtype: of those of floating point in the file; None: each as it is.
        shared: each rank gets a file of about as many bytes, with whole tensors, of no bytes if there is none for it;
            each tensor is in one of them.
        spare: what an earlier call gave, and nobody reads any more: its memory is used again if it fits.
    """
    kinds = {
        name: (dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype, tensor.shape)
        for name, tensor in tensors.items()
    }
    on_gpu = any(tensor.device.type == "cuda" for tensor in tensors.values())
    # "pt" is what transformers looks for before it reads a file.
    owners = _owners(kinds, ranks.size if shared else 1)
    own = {name: kind for name, kind in kinds.items() if owners[name] == ranks.rank}
    file, places = _lay_out(own, {"format": "pt"}, pinned=on_gpu, spare=spare)
    for name, tensor in tensors.items():
        # Narrow before it travels, over the ranks or off the device: half the bytes. In host memory the copy converts.
        narrow = tensor if type(tensor) is Tensor and tensor.device.type == "cpu" else tensor.to(kinds[name][0])
        whole = full(narrow)  # a call of all ranks where a tensor is spread
        if name in places:
            places[name].copy_(whole, non_blocking=True)
    if on_gpu:
        torch.cuda.synchronize()
    return file if own else memoryview(b"")


_Kinds: TypeAlias = Mapping[str, tuple[torch.dtype, Sequence[int]]]
"""Data type and shape by name."""


def _owners(kinds: _Kinds, size: int) -> dict[str, int]:
    """The rank that gets each tensor, so that all get about as many bytes; the same on all ranks."""
    num_bytes, owners = [0] * size, {}
    sizes = {name: dtype.itemsize * math.prod(shape) for name, (dtype, shape) in kinds.items()}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):  # the largest first
        owners[name] = min(range(size), key=lambda rank: (num_bytes[rank], rank))
        num_bytes[owners[name]] += sizes[name]
    return owners


def _lay_out(
    kinds: _Kinds, metadata: Mapping[str, str], *, pinned: bool = False, spare: Data = b""
) -> tuple[memoryview, dict[str, Tensor]]:
    """Host memory that is a safetensors file with its head written, and in it the places of the tensors, to be filled.

    Args:
        kinds: of one dtype, the bytes are those of safetensors' own writer.
        spare: memory that is taken if it is of the right size; it is as the others were.
    """
    begins, end, head = dict[str, int](), 0, dict[str, Any](__metadata__=dict(metadata))
    # The widest first, so that each begins at a multiple of its own size.
    for name, (dtype, shape) in sorted(kinds.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        begins[name], end = end, end + dtype.itemsize * math.prod(shape)
        head[name] = {"dtype": _NAMES[dtype], "shape": [*shape], "data_offsets": [begins[name], end]}
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    if len(spare) == start + end:
        memory = torch.frombuffer(spare, dtype=torch.uint8)
    elif pinned:  # of which PyTorch keeps what was given back: pinning takes longer than the copy
        memory = torch.empty(start + end, dtype=torch.uint8, pin_memory=True)
    else:
        pages = mmap.mmap(-1, start + end)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # New memory comes page by page, which for small pages takes five times as long as the copy into it.
            with suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
    file = memory.numpy().data
    file[:start] = len(text).to_bytes(8, "little") + text
    places = {}
    for name, (dtype, shape) in kinds.items():
        begin = start + begins[name]
        places[name] = memory[begin : begin + dtype.itemsize * math.prod(shape)].view(dtype).view([*shape])
    return file, places


def save_tensors(
    name: str, tensors: Mapping[str, Tensor], ranks: Ranks, *, spread: bool, spare: Mapping[str, Data] | None = None
) -> dict[str, Data]:
    """Tensors as files, of which each rank gets what it is to write. Called by all ranks, with the same names.

    Args:
        name: of the first file; that of rank 1 is `optim-1.safetensors` where this is `optim.safetensors`.
        spread: whether each rank holds parts of its own. What several ranks hold is then for the lowest of them, so
            that a rank which later reads those parts again needs one file more; else they share the work.
        spare: files of an earlier call, whose memory is used again if it fits.
    """
    own = f"{name.removesuffix(_ENDING)}-{ranks.rank}{_ENDING}" if ranks.rank else name
    writer = _Writer(own, (spare or {}).get(own, b""))
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=spread
    )
    # In one order, since who writes what depends on it, and what a rank holds is in the order in which it came to be.
    state = dict(sorted(tensors.items()))
    with _in_our_words(f"{name} cannot be saved"):
        save_checkpoint(state, storage_writer=writer, planner=planner, process_group=ranks.group)
    return writer.files


_Part: TypeAlias = tuple[str, int, int]
"""Of a file: from a byte up to another."""
_Look = tuple[str, bool, list[tuple[str, str, list[int], list[int], int]]]
"""A file, whether its head says where tensors begin, and of each tensor: name, dtype, offsets, sizes, and the byte of
the file at which it begins. JSON types."""


_Block: TypeAlias = tuple[str, int]
"""A file and the number of the block in it."""


@runtime_checkable
class InBlocks(Protocol):
    """Files in blocks, all of one file of one length but its last, that are read in pieces and never held."""

    @property
    def blocks(self) -> Sequence[_Block]:
        """All of them, the same on all ranks. The head of a file is at hand on the rank of its first block: the block
        at place i is that of rank i % size."""

    def head(self, name: str) -> Data:
        """The beginning of a file, up to the first byte of its tensors."""

    def span(self, name: str, number: int) -> tuple[int, int]:
        """First byte of a block in its file, and the byte after its last."""

    def stream(self, blocks: Sequence[_Block]) -> Iterator[Data]:
        """Blocks one after the other, each in pieces of PIECE_BYTES. Raises: DamagedError: one is not what it was, in
        place of its last piece at the latest."""


class _NoFolder:
    """What PyTorch asks of a storage with a path, where there is nothing to do."""

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing is open."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """This rank's plan as PyTorch made it."""
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """The plans of all ranks as PyTorch made them."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """False: there is no path by which PyTorch could choose this storage."""
        return False  # there is no path to find it by


class SavedTensors(_NoFolder, StorageReader):
    """What `save_tensors` gave on all ranks, or one file of whole tensors.

    Example:
        saved = SavedTensors("actor/optim.safetensors", files, ranks)
        tensors = {name: saved.empty_like(name, parameters[name]) for name in saved.names}
        saved.load(tensors)
    """

    def __init__(self, name: str, files: Mapping[str, Data], ranks: Ranks) -> None:
        """Looks into the heads of the files. Called by all ranks.

        files: if they are `InBlocks`, a rank reads some blocks alone, and is given what it fills by the others.
        Raises: RoleError: they are not there, or parts whose place in the whole is not known.
        """
        self._name, self._files, self._ranks = name, files, ranks
        self._held: tuple[str, Data] = ("", b"")
        stem = re.escape(name.removesuffix(_ENDING))
        pattern = rf"{stem}(-\d+(-of-\d+)?)?{re.escape(_ENDING)}"
        # By length, then by name: rank 10 comes after rank 9.
        own = sorted((file for file in files if re.fullmatch(pattern, file)), key=lambda file: (len(file), file))
        if not own:
            raise RoleError(f"the checkpoint has no {name}")
        # Each rank looks into some of them: its own if as many ranks wrote, or those whose beginnings it has.
        looked = own[ranks.rank :: ranks.size]
        if isinstance(files, InBlocks):
            mine = set(files.blocks[ranks.rank :: ranks.size])
            looked = [file for file in own if (file, 0) in mine]
        looks = ranks.all_gather([self._look(file) for file in looked])
        self._places: dict[MetadataIndex, tuple[str, torch.dtype, list[int], int]] = {}
        """Of a part of a tensor: its file, dtype and sizes, and the byte at which it begins."""
        self._tensors: dict[str, TensorStorageMetadata] = {}
        for file, placed, chunks in (look for part in looks for look in part):
            if not placed and len(own) > 1 and "-of-" not in file:
                raise RoleError(
                    f"{file} of the checkpoint has parts of tensors and no {_SHARDING} in its head, so another version "
                    "of rftdask wrote it; begin a new run with what `rftdask convert` makes of it"
                )
            for key, dtype_name, offsets, sizes, begin in chunks:
                dtype = _DTYPES[dtype_name]
                # The whole reaches as far as the part that ends last.
                ends = torch.Size(start + size for start, size in zip(offsets, sizes, strict=True))
                empty = TensorStorageMetadata(TensorProperties(dtype), ends, [])
                known = self._tensors.setdefault(key, empty)
                known.size = torch.Size(map(max, known.size, ends))
                known.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                self._places[MetadataIndex(key, offsets)] = (file, dtype, sizes, begin)

    @property
    def names(self) -> Collection[str]:
        """Of the tensors."""
        return self._tensors.keys()

    def empty_like(self, name: str, tensor: Tensor) -> Tensor:
        """Something to load a tensor into: spread over the ranks as `tensor` is, if it has the same shape."""
        saved = self._tensors[name]
        if saved.size == tensor.shape:
            return torch.empty_like(tensor.detach(), dtype=saved.properties.dtype)
        return torch.empty(saved.size, dtype=saved.properties.dtype)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill `tensors`, of those that are spread this rank's part. Called by all ranks, with the same names.

        Raises: RoleError: names or shapes differ. DamagedError: a file is not what was written.
        """
        lacking, unknown = tensors.keys() - self._tensors.keys(), self._tensors.keys() - tensors.keys()
        if lacking or unknown:
            raise RoleError(
                f"{self._name} of the checkpoint does not fit the model, or another version of rftdask wrote it: "
                f"missing {sorted(lacking)}, unexpected {sorted(unknown)}"
            )
        # The same memory without its graph: PyTorch's loader writes in place.
        into = {name: tensor.detach() for name, tensor in tensors.items()}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _in_our_words(f"{self._name} of the checkpoint does not fit the model"):
            load_checkpoint(into, storage_reader=self, planner=planner, process_group=self._ranks.group)
        self._held = ("", b"")

    # ---- what PyTorch calls

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Sizes and parts of all tensors, which `__init__` has gathered from the heads of the files."""
        return Metadata(dict(self._tensors))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what this rank asked for, tensor by tensor, the file that is in memory first."""
        items = [(self._places[item.storage_index], item) for item in plan.items]
        items.sort(key=lambda item: (item[0][0] != self._held[0], item[0][0], item[0][3]))
        filled, wanted = [], []
        for (file, dtype, sizes, begin), item in items:
            box = [slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True)]
            # Whole rows: they lie one after another, and of weights that are spread a rank has some rows.
            row = math.prod(sizes[1:]) * dtype.itemsize
            first, last = (box[0].start, box[0].stop) if box else (0, 1)
            target = planner.resolve_tensor(item)
            wanted.append((file, begin + first * row, begin + (last if target.numel() else first) * row))
            filled.append(_Filled(target, dtype, sizes, box))
        for number, place, data in self._parts(wanted):
            filled[number].put(place, data)
        for (_, item), each in zip(items, filled, strict=True):
            planner.commit_tensor(item, each.target)
        return _done(None)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    # ----

    def _parts(self, wanted: Sequence[_Part]) -> Iterator[tuple[int, int, np.ndarray]]:
        """(place in `wanted`, place in that part, bytes) of some of the bytes after others, in any order, until all of
        every part were there. Called by all ranks, each with what it wants.
        """
        if isinstance(self._files, InBlocks):
            yield from _exchange(self._files, wanted, self._ranks)
            return
        for number, (file, start, stop) in enumerate(wanted):
            # A copy that can be written to: torch warns of memory that cannot.
            yield number, 0, np.frombuffer(bytearray(self._whole(file)[start:stop]), np.uint8)

    def _whole(self, file: str) -> Data:
        """A file that can only be read whole, which is kept, in case that the next part is of it, too."""
        if self._held[0] != file:
            self._held = ("", b"")  # both at once may be too much
            self._held = (file, self._files[file])
        return self._held[1]

    def _look(self, file: str) -> _Look:
        """What is in a file, by its head."""
        begins = self._files.head(file) if isinstance(self._files, InBlocks) else self._whole(file)
        head, start = read_head(lambda begin, end: begins[begin:end])
        more = head.pop("__metadata__", {})
        placed = json.loads(more[_SHARDING]) if _SHARDING in more else None
        # A file without places in its head holds whole tensors, each beginning at 0.
        chunks = []
        for name, told in head.items():
            offsets = [0] * len(told["shape"]) if placed is None else list(placed[name][_OFFSETS])
            chunks.append((name, told["dtype"], offsets, told["shape"], start + told["data_offsets"][0]))
        return file, placed is not None, chunks


class _Filled:
    """A tensor that is filled in place by the bytes of whole rows of a file, which come in pieces, in any order."""

    def __init__(self, target: Tensor, dtype: torch.dtype, sizes: Sequence[int], box: Sequence[slice]) -> None:
        """dtype, sizes: of what is in the file. box: what of it `target` is to have, of all dimensions."""
        self.target, self._dtype, self._sizes, self._columns = target, dtype, sizes[1:], box[1:]
        self._row_bytes = math.prod(self._sizes) * dtype.itemsize
        self._torn: dict[int, tuple[bytearray, list[int]]] = {}
        """By number, rows of which a part has come, and how many bytes of them have not."""
        same = dtype == target.dtype and self._columns == [slice(0, size) for size in self._sizes]
        # Then bytes are copied to where they belong, whatever they are a part of.
        self._bytes = target.view(-1).view(torch.uint8) if same and target.is_contiguous() else None

    def put(self, place: int, data: np.ndarray) -> None:
        """Take bytes from this place of the rows on."""
        if self._bytes is not None:
            self._bytes[place : place + len(data)].copy_(torch.from_numpy(data))
            return
        while len(data):
            number, begin = divmod(place, self._row_bytes)
            size = len(data) - len(data) % self._row_bytes
            if begin or not size:
                size = min(self._row_bytes - begin, len(data))
                row, missing = self._torn.setdefault(number, (bytearray(self._row_bytes), [self._row_bytes]))
                row[begin : begin + size] = data[:size].data
                missing[0] -= size
                if not missing[0]:
                    self._copy(number, self._torn.pop(number)[0])
            else:
                self._copy(number, bytearray(data[:size]))
            place, data = place + size, data[size:]

    def _copy(self, number: int, data: bytearray) -> None:
        """Whole rows from this one on."""
        rows = torch.frombuffer(data, dtype=self._dtype).view([-1, *self._sizes])
        into = self.target if self.target.dim() else self.target.view(1)
        into[number : number + len(rows)].copy_(rows[(slice(None), *self._columns)])


def _deal(files: InBlocks, blocks: Iterable[_Block], size: int) -> list[list[_Block]]:
    """The blocks that each rank reads: as many bytes, and neighbors, so that ranks which load what as many of them
    saved read hardly more than what they want themselves.
    """
    in_order = sorted(blocks, key=lambda block: (len(block[0]), block))  # optim-10 after optim-9
    ends = list(accumulate(stop - start for start, stop in starmap(files.span, in_order)))
    dealt: list[list[_Block]] = [[] for _ in range(size)]
    for block, begin, end in zip(in_order, [0, *ends], ends, strict=False):
        dealt[(begin + end) * size // (2 * ends[-1] + 1)].append(block)  # by its middle
    return dealt


def _exchange(files: InBlocks, wanted: Sequence[_Part], ranks: Ranks) -> Iterator[tuple[int, int, np.ndarray]]:
    """As `SavedTensors._parts`. Each rank reads some blocks, piece by piece, at the pace of the others, and gives them
    what they want of each: a byte is read by one rank, and goes where it is wanted alone. Beside what is filled a rank
    has no more than a few pieces in memory, and of each other rank one.
    """
    of_block: dict[_Block, list[tuple[int, int, int, int]]] = defaultdict(list)
    """By block: the rank that wants a part of it, the place in what that one wants, and the first and last byte in the
    file. Each rank makes the same of what all want."""
    for rank, parts in enumerate(ranks.all_gather([list(part) for part in wanted])):
        for number, (file, start, stop) in enumerate(parts):
            _, length = files.span(file, 0)
            for block in range(start // length, -(-stop // length)) if start < stop else ():
                begin, end = files.span(file, block)
                of_block[file, block].append((rank, number, max(start, begin), min(stop, end)))
    dealt = _deal(files, of_block, ranks.size)
    pieces, failed = files.stream(dealt[ranks.rank]), None
    for at_once in zip_longest(*dealt):
        spans = [(0, 0) if block is None else files.span(*block) for block in at_once]
        for place in range(0, max(stop - start for start, stop in spans), PIECE_BYTES):
            # Of the piece of each rank.
            bounds = [(start + place, min(start + place + PIECE_BYTES, stop)) for start, stop in spans]
            given = [
                [
                    (rank, number, max(first, begin), min(last, end))
                    for rank, number, first, last in of_block.get(block, ())
                    if first < end and begin < last
                ]
                for block, (begin, end) in zip(at_once, bounds, strict=True)
            ]
            begin, end = bounds[ranks.rank]
            send, rows = [0] * ranks.size, [np.empty(0, np.uint8)]
            if begin < end:
                try:
                    data = np.frombuffer(next(pieces) if failed is None else bytes(end - begin), np.uint8)
                except RftError as error:
                    # The others wait for this rank at every piece, and are told when all have gone by.
                    data, failed = np.zeros(end - begin, np.uint8), error
                for rank, _, first, last in given[ranks.rank]:
                    send[rank] += last - first
                    rows.append(data[first - begin : last - begin])
            if not any(given):
                continue
            own = [[part for part in parts if part[0] == ranks.rank] for parts in given]
            receive = [sum(last - first for _, _, first, last in parts) for parts in own]
            got, taken = ranks.all_to_all(torch.from_numpy(np.concatenate(rows)), send, receive).numpy(), 0
            for _, number, first, last in (part for parts in own for part in parts):
                yield number, first - wanted[number][1], got[taken : taken + last - first]
                taken += last - first
    if failed is not None:
        raise failed


class _Writer(_NoFolder, StorageWriter):
    """Keeps the file of one rank."""

    def __init__(self, name: str, spare: Data) -> None:
        self._name, self._spare = name, spare
        self.files: dict[str, Data] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Make this rank's file of the parts that the plan gives it."""
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
            told = {_SHARDING: json.dumps(offsets, sort_keys=True)}
            file, places = _lay_out(kinds, told, pinned=pinned, spare=self._spare)
            for key, tensor in tensors.items():
                places[key].copy_(tensor, non_blocking=True)
            if pinned:
                torch.cuda.synchronize()
            self.files[self._name] = file
        return _done([])  # what was written is for `finish` alone

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing: there is no index beside the heads of the files."""
        pass  # the manifest of the checkpoint makes its files exist

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


@contextmanager
def _in_our_words(what: str) -> Iterator[None]:
    """Errors that PyTorch gathered from the ranks as ours, which are the same on all of them."""
    with warnings.catch_warnings():
        # It tells a process without others that it is alone.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as error:  # no Exception by its base
            # Of the lowest rank that failed, so that all ranks raise the same.
            rank, (cause, _) = min(error.failures.items())
            if isinstance(cause, RftError):
                raise cause from error
            raise RoleError(f"{what}: {type(cause).__name__} on rank {rank}: {cause}") from error
