"""Fake ranks: threads of one process that exchange messages in memory instead of between processes."""

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from rftdask.processes.ranks import Ranks


class ThreadRanks(Ranks):
    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.size = rank, len(board)
        self._board = board
        self._barrier = barrier

    def broadcast(self, message: Any) -> Any:
        """Broadcast through JSON, as between processes, so that values JSON cannot encode fail here as well."""
        return json.loads(self._all(json.dumps(message))[0])

    def all_gather(self, message: Any) -> list[Any]:
        return [json.loads(data) for data in self._all(json.dumps(message))]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self._all(data)

    def exchange_bytes(self, parts: Sequence[bytes]) -> list[bytes]:
        return [of_rank[self.rank] for of_rank in self._all(list(parts))]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum in place. Each rank adds all parts in the same order, so all get the same bits."""
        # A clone, since the tensor is overwritten while slower ranks may still read it.
        parts = self._all(tensor.clone())
        return tensor.copy_(torch.stack(parts).sum(0))

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Exchange rows. Raises: AssertionError: the row counts do not match those of the other ranks."""
        assert [len(rows), sum(receive)] == [sum(send), sum(receive)]
        found = [parts[self.rank] for parts in self._all(rows.clone().split(list(send)))]
        assert [len(part) for part in found] == list(receive)
        return torch.cat(found)

    def _all(self, value: Any) -> list[Any]:
        self._board[self.rank] = value  # each rank has its own slot, so no lock is needed
        self._barrier.wait()
        found = list(self._board)
        self._barrier.wait()  # no rank writes the next value before all have read this one
        return found


def in_threads(size: int, target: Callable[..., Any], num_groups: int = 1, deadline_s: float = 30.0) -> list[Any]:
    """Call `target` once per rank, with `num_groups` gangs of the same ranks, and return the results in rank order.

    Raises: the error of the first rank that failed; the waits of the other ranks are then broken.
    """
    barriers = [threading.Barrier(size, timeout=deadline_s) for _ in range(num_groups)]
    boards: list[list[Any]] = [[None] * size for _ in barriers]

    def run(rank: int) -> Any:
        try:
            return target(*(ThreadRanks(rank, *pair) for pair in zip(boards, barriers, strict=True)))
        except BaseException:
            for barrier in barriers:
                barrier.abort()  # otherwise the other ranks would wait for this one until their deadline
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [e for e in (future.exception() for future in futures) if e is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
