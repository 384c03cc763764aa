"""Aggregation of per-token losses to one number, as weights computed once for the whole batch.

A mode gives each row a weight for all its trained tokens: loss = (per_token_loss * mask * weights).sum(). A sequence is
a rollout with all its rows, so its weight does not depend on how often its history was rewritten. The weights are
computed over the whole batch before it is split, so losses and gradients of any split into micro-batches or ranks add
up to those of the batch. Knows nothing of losses. Invariant: a row without a trained token has weight exactly 0.
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

    A sequence without a trained token has weight 0 and is not counted, so a failed rollout does not shrink the loss of
    the others.

    Args:
        counts_B: [B] int64, trained tokens of each row of the WHOLE batch (all ranks, all micro-batches).
        mode: one of `AGGREGATIONS`.
        rollout_B: [B] int64, the rollout of each row, from 0. None: each row is a rollout.
        max_tokens: maximum response length in tokens, for seq-mean-token-sum-norm. The longest response of the batch
            cannot replace it, since it depends on the other rows.
        dtype: data type of the result; float64 for comparisons beyond seven digits.
    Returns: [B] of `dtype`; 0 for rows without a trained token.
    Raises: ValueError: unknown mode, or max_tokens missing where it is needed.
    """
    one_of("loss_agg_mode", mode, AGGREGATIONS)
    # counts_B covers the whole batch, so no split changes the denominators below.
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
            raise ValueError(f"{mode} divides by the maximum response length: max_tokens must be > 0, got {max_tokens}")
        return trained_B / (num_sequences * max_tokens)
    # Mean within each sequence, then over sequences, so that long sequences do not weigh more.
    return trained_B / (counts_R[sequence_B].to(dtype).clamp(min=1.0) * num_sequences)
