"""Tensor files: tensors, whole or spread over ranks, saved and loaded as safetensors by `torch.distributed.checkpoint`.

PyTorch plans who writes what, of what several ranks hold one alone, and which part of which file a rank is to read. Its
planners are given bytes by name here, where they expect a file system. Nothing is known of models, nor where files go.

The format is that of PyTorch's HuggingFaceStorageWriter, so HuggingFaceStorageReader reads it too: a file for each rank
that writes, whose head says in JSON where each tensor begins in the whole; a file whose head does not, holds whole
tensors. There is no index beside the heads, and no pickle. Invariants: any number of ranks reads what any other number
wrote, to the bit; the same tensors on as many ranks give the same bytes.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import load, save
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from rftdask.errors import RftError, RoleError
from rftdask.trainer.ranks import Ranks

_SHARDING, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""In the head of a file: JSON {name: {"saved_offsets": [first row, first column, ...]}}. The names are PyTorch's."""

_ENDING = ".safetensors"


def save_tensors(name: str, tensors: Mapping[str, Tensor], ranks: Ranks, *, spread: bool) -> dict[str, bytes]:
    """Tensors as files, of which each rank gets what it is to write. Called by all ranks, with the same names.

    Args:
        name: of the first file; that of rank 1 is `optim-1.safetensors` where this is `optim.safetensors`.
        spread: whether each rank holds parts of its own. What several ranks hold is then for the lowest of them, so
            that a rank which later reads those parts again needs one file more; else they share the work.
    """
    writer = _Writer(f"{name.removesuffix(_ENDING)}-{ranks.rank}{_ENDING}" if ranks.rank else name)
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=spread
    )
    # In one order, since who writes what depends on it, and what a rank holds is in the order in which it came to be.
    state = dict(sorted(tensors.items()))
    with _in_our_words(f"{name} cannot be saved"):
        save_checkpoint(state, storage_writer=writer, planner=planner, process_group=ranks.group)
    return writer.files


_Look = tuple[str, bool, list[tuple[str, str, list[int], list[int]]]]
"""A file, whether its head says where tensors begin, and of each tensor: name, dtype, offsets, sizes. JSON types."""


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

    def __init__(self, name: str, files: Mapping[str, bytes], ranks: Ranks) -> None:
        """Looks into the files. Called by all ranks.

        Raises: RoleError: they are not there, or parts whose place in the whole is not known.
        """
        self._name, self._files, self._ranks = name, files, ranks
        self._held: tuple[str, dict[str, Tensor]] = ("", {})
        stem = re.escape(name.removesuffix(_ENDING))
        pattern = rf"{stem}(-\d+)?{re.escape(_ENDING)}"
        own = sorted((file for file in files if re.fullmatch(pattern, file)), key=lambda file: (len(file), file))
        if not own:
            raise RoleError(f"the checkpoint has no {name}")
        # Each rank looks into some of them, its own if as many ranks wrote: to know a part of a file is to read it all.
        looks = ranks.all_gather([self._look(file) for file in own[ranks.rank :: ranks.size]])
        self._file_of: dict[MetadataIndex, str] = {}
        self._tensors: dict[str, TensorStorageMetadata] = {}
        for file, placed, chunks in (look for part in looks for look in part):
            if not placed and len(own) > 1:
                raise RoleError(
                    f"{file} of the checkpoint has parts of tensors and no {_SHARDING} in its head, so another version "
                    "of rftdask wrote it; begin a new run with what `rftdask convert` makes of it"
                )
            for key, dtype, offsets, sizes in chunks:
                # The whole reaches as far as the part that ends last.
                ends = torch.Size(start + size for start, size in zip(offsets, sizes, strict=True))
                empty = TensorStorageMetadata(TensorProperties(getattr(torch, dtype)), ends, [])
                known = self._tensors.setdefault(key, empty)
                known.size = torch.Size(map(max, known.size, ends))
                known.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                self._file_of[MetadataIndex(key, offsets)] = file

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
        self._held = ("", {})

    # ---- what PyTorch calls

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Sizes and parts of all tensors, which `__init__` has gathered from the heads of the files."""
        return Metadata(dict(self._tensors))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what this rank asked for, file by file, the one that is in memory first."""
        # A file is parsed once, whatever is asked of it: parsing one reads all of it.
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._file_of[item.storage_index], []).append(item)
        for file in sorted(by_file, key=lambda file: (file != self._held[0], file)):
            tensors = self._read(file)
            for item in by_file[file]:
                box = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                target = planner.resolve_tensor(item)
                target.copy_(tensors[item.storage_index.fqn][box])
                planner.commit_tensor(item, target)
        return _done(None)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    # ----

    def _read(self, file: str) -> dict[str, Tensor]:
        """The tensors of a file; one is kept, in case that it is the next too."""
        if self._held[0] != file:
            self._held = ("", {})  # both at once may be too much
            self._held = (file, load(self._files[file]))
        return self._held[1]

    def _look(self, file: str) -> _Look:
        """What is in a file."""
        data = self._files[file]
        head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
        placed = json.loads(head[_SHARDING]) if _SHARDING in head else None
        self._held = (file, load(data))
        # A file without places in its head holds whole tensors, each beginning at 0.
        chunks = []
        for name, tensor in self._held[1].items():
            offsets = [0] * tensor.dim() if placed is None else list(placed[name][_OFFSETS])
            chunks.append((name, str(tensor.dtype).removeprefix("torch."), offsets, list(tensor.shape)))
        return file, placed is not None, chunks


class _Writer(_NoFolder, StorageWriter):
    """Keeps the file of one rank."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.files: dict[str, bytes] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Make this rank's file of the parts that the plan gives it."""
        tensors: dict[str, Tensor] = {}
        offsets: dict[str, dict[str, list[int]]] = {}
        for item in plan.items:
            tensor, index = planner.resolve_data(item), item.index
            assert isinstance(tensor, Tensor) and index.offset is not None and index.fqn not in tensors
            tensors[index.fqn] = tensor.detach().cpu().contiguous()
            offsets[index.fqn] = {_OFFSETS: list(index.offset)}
        if tensors:
            # One entry: the library writes several in any order, and the same state should give the same bytes.
            self.files[self._name] = save(tensors, {_SHARDING: json.dumps(offsets, sort_keys=True)})
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
            rank, (cause, _) = min(error.failures.items())
            if isinstance(cause, RftError):
                raise cause from error
            raise RoleError(f"{what}: {type(cause).__name__} on rank {rank}: {cause}") from error
