"""Process ranks: the ranks of one gang as processes that meet over torch.distributed, gloo on the CPU, NCCL on GPUs.

Every call ends by the deadline of the process group. Invariant: as of `Ranks`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rftdask.errors import PeerLostError, RoleError
from rftdask.trainer import flight_recorder
from rftdask.trainer.ranks import Ranks


class ProcessRanks(Ranks):
    """The ranks of a process group of torch.distributed."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """group: None takes all ranks of the process."""
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def broadcast(self, message: Any) -> Any:
        """See Ranks; two messages, since the others must know how many bytes to take."""
        data = json.dumps(message).encode() if self.is_rank0 else b""
        size = torch.tensor([len(data)])
        dist.broadcast(size, group=self.group, group_src=0)
        content = _as_tensor(data) if self.is_rank0 else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, group=self.group, group_src=0)
        return json.loads(_as_bytes(content))

    def all_gather(self, message: Any) -> list[Any]:
        """See Ranks; as JSON, whose floats are the shortest text that gives the same number again."""
        return [json.loads(data) for data in self.all_gather_bytes(json.dumps(message).encode())]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """See Ranks; costs `size` times the longest part, because gloo gathers tensors of one size."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self.group)
        longest = max(int(size) for size in sizes)
        # Filled up with zeros to the longest, and cut again by the sizes that were told before.
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = _as_tensor(data)
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.group)
        return [_as_bytes(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]

    def exchange_bytes(self, parts: Sequence[bytes]) -> list[bytes]:
        """See Ranks; no byte goes to a rank that it is not for."""
        send = [len(part) for part in parts]
        receive = [sizes[self.rank] for sizes in self.all_gather(send)]
        found = self.all_to_all(_as_tensor(b"".join(parts)), send, receive)
        return [_as_bytes(part) for part in found.split(receive)]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See Ranks; by NCCL where the tensor is on a GPU."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See Ranks; by one exchange."""
        found = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(found, rows.contiguous(), list(receive), list(send), group=self.group)
        return found

    def neighbors(self, size: int) -> Ranks:
        """See Ranks; makes a process group for each gang."""
        if size == self.size:
            return self
        members = range(self.size) if self.group is None else dist.get_process_group_ranks(self.group)
        # Every rank makes every group, in the same order: torch demands it also of those that are in none of them.
        groups = [dist.new_group(list(members[first : first + size])) for first in range(0, self.size, size)]
        return ProcessRanks(groups[self.rank // size])

    def across(self, size: int) -> Ranks:
        """See Ranks; makes a process group for each gang."""
        members = range(self.size) if self.group is None else dist.get_process_group_ranks(self.group)
        # As in `neighbors`: all ranks make all groups.
        groups = [dist.new_group(list(members[place::size])) for place in range(size)]
        return ProcessRanks(groups[self.rank % size])


def all_ranks() -> Ranks:
    """All ranks that this process has met; a gang of one where it has met none."""
    met = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return ProcessRanks() if met else Ranks()


_OWN_FAULTS = ("ncclInvalidUsage", "ncclInvalidArgument")
"""What NCCL says of a mistake, such as two ranks on one GPU; it would come again."""


def lost_peer(error: RuntimeError) -> RoleError | None:
    """The error in our words, if ranks cannot speak with each other: PeerLostError where another one does not answer,
    another RoleError where NCCL says that this one is wrong. None: it is of another kind.
    """
    text = str(error)
    if "NCCL" in text or "nccl" in text:
        # All that NCCL says of it: the cause is in its last line. Below are the frames of torch's own code.
        lines = [line.strip() for line in text.partition("Exception raised from")[0].splitlines()]
        told = "; ".join(line for line in lines if line)[:1000]
        if any(fault in text for fault in _OWN_FAULTS):
            return RoleError(f"NCCL: {told}")
        return PeerLostError(f"NCCL: {told}{_recorded()}")
    # By their words: torch has no class for what gloo and NCCL say of a broken connection.
    if isinstance(error, dist.DistError) or "gloo" in text:
        return PeerLostError(f"another rank does not answer: {text.splitlines()[0][:300]}{_recorded()}")
    return None


def _recorded() -> str:
    told = flight_recorder.of_this_process()
    return f"; {told}" if told else ""


def _as_tensor(data: bytes) -> Tensor:
    # A bytearray: torch warns of memory that cannot be written to.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _as_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
