"""Passes: the micro-batches of one rank in one step, and what is scored in them brought together over the ranks.

Letters: as in padding.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rftdask.trainer.engines.padding import PaddedRows
from rftdask.trainer.engines.row_balance import deal, rows_of_units, unit_costs
from rftdask.trainer.packing import micro_batches
from rftdask.trainer.ranks import Ranks


@dataclass(frozen=True)
class Passes:
    """What this rank computes of a batch."""

    ranks: Ranks
    counts: bool
    """Whether sums take what this rank says of rows: where several ranks compute the same rows, one of them does."""
    own: list[np.ndarray]
    """Row numbers of each pass over own rows."""
    num_idle: int
    """Passes over rows of no consequence, so that all ranks make the same number, or at least one."""
    filler: np.ndarray
    """The rows of an idle pass: few and short."""

    def scored(self, rows: PaddedRows, score: Callable[..., Tensor]) -> Tensor:
        """[N, T] float32 of what `score` says of every response token of the batch; without gradients."""
        idle = [rows.scored([self.filler], score) for _ in range(self.num_idle)]
        values = rows.scored(self.own, score) if self.own else torch.zeros_like(idle[0])
        return self.ranks.all_reduce(values if self.counts else torch.zeros_like(values))

    def add_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The sums of all passes of all ranks, by name."""
        return self.ranks.add_metrics(dict(sums) if self.counts else {})

    def idle_backward(self, rows: PaddedRows, score: Callable[..., Tensor]) -> None:
        """The idle passes of an update: forward and backward, gradient 0."""
        for _ in range(self.num_idle):
            (score(**rows.model_inputs(self.filler)) * 0.0).sum().backward()


def plan_passes(
    lengths: np.ndarray,
    ranks: Ranks,
    *,
    hidden_size: int,
    max_tokens: float,
    max_rows: int | None,
    unit: int,
    together: bool,
    group: Ranks | None = None,
) -> Passes:
    """Rows dealt to the ranks by cost, then cut into micro-batches.

    Args:
        unit: neighbors that are never parted.
        together: all ranks must make the same number of passes.
        group: the ranks that compute the same rows with this one; the rows are dealt to such groups. None: no other.
    """
    size = 1 if group is None else group.size
    cut: list[list[np.ndarray]] = []
    for units in deal(unit_costs(lengths, hidden_size, unit), ranks.size // size):
        members = rows_of_units(units, unit)
        if not len(members):
            cut.append([])
            continue
        parts = micro_batches(
            lengths[members],
            max_tokens=max_tokens,
            max_rows=max_rows,
            unit=unit,
            costs=unit_costs(lengths[members], hidden_size),
        )
        cut.append([members[part] for part in parts])
    own = cut[ranks.rank // size]
    # A rank without rows makes a pass all the same, to know the shapes of what it adds nothing to.
    num_idle = max(len(parts) for parts in cut) - len(own) if together else int(not own)
    shortest = np.array([int(np.argmin(lengths.reshape(-1, unit).max(axis=1)))])
    return Passes(ranks, group is None or group.is_rank0, own, num_idle, rows_of_units(shortest, unit))
