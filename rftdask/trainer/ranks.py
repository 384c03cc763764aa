"""Ranks: what the ranks of one gang say to each other. It knows neither batches nor models.

Small messages are JSON, and go over the CPU; tensors are added where they lie. Every call is made by all ranks in the
same order, and ends by the deadline of the process group. Invariant: what `gather` and `add` give is the same, to the
bit, on all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rftdask.errors import PeerLostError


class Ranks:
    """One rank's view of its gang; without a process group a gang of one.

    Example, on both of two ranks: Ranks().gather({"rank": own}) == [{"rank": 0}, {"rank": 1}]
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """group: None takes all ranks of the process."""
        self.group = group
        there = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if there else 0
        self.size = dist.get_world_size(group) if there else 1

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which owns ledger, pointers, metrics and the commit of checkpoints."""
        return self.rank == 0

    def tell(self, message: Any) -> Any:
        """The message of rank 0, whatever the others give. JSON types."""
        if self.size == 1:
            return message
        data = json.dumps(message).encode() if self.leads else b""
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0, group=self.group)
        content = _as_tensor(data) if self.leads else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, 0, group=self.group)
        return json.loads(_as_bytes(content))

    def gather(self, message: Any) -> list[Any]:
        """What every rank gives, in their order. JSON types; floats come through unchanged."""
        if self.size == 1:
            return [message]
        return [json.loads(data) for data in self.gather_bytes(json.dumps(message).encode())]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """What every rank gives, in their order."""
        if self.size == 1:
            return [data]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self.group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = _as_tensor(data)
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.group)
        return [_as_bytes(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def swap(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """What every rank has for this one, in their order: `send` rows go to each, `receive` come from each."""
        if self.size == 1:
            return rows
        found = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(found, rows.contiguous(), list(receive), list(send), group=self.group)
        return found

    def neighbors(self, size: int) -> Ranks:
        """The gang of this rank among gangs of `size` neighbors each. Called by all ranks of the process group."""
        if size == self.size:
            return self
        members = range(self.size) if self.group is None else dist.get_process_group_ranks(self.group)
        groups = [dist.new_group(list(members[first : first + size])) for first in range(0, self.size, size)]
        return Ranks(groups[self.rank // size])

    def across(self, size: int) -> Ranks:
        """The gang of the ranks with this one's place among `size` neighbors. Called as `neighbors`."""
        members = range(self.size) if self.group is None else dist.get_process_group_ranks(self.group)
        groups = [dist.new_group(list(members[place::size])) for place in range(size)]
        return Ranks(groups[self.rank % size])

    def add_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Sums by name; a rank may lack some."""
        sums: dict[str, float] = {}
        for part in self.gather(metrics):
            for name, value in part.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums


def lost_peer(error: RuntimeError) -> PeerLostError | None:
    """The error in our words, if torch raised it because another rank does not answer; else None."""
    text = str(error)
    if isinstance(error, dist.DistError) or "gloo" in text or "NCCL" in text:
        return PeerLostError(f"another rank does not answer: {text.splitlines()[0][:300]}")
    return None


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _as_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
