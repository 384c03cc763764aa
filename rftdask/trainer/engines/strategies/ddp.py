"""ddp: every rank holds the whole model; gradients are added once per step, after its last backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rftdask.processes.ranks import Ranks
from rftdask.trainer.engines.strategies.base import Strategy

_BUCKET = 2**25
"""Elements summed in one call: 128 MiB of float32. Fixed, since the order of additions depends on it."""


class DDP(Strategy):
    """All ranks hold equal weights: same files, same seed, same sums."""

    def reduce(self, parameters: Sequence[Tensor]) -> None:
        """See Strategy; bucket by bucket in the order of the parameters, so that sums repeat to the bit."""
        for bucket in _buckets(parameters):
            # A parameter without a gradient here may have one on another rank.
            gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket]
            for parameter, total in zip(bucket, _sums(self.ranks, gradients), strict=True):
                # Views of one flat tensor save a copy of all gradients.
                parameter.grad = total.view_as(parameter)


def add_up(ranks: Ranks, tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over the ranks, in place."""
    for bucket in _buckets(tensors) if ranks.size > 1 else ():
        for tensor, total in zip(bucket, _sums(ranks, bucket), strict=True):
            tensor.copy_(total.view_as(tensor))


def _sums(ranks: Ranks, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # One large message is faster than hundreds of small ones.
    flat = ranks.all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    sums: tuple[Tensor, ...] = flat.split([tensor.numel() for tensor in tensors])
    return sums


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for parameter in parameters:
        if bucket and (
            # Of one dtype: the tensors of a bucket are sent as one.
            sum(p.numel() for p in bucket) + parameter.numel() > _BUCKET or parameter.dtype != bucket[0].dtype
        ):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
