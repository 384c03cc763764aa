"""Process ranks: a gang of processes connected by torch.distributed, with gloo on the CPU and NCCL on GPUs.

Every call ends by the deadline of the process group. Invariant: as for `Ranks`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rftdask.errors import PeerLostError, RoleError
from rftdask.processes.ranks import Ranks
from rftdask.trainer import flight_recorder


class ProcessRanks(Ranks):
    """The ranks of a process group of torch.distributed."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """group: None: all ranks of the process."""
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def broadcast(self, message: Any) -> Any:
        """See Ranks; two messages, since receivers must know the number of bytes."""
        data = json.dumps(message).encode() if self.is_rank0 else b""
        size = torch.tensor([len(data)])
        dist.broadcast(size, group=self.group, group_src=0)
        content = _as_tensor(data) if self.is_rank0 else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, group=self.group, group_src=0)
        return json.loads(_as_bytes(content))

    def all_gather(self, message: Any) -> list[Any]:
        """See Ranks; as JSON, which keeps floats exact."""
        return [json.loads(data) for data in self.all_gather_bytes(json.dumps(message).encode())]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """See Ranks; costs `size` times the longest part, because gloo gathers tensors of one size."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self.group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = _as_tensor(data)
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.group)
        return [_as_bytes(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]

    def exchange_bytes(self, parts: Sequence[bytes]) -> list[bytes]:
        """See Ranks; each byte goes only to its receiver."""
        send = [len(part) for part in parts]
        receive = [sizes[self.rank] for sizes in self.all_gather(send)]
        received = self.all_to_all(_as_tensor(b"".join(parts)), send, receive)
        return [_as_bytes(part) for part in received.split(receive)]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See Ranks; by NCCL if the tensor is on a GPU."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See Ranks."""
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), group=self.group)
        return received

    def neighbors(self, size: int) -> Ranks:
        """See Ranks; creates a process group for each group of neighbors."""
        if size == self.size:
            return self
        return self._split([slice(first, first + size) for first in range(0, self.size, size)], self.rank // size)

    def across(self, size: int) -> Ranks:
        """See Ranks; creates a process group for each position."""
        return self._split([slice(first, None, size) for first in range(size)], self.rank % size)

    def _split(self, parts: Sequence[slice], own_part: int) -> Ranks:
        numbers = list(range(self.size)) if self.group is None else dist.get_process_group_ranks(self.group)
        # torch requires that every rank creates every group, in the same order.
        groups = [dist.new_group(numbers[part]) for part in parts]
        return ProcessRanks(groups[own_part])


def all_ranks() -> Ranks:
    """Return all ranks of this process's gang; a gang of one if torch.distributed is not initialized."""
    connected = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return ProcessRanks() if connected else Ranks()


def lost_peer(error: RuntimeError) -> RoleError | None:
    """Translate an error of communication between ranks: PeerLostError if another rank does not answer, RoleError for a
    mistake of this rank that NCCL reports; None: the error is of another kind."""
    text = str(error)
    if "NCCL" in text or "nccl" in text:
        # NCCL names the cause in its last line. Frames of torch's code follow.
        lines = [line.strip() for line in text.partition("Exception raised from")[0].splitlines()]
        report = "; ".join(line for line in lines if line)[:1000]
        if "ncclInvalidUsage" in text or "ncclInvalidArgument" in text:  # permanent, such as two ranks on one GPU
            return RoleError(f"NCCL: {report}")
        return PeerLostError(f"NCCL: {report}{_last_calls()}")
    # By text: torch has no class for gloo's errors of a broken connection.
    if isinstance(error, dist.DistError) or "gloo" in text:
        return PeerLostError(f"another rank does not answer: {text.splitlines()[0][:300]}{_last_calls()}")
    return None


def _last_calls() -> str:
    calls = flight_recorder.of_this_process()
    return f"; {calls}" if calls else ""


def _as_tensor(data: bytes) -> Tensor:
    # A bytearray: torch warns of read-only memory.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _as_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
