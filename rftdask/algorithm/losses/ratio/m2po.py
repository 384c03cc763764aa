"""M2PO: drops only the few tokens of a stale batch with the most extreme ratios.

Shapes: [B, T] tokens; [N] tokens in any order; [K] counted tokens; [S] sequences.
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

    The paper takes the mean over the batch, so the mask would depend on the split into micro-batches. scope "sequence"
    bounds each sequence instead: then the mean of the batch is within the bound as well, and any split of the batch
    gives the same loss.
    """

    m2_threshold: float = 0.04
    scope: str = "sequence"
    """Scope of the mean: "sequence", or "batch" as in the paper, over the inputs of one call; pass whole batches."""
    log_ratio_clip: float = 20.0
    """Bound of |log r|, applied first."""

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
        # No clip, since the remaining tokens have a bounded second moment.
        loss_BT = -A_BT * log_r_BT.exp() * ~dropped_BT
        return loss_BT, ratio_metrics(inputs, log_r_BT, dropped_BT)

    def dropped(self, inputs: LossInputs, log_r_BT: Tensor, A_BT: Tensor) -> Tensor:
        """[B, T] bool, True for tokens over the second-moment budget of their sequence (or batch)."""
        # Only these tokens can be clipped: the step would move them further from the sampling policy.
        clippable_BT = (A_BT * log_r_BT > 0) & inputs.loss_mask_BT
        # With scope "batch" all sequences get number 0 and are bounded together.
        sequence_B = torch.arange(len(A_BT), device=A_BT.device) * (self.scope == "sequence")
        flat = log_r_BT.flatten(), clippable_BT.flatten(), inputs.spread(sequence_B).flatten()
        return over_budget(*flat, self.m2_threshold).view_as(A_BT)


_UNIT = 2.0**-30
"""Unit of squares. With |log r| <= 20 the sum of 2^24 squares is below 2^63."""


def over_budget(values_N: Tensor, counted_N: Tensor, sequence_N: Tensor, bound: float) -> Tensor:
    """Mark the largest values of each sequence so that the mean square of the others is at most `bound`.

    Equivalent to sorting the counted values of a sequence by size (stable) and keeping the longest prefix whose mean
    square is at most the bound.

    Args: values_N: [N] float, any sign. counted_N: [N] bool. sequence_N: [N] int64, the sequence of each value.
    Returns: [N] bool, True for values beyond the prefix; False if not counted.
    """
    over_N = torch.zeros_like(counted_N)
    # Integer units, so that the sums and differences below are exact in any order.
    index_K = counted_N.nonzero().squeeze(-1)
    squares_K, sequence_K = (values_N[index_K].double().square() / _UNIT).round().long(), sequence_N[index_K]
    most = round(min(bound, 1e6) / _UNIT)
    sizes_S = torch.bincount(sequence_K)
    sums_S = torch.zeros_like(sizes_S).index_add_(0, sequence_K, squares_K)
    if bool((sums_S <= most * sizes_S).all()):  # the usual case; a sort takes longer than all other operations
        return over_N
    # Sorted by size, then stably by sequence, as in `ranks_in_group`.
    order_K = torch.argsort(squares_K, stable=True)
    order_K = order_K[torch.argsort(sequence_K[order_K], stable=True)]
    squares_K, sequence_K = squares_K[order_K], sequence_K[order_K]
    starts_S = sizes_S.cumsum(0) - sizes_S
    rank_K = torch.arange(1, len(order_K) + 1, device=order_K.device) - starts_S[sequence_K]
    # Running sums within each sequence: the total running sum minus its value before the sequence.
    totals_K = squares_K.cumsum(0)
    first_K = starts_S[sequence_K]
    totals_K = totals_K - (totals_K - squares_K)[first_K]
    # Compares the running mean with the bound. Squares ascend, so it is crossed once.
    over_N[index_K[order_K]] = totals_K > most * rank_K
    return over_N


class M2poAlgorithm(AlgorithmType):
    """GRPO advantages; only the second moment is bounded, without KL."""

    algorithm_type = "m2po"
    policy_loss_fn = "m2po"
    kl_loss_fn = "none"
