"""From per-token losses to one number: aggregation as weights that are fixed once for the whole batch.

A mode is a [B, T] tensor of weights with loss = (per_token_loss * weights).sum(). The weights are computed over the
whole batch before it is cut up, so the losses, and with them the gradients, of any split into micro-batches or ranks
add up to the full batch's. Knows nothing of losses. Invariant: a token outside the loss mask has weight exactly 0.
"""

import torch
from torch import Tensor

from rftdask.algorithm.checks import one_of

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def token_weights(
    loss_mask_BT: Tensor, mode: str, *, max_tokens: int | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Weights of the tokens in the loss, float32, for the four aggregations.

    token-mean               1 / (trained tokens of the batch)                       DAPO, arXiv:2503.14476
    seq-mean-token-mean      1 / (sequences * trained tokens of the sequence)        GRPO, arXiv:2402.03300
    seq-mean-token-sum       1 / sequences
    seq-mean-token-sum-norm  1 / (sequences * max_tokens)                            Dr. GRPO, arXiv:2503.20783

    A sequence without a trained token weighs 0 and is not counted among the sequences: a failed rollout does not
    shrink the loss of the others.

    Args:
        loss_mask_BT: [B, T] bool, True where the token is trained, of the WHOLE batch (all ranks, all micro-batches).
        mode: one of `AGGREGATIONS`.
        max_tokens: longest response that may be sampled, in tokens; needed by seq-mean-token-sum-norm only. The width T
            is no substitute, since it depends on who else is in the batch.
        dtype: of the result; float64 for comparisons beyond seven digits.
    Returns: [B, T] of `dtype`. All 0 when nothing is trained.
    Raises: ValueError: unknown mode, or max_tokens missing where it is needed.
    """
    one_of("loss_agg_mode", mode, AGGREGATIONS)
    mask = loss_mask_BT.to(dtype)
    if mode == "token-mean":
        return mask / mask.sum().clamp(min=1.0)
    lengths_B1 = mask.sum(-1, keepdim=True)
    num_sequences = (lengths_B1 > 0).sum().clamp(min=1)
    if mode == "seq-mean-token-sum":
        return mask / num_sequences
    if mode == "seq-mean-token-sum-norm":
        if max_tokens is None or max_tokens <= 0:
            raise ValueError(
                f"{mode} divides by the longest possible response: max_tokens must be > 0, got {max_tokens}"
            )
        return mask / (num_sequences * max_tokens)
    # [B, T]: first within each sequence, then over sequences, so that long ones do not count for more.
    return mask / (lengths_B1.clamp(min=1.0) * num_sequences)
