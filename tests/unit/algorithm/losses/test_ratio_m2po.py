"""Promises of the second-moment bound: it equals sorting, including ties and packed rows."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rftdask.algorithm.losses.ratio import over_budget
from tests.numerics import shifted_seed
from tests.unit.algorithm.algorithm_cases import POLICY_LOSS_FNS, random_batch

# Squares and sums of these are exact, so both sides compare the same numbers.
SIZES = st.sampled_from([0.0, 0.125, 0.25, 0.25, 0.5, 0.5, 0.75, 1.0, 4.0])
BOUNDS = st.sampled_from([0.0, 0.0625, 0.25, 0.28125, 0.5, 1.0, 20.0])
ROW = st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=24)


def by_sorting(row: list[tuple[float, bool]], bound: float) -> list[float]:
    """The definition: sort what counts, stably, and take the longest beginning whose mean square is within."""
    order = sorted((i for i, (_, counted) in enumerate(row) if counted), key=lambda i: row[i][0])
    over, total = [0.0] * len(row), 0.0
    for rank, place in enumerate(order, start=1):
        total += row[place][0] ** 2
        over[place] = float(total / rank > bound)
    return over


def columns(row: list[tuple[float, bool]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.tensor([size for size, _ in row], dtype=dtype), torch.tensor([counted for _, counted in row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=300, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=6), bound=BOUNDS, mixed=st.booleans())
def test_over_budget_equals_sorting_per_sequence(
    dtype: torch.dtype, rows: list[list[tuple[float, bool]]], bound: float, mixed: bool
) -> None:
    sizes_N, counted_N = (torch.cat(parts) for parts in zip(*(columns(row, dtype) for row in rows), strict=True))
    sequence_N = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(row) for row in rows]))
    want_N = torch.tensor([over for row in rows for over in by_sorting(row, bound)])
    if mixed:  # tokens of a sequence need not be neighbors
        order = torch.argsort(torch.arange(len(sizes_N)) * 7 % 5, stable=True)
        sizes_N, counted_N, sequence_N = (x[order] for x in (sizes_N, counted_N, sequence_N))
        want_N = mixed_ties(sizes_N, counted_N, sequence_N, bound)
    signs_N = torch.where(torch.arange(len(sizes_N)) % 2 == 0, 1.0, -1.0).to(dtype)  # only the size counts
    assert torch.equal(over_budget(sizes_N * signs_N, counted_N, sequence_N, bound).float(), want_N)


def mixed_ties(sizes_N: Tensor, counted_N: Tensor, sequence_N: Tensor, bound: float) -> Tensor:
    """The definition for tokens in any order: ties go by the place in the whole."""
    want_N = torch.zeros(len(sizes_N))
    for number in sequence_N.unique().tolist():
        here = (sequence_N == number).nonzero().squeeze(-1)
        row = list(zip(sizes_N[here].tolist(), counted_N[here].bool().tolist(), strict=True))
        want_N[here] = torch.tensor(by_sorting(row, bound))
    return want_N


@pytest.mark.parametrize("bound", [0.01, 0.04, 1.0])
def test_over_budget_equals_sorting_for_random_values(bound: float) -> None:
    generator = torch.Generator().manual_seed(shifted_seed(3))
    counted_SL = torch.rand(6, 300, generator=generator) > 0.5
    sizes_SL = torch.randn(6, 300, generator=generator).abs() * torch.tensor([[1.0, 2, 0.1, 0, 9, 0.3]]).T
    sequence_SL = torch.arange(6)[:, None].expand(6, 300)
    got = over_budget(sizes_SL.flatten(), counted_SL.flatten(), sequence_SL.flatten(), bound).view(6, 300).float()
    rows = [list(zip(sizes_SL[i].tolist(), counted_SL[i].tolist(), strict=True)) for i in range(6)]
    assert got.tolist() == [by_sorting(row, bound) for row in rows]


def test_m2po_bounds_the_second_moment_of_every_sequence() -> None:
    loss = POLICY_LOSS_FNS["m2po"](m2_threshold=0.04)
    batch = replace(random_batch(21, 8, 40), proximal_logprobs_BT=None).cleaned()
    log_r = (batch.policy_logprobs_BT - batch.rollout_logprobs_BT).detach()
    advantages = batch.advantages()
    dropped = loss.dropped(batch, log_r, advantages).bool()
    trusted = batch.loss_mask_BT & (advantages * log_r > 0)
    assert dropped.any() and (trusted & ~dropped).any() and not (dropped & ~trusted).any()
    for row in range(8):
        kept = log_r[row][(trusted & ~dropped)[row]].square()
        assert len(kept) == 0 or kept.mean() <= 0.04
        gone = log_r[row][dropped[row]].square()
        assert len(gone) == 0 or torch.cat([kept, gone.min()[None]]).mean() > 0.04
