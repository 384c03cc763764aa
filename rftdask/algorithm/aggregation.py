"""From per-token losses to one number: aggregation as weights that are fixed once for the whole batch.

A mode is a weight for each row, which all its trained tokens have: loss = (per_token_loss * mask * weights).sum(). A
sequence is a rollout, all its rows together: how often its history was rewritten says nothing of what it weighs. The
weights are computed over the whole batch before it is cut up, so the losses, and with them the gradients, of any split
into micro-batches or ranks add up to the full batch's. Knows nothing of losses. Invariant: a row without a trained
token has weight exactly 0.
"""

import torch
from torch import Tensor

from rftdask.algorithm.checks import one_of

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def row_weights(
    counts_B: Tensor,
    mode: str,
    *,
    rollout_B: Tensor | None = None,
    max_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight of each trained token of a row in the loss, for the four aggregations.

    token-mean               1 / (trained tokens of the batch)                       DAPO, arXiv:2503.14476
    seq-mean-token-mean      1 / (sequences * trained tokens of the sequence)        GRPO, arXiv:2402.03300
    seq-mean-token-sum       1 / sequences
    seq-mean-token-sum-norm  1 / (sequences * max_tokens)                            Dr. GRPO, arXiv:2503.20783

    A sequence without a trained token weighs 0 and is not counted among the sequences: a failed rollout does not
    shrink the loss of the others.

    Args:
        counts_B: [B] int64, trained tokens of each row of the WHOLE batch (all ranks, all micro-batches).
        mode: one of `AGGREGATIONS`.
        rollout_B: [B] int64, the rollout of each row, from 0; None: each row is a rollout.
        max_tokens: longest response that may be sampled, in tokens; needed by seq-mean-token-sum-norm only. The longest
            that is there is no substitute, since it depends on who else is in the batch.
        dtype: of the result; float64 for comparisons beyond seven digits.
    Returns: [B] of `dtype`; 0 for rows without a trained token.
    Raises: ValueError: unknown mode, or max_tokens missing where it is needed.
    """
    one_of("loss_agg_mode", mode, AGGREGATIONS)
    # Of the whole batch, therefore the sums below are denominators that no cut changes.
    trained_B = (counts_B > 0).to(dtype)
    if mode == "token-mean":
        return trained_B / counts_B.sum().to(dtype).clamp(min=1.0)
    counts_R, sequence_B = counts_B, torch.arange(len(counts_B), device=counts_B.device)
    if rollout_B is not None:
        sequence_B = torch.unique(rollout_B, return_inverse=True)[1]
        counts_R = torch.zeros_like(counts_B).index_add_(0, sequence_B, counts_B)
    num_sequences = (counts_R > 0).sum().clamp(min=1)
    if mode == "seq-mean-token-sum":
        return trained_B / num_sequences
    if mode == "seq-mean-token-sum-norm":
        if max_tokens is None or max_tokens <= 0:
            raise ValueError(
                f"{mode} divides by the longest possible response: max_tokens must be > 0, got {max_tokens}"
            )
        return trained_B / (num_sequences * max_tokens)
    # First within each sequence, then over sequences, so that long ones do not count for more.
    return trained_B / (counts_R[sequence_B].to(dtype).clamp(min=1.0) * num_sequences)
