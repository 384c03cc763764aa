"""The fake at the seam of ranks: threads of one process that exchange in memory what processes send each other."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from rftdask.trainer.ranks import Ranks


class ThreadRanks(Ranks):
    """One thread's view of its gang."""

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.size = rank, len(board)
        self._board = board
        self._barrier = barrier

    def broadcast(self, message: Any) -> Any:
        """Through JSON, as between processes: what would not travel fails here too."""
        return json.loads(self._all(json.dumps(message))[0])

    def all_gather(self, message: Any) -> list[Any]:
        """Through JSON, in the order of the ranks."""
        return [json.loads(data) for data in self._all(json.dumps(message))]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """In the order of the ranks; they may differ in length."""
        return self._all(data)

    def exchange_bytes(self, parts: Sequence[bytes]) -> list[bytes]:
        """In the order of the ranks; they may differ in length."""
        return [of_rank[self.rank] for of_rank in self._all(list(parts))]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum in place; each rank adds all parts by itself, in one order, and gets the same bits."""
        # A clone: the tensor itself is overwritten while slower ranks may still read it.
        parts = self._all(tensor.clone())
        return tensor.copy_(torch.stack(parts).sum(0))

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Raises: AssertionError: the numbers of rows do not fit those of the other ranks."""
        assert [len(rows), sum(receive)] == [sum(send), sum(receive)]
        found = [parts[self.rank] for parts in self._all(rows.clone().split(list(send)))]
        assert [len(part) for part in found] == list(receive)
        return torch.cat(found)

    def _all(self, value: Any) -> list[Any]:
        self._board[self.rank] = value  # each rank its own place: no lock is needed
        self._barrier.wait()
        found = list(self._board)
        self._barrier.wait()  # nobody writes the next before all have read this
        return found


def in_threads(size: int, target: Callable[..., Any], num_groups: int = 1, deadline_s: float = 30.0) -> list[Any]:
    """Call `target` once for each rank and return what each gives; called with `num_groups` gangs of the same ranks.

    Raises: the error of the first rank that has one of its own; a rank that others wait for in vain breaks their wait.
    """
    barriers = [threading.Barrier(size, timeout=deadline_s) for _ in range(num_groups)]
    boards: list[list[Any]] = [[None] * size for _ in barriers]

    def run(rank: int) -> Any:
        try:
            return target(*(ThreadRanks(rank, *pair) for pair in zip(boards, barriers, strict=True)))
        except BaseException:
            for barrier in barriers:
                barrier.abort()  # else the other ranks would wait for this one until their deadline
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [e for e in (future.exception() for future in futures) if e is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
