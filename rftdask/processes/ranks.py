"""Ranks: communication between the ranks of one gang. It knows neither batches nor models, nor torch's processes.

Small messages are JSON and go over the CPU; tensors are summed on their device. All ranks make every call, in the same
order. Invariant: `all_gather` and `all_reduce` return the same bits on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


class Ranks:
    """One rank's view of its gang; this base class is a gang of one, which does not need torch."""

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None
    """Process group of torch.distributed; None: all ranks of the process, or no processes."""

    @property
    def is_rank0(self) -> bool:
        """True for rank 0, which owns ledger, pointers, metrics and the commit of checkpoints."""
        return self.rank == 0

    def broadcast(self, message: Any) -> Any:
        """Return the message of rank 0; those of other ranks are ignored. JSON types."""
        return message

    def all_gather(self, message: Any) -> list[Any]:
        """Return the messages of all ranks, by rank. JSON types; floats are unchanged."""
        return [message]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, by rank."""
        return [data]

    def exchange_bytes(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send parts[r] to rank r; return the parts received, by rank."""
        return list(parts)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place."""
        return tensor

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send the next send[r] rows to rank r; return the rows received, receive[r] from rank r, by rank."""
        return rows

    def neighbors(self, size: int) -> Ranks:
        """Return the group of `size` neighbors that includes this rank. Called by all ranks of the process group."""
        return self

    def across(self, size: int) -> Ranks:
        """Return the ranks with the same position among their `size` neighbors. Called by all ranks."""
        return self

    def add_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return sums over the ranks by name; a rank may lack some names."""
        sums: dict[str, float] = {}
        # In the order of the ranks, so that sums are equal to the bit.
        for rank_metrics in self.all_gather(metrics):
            for name, value in rank_metrics.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums
