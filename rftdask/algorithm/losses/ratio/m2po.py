"""M2PO: of a stale batch only the few tokens whose ratios spread furthest are dropped.

Shapes: [B, T] tokens; [N] tokens in any order; [K] of them that count; [S] sequences.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rftdask.algorithm.algorithm_type import AlgorithmType
from rftdask.algorithm.checks import one_of, require
from rftdask.algorithm.kl import MAX_LOG_RATIO
from rftdask.algorithm.losses.base import LossInputs, PolicyLoss, ratio_metrics


@dataclass(frozen=True)
class M2po(PolicyLoss):
    """-A r, without the tokens that push the second moment of log r over a threshold. M2PO, arXiv:2510.01161,
    algorithm 1.

    Of the tokens that PPO could clip (A > 0 and r > 1, or A < 0 and r < 1) those with the largest (log r)^2 are dropped
    until the mean of the rest is at most `m2_threshold`. Dropped tokens stay in the denominator, as in the paper.

    The paper takes the mean over the batch; that mask depends on who shares the micro-batch. scope "sequence" bounds
    each sequence instead: the batch's mean is then within the bound as well, and any cut of the batch gives the same
    loss.
    """

    m2_threshold: float = 0.04
    scope: str = "sequence"
    """"sequence", or "batch": the paper's, over what is in the call; give whole batches."""
    log_ratio_clip: float = 20.0
    """log r is kept within +- this, before anything is made of it."""

    loss_name = "m2po"

    def __post_init__(self) -> None:
        require(self.m2_threshold >= 0.0, f"m2_threshold must be >= 0, got {self.m2_threshold}")
        one_of("scope", self.scope, ("sequence", "batch"))
        within = 0.0 < self.log_ratio_clip <= MAX_LOG_RATIO
        require(within, f"log_ratio_clip must be in (0, {MAX_LOG_RATIO}], got {self.log_ratio_clip}")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        A_BT = inputs.advantages()
        log_r_BT = inputs.log_ratio().clamp(-self.log_ratio_clip, self.log_ratio_clip)
        dropped_BT = self.dropped(inputs, log_r_BT.detach(), A_BT)
        # No clip beside it: what is left has a bounded second moment.
        loss_BT = -A_BT * log_r_BT.exp() * ~dropped_BT
        return loss_BT, ratio_metrics(inputs, log_r_BT, dropped_BT)

    def dropped(self, inputs: LossInputs, log_r_BT: Tensor, A_BT: Tensor) -> Tensor:
        """[B, T] bool, True for tokens over the second-moment budget of their sequence (or batch)."""
        # Only these can be clipped, in which the step would move the token still further from the sampler.
        clippable_BT = (A_BT * log_r_BT > 0) & inputs.loss_mask_BT
        # Times False: all sequences have number 0, and are bounded together.
        sequence_B = torch.arange(len(A_BT), device=A_BT.device) * (self.scope == "sequence")
        flat = log_r_BT.flatten(), clippable_BT.flatten(), inputs.spread(sequence_B).flatten()
        return over_budget(*flat, self.m2_threshold).view_as(A_BT)


_UNIT = 2.0**-30
"""Squares are counted in these. With log r within +-20 the sum of 2^24 of them is below 2^63."""


def over_budget(values_N: Tensor, counted_N: Tensor, sequence_N: Tensor, bound: float) -> Tensor:
    """The largest values of each sequence, without which the mean square of the rest is within a bound.

    As if the counted values of a sequence were sorted by size, equal ones in their order, and its longest beginning
    taken whose mean square is at most the bound: what is beyond is over.

    Args: values_N: [N] float, any sign. counted_N: [N] bool. sequence_N: [N] int64, the sequence of each value.
    Returns: [N] bool, True for values that are over; False where not counted.
    """
    over_N = torch.zeros_like(counted_N)
    # In whole units: sums over all sequences are subtracted from each other below, and are exact in any order so.
    index_K = counted_N.nonzero().squeeze(-1)
    squares_K, sequence_K = (values_N[index_K].double().square() / _UNIT).round().long(), sequence_N[index_K]
    most = round(min(bound, 1e6) / _UNIT)
    sizes_S = torch.bincount(sequence_K)
    sums_S = torch.zeros_like(sizes_S).index_add_(0, sequence_K, squares_K)
    if bool((sums_S <= most * sizes_S).all()):  # the usual case, and a sort takes longer than all the rest
        return over_N
    # As in `ranks_in_group`: by size, then by sequence, which keeps the order of sizes.
    order_K = torch.argsort(squares_K, stable=True)
    order_K = order_K[torch.argsort(sequence_K[order_K], stable=True)]
    squares_K, sequence_K = squares_K[order_K], sequence_K[order_K]
    starts_S = sizes_S.cumsum(0) - sizes_S
    rank_K = torch.arange(1, len(order_K) + 1, device=order_K.device) - starts_S[sequence_K]
    # Sums from the beginning of each sequence: those from the beginning of all, less what was there before it.
    totals_K = squares_K.cumsum(0)
    first_K = starts_S[sequence_K]
    totals_K = totals_K - (totals_K - squares_K)[first_K]
    # The running sum against most * count is the running mean against the bound; squares ascend, so it is crossed
    # once.
    over_N[index_K[order_K]] = totals_K > most * rank_K
    return over_N


class M2poAlgorithm(AlgorithmType):
    """GRPO's advantages; the second moment is the only bound, no KL."""

    algorithm_type = "m2po"
    policy_loss_fn = "m2po"
    kl_loss_fn = "none"
