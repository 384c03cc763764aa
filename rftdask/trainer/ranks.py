"""Ranks: what the ranks of one gang say to each other. It knows neither batches nor models, nor torch's processes.

Small messages are JSON, and go over the CPU; tensors are added where they lie. Every call is made by all ranks in the
same order. Invariant: what `all_gather` and `all_reduce` give is the same, to the bit, on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


class Ranks:
    """One rank's view of its gang; this base is a gang of one, which needs no torch.

    Example, on both of two ranks: ranks.all_gather({"rank": ranks.rank}) == [{"rank": 0}, {"rank": 1}]
    """

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None
    """Of torch.distributed; None: all ranks of the process, or a gang that is not of processes."""

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0, which owns ledger, pointers, metrics and the commit of checkpoints."""
        return self.rank == 0

    def broadcast(self, message: Any) -> Any:
        """The message of rank 0, whatever the others give. JSON types."""
        return message

    def all_gather(self, message: Any) -> list[Any]:
        """What every rank gives, in their order. JSON types; floats come through unchanged."""
        return [message]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """What every rank gives, in their order."""
        return [data]

    def exchange_bytes(self, parts: Sequence[bytes]) -> list[bytes]:
        """What every rank has for this one, in their order. parts: what this one has for each."""
        return list(parts)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        return tensor

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """What every rank has for this one, in their order: `send` rows go to each, `receive` come from each."""
        return rows

    def neighbors(self, size: int) -> Ranks:
        """The gang of this rank among gangs of `size` neighbors each. Called by all ranks of the process group."""
        return self

    def across(self, size: int) -> Ranks:
        """The gang of the ranks with this one's place among `size` neighbors. Called as `neighbors`."""
        return self

    def add_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Sums by name; a rank may lack some."""
        sums: dict[str, float] = {}
        # In the order of the ranks on all of them, so that sums are equal to the bit.
        for part in self.all_gather(metrics):
            for name, value in part.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums
