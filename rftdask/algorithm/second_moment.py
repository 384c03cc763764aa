"""The largest values of a row that push its mean square over a bound, found at the price of a few passes over it.

Knows nothing of losses or ratios. Invariant: as if the row were sorted, ties in their order in the row, and its longest
beginning taken whose mean square is within the bound; what is beyond is over.

Shapes: S rows (sequences), L values of a row, N tokens of all rows together. Masks are numbers 0 and 1 here: on a CPU a
mask of bool takes several times as long to make and to apply.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rftdask.algorithm.losses.base import above

_BEYOND = 1e18
"""Stands where nothing counts: above every value, and its square ends any budget."""
_NEAR = 1e-4
"""Share of the bound within which a rounded sum does not decide."""


def over_budget(sizes_SL: Tensor, counted_SL: Tensor, bound: float) -> Tensor:
    """[S, L] 1 for the values over the budget of their row.

    Args: sizes_SL: float, not negative, 0 where not counted. counted_SL: 1 for values that count, else 0.
    """
    budget_S = bound * counted_SL.sum(-1)
    over = (sizes_SL.square().sum(-1) > (1.0 - _NEAR) * budget_S).nonzero().squeeze(-1)
    if not len(over):  # the usual case
        return torch.zeros_like(sizes_SL)
    if len(over) == len(sizes_SL):
        return _over_budget(sizes_SL, counted_SL, bound)
    result_SL = torch.zeros_like(sizes_SL)
    result_SL[over] = _over_budget(sizes_SL[over], counted_SL[over], bound)
    return result_SL


def over_budget_packed(sizes_N: Tensor, counted_N: Tensor, sequence_N: Tensor, bound: float) -> Tensor:
    """[N] the same for sequences in rows that are packed; sequence_N: which one the token is of."""
    result_N = torch.zeros_like(sizes_N)
    for tokens_SL, inside_SL in _tables(sequence_N):
        sizes_SL, counted_SL = (values_N[tokens_SL] * inside_SL for values_N in (sizes_N, counted_N))
        over_SL = over_budget(sizes_SL, counted_SL, bound)
        result_N.index_add_(0, tokens_SL.flatten(), over_SL.flatten())
    return result_N


def _tables(sequence_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """[S, L] places of the tokens of some sequences, and 1 where there is one; sequences of like length together, so
    that a table is at most half empty."""
    order_N = torch.arange(len(sequence_N), device=sequence_N.device)
    if bool((sequence_N[1:] < sequence_N[:-1]).any()):
        order_N = torch.argsort(sequence_N, stable=True)
    lengths_S = torch.bincount(sequence_N)
    starts_S = lengths_S.cumsum(0) - lengths_S
    power_S = torch.log2(lengths_S.clamp(min=1).double()).ceil().long()
    for power in torch.unique(power_S[lengths_S > 0]).tolist():
        here = ((power_S == power) & (lengths_S > 0)).nonzero().squeeze(-1)
        column_L = torch.arange(int(lengths_S[here].max()), device=sequence_N.device)
        inside_SL = column_L < lengths_S[here, None]
        places_SL = (starts_S[here, None] + column_L).clamp(max=len(sequence_N) - 1)
        yield order_N[places_SL], inside_SL.view(torch.uint8)


def _over_budget(sizes_SL: Tensor, counted_SL: Tensor, bound: float) -> Tensor:
    ascending_SL = _ascending(torch.add(sizes_SL, 1.0 - counted_SL, alpha=_BEYOND))
    ranks_L = torch.arange(1, sizes_SL.shape[1] + 1, dtype=torch.float64, device=sizes_SL.device)
    totals_SL = ascending_SL.double().square().cumsum(-1)
    num_within_S = (sizes_SL.shape[1] - above(totals_SL, bound * ranks_L).sum(-1)).long()
    last_S1 = (num_within_S - 1).clamp(min=0)[:, None]
    cut_S1 = ascending_SL.gather(1, last_S1).masked_fill(num_within_S[:, None] == 0, -1.0)
    over_SL = above(sizes_SL, cut_S1) * counted_SL
    next_S1 = ascending_SL.gather(1, (last_S1 + 1).clamp(max=sizes_SL.shape[1] - 1))
    split = ((next_S1 == cut_S1) & (num_within_S[:, None] < sizes_SL.shape[1])).nonzero()[:, 0]
    if len(split):  # of values equal to the last one within, some are over: the later ones in the row
        equal_SL = (sizes_SL[split] == cut_S1[split]) & counted_SL[split].bool()
        num_equal_S1 = num_within_S[split, None] - (ascending_SL[split] < cut_S1[split]).sum(-1, keepdim=True)
        over_SL[split] += (equal_SL & (equal_SL.cumsum(-1) > num_equal_S1)).to(over_SL.dtype)
    return over_SL


def _ascending(values_SL: Tensor) -> Tensor:
    """The rows sorted. On a CPU by numpy: torch sorts indices along, which takes some thirty times as long."""
    if values_SL.device.type == "cpu":
        return torch.from_numpy(np.sort(values_SL.numpy(), axis=-1))
    return values_SL.sort(dim=-1).values
