"""Dealing: which rows of a batch each rank computes. Pure, and the same on all ranks, which know all lengths.

Letters: U units (rows that are never parted, one after another in the batch).
"""

from __future__ import annotations

import heapq

import numpy as np


def deal(costs_U: np.ndarray, size: int) -> list[np.ndarray]:
    """Units of each of `size` ranks, ascending: the dearest first, each to the rank with the least so far.

    No rank gets more than the mean plus the dearest unit. One rank gets all.
    """
    heap = [(0.0, rank) for rank in range(size)]
    units: list[list[int]] = [[] for _ in range(size)]
    for unit in np.argsort(-costs_U, kind="stable"):
        cost, rank = heapq.heappop(heap)
        units[rank].append(int(unit))
        heapq.heappush(heap, (cost + float(costs_U[unit]), rank))
    return [np.array(sorted(own), dtype=np.int64) for own in units]


def unit_costs(lengths_N: np.ndarray, hidden_size: int, unit: int = 1) -> np.ndarray:
    """[U] cost of each unit's rows: products with weights, 12 H^2 L a layer, and of attention, H L^2 (causal).

    In units of H a layer; the factor that both have, and the backward pass triples, is left out.
    """
    costs_N = lengths_N * (12.0 * hidden_size + lengths_N)
    return np.asarray(costs_N.reshape(-1, unit).sum(axis=1))


def rows_of_units(units: np.ndarray, unit: int) -> np.ndarray:
    """Row numbers of these units."""
    return np.asarray((units[:, None] * unit + np.arange(unit)).reshape(-1))
