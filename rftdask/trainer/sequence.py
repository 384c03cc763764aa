"""Sequence parallelism: one packed sequence split over neighboring ranks (DeepSpeed Ulysses, arXiv:2309.14509).

Each rank has a contiguous run of the tokens. Everything but attention is computed per token. For attention the ranks
exchange data, from all heads of some tokens to some heads of all tokens, and back. Values of tokens are then summed, so
that each rank of the group computes the same loss of the same rows; the gradient of a value goes to the rank that
computed it. Invariant: gradients summed over a group equal those of one rank with the whole sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rftdask.processes.ranks import Ranks

_Function = TypeVar("_Function", bound=Callable[..., Any])
# Layers are compiled, exchanges between ranks are not. PyTorch's decorator is untyped.
_not_compiled: Callable[[_Function], _Function] = torch.compiler.disable


@dataclass(frozen=True)
class SequenceSplit:
    """Split of one sequence of tokens, such as 7 over two ranks into tokens 0, 1, 2 and 3, 4, 5, 6.

    Letters: S tokens of the sequence; s tokens and h heads of this rank.
    """

    ranks: Ranks
    num_tokens: int
    """S."""

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of tokens of each rank; they differ by one at most."""
        ends = [self.num_tokens * number // self.ranks.size for number in range(self.ranks.size + 1)]
        return tuple(end - begin for begin, end in pairwise(ends))

    @property
    def own(self) -> slice:
        """The tokens of this rank."""
        start = sum(self.sizes[: self.ranks.rank])
        return slice(start, start + self.sizes[self.ranks.rank])

    @_not_compiled
    def to_heads(self, query: Tensor, *keys_and_values: Tensor) -> list[Tensor]:
        """Exchange [s, heads, size] of own tokens for [S, h, size] of own heads.

        Keys and values may have fewer heads than queries; they are repeated until each rank gets whole heads.
        Raises: ValueError: the number of ranks does not divide the heads of the query.
        """
        size = self.ranks.size
        if query.shape[1] % size:
            raise ValueError(f"{query.shape[1]} attention heads cannot be split over {size} ranks")
        # With fewer key heads than ranks, each head goes to all ranks that use it.
        times = size // math.gcd(size, keys_and_values[0].shape[1])
        tensors = [query, *(t.repeat_interleave(times, 1) if times > 1 else t for t in keys_and_values)]
        # [ranks, s, values for that rank]: contiguous by receiver.
        parts = torch.cat([t.unflatten(1, (size, -1)).flatten(2) for t in tensors], dim=2).transpose(0, 1)
        swapped = self._swap(parts.flatten(0, 1), self._own_sizes, self.sizes)
        # Split the exchanged columns into query, keys and values.
        widths = [t.shape[1] // size * t.shape[2] for t in tensors]
        return [
            part.unflatten(1, (t.shape[1] // size, t.shape[2]))
            for t, part in zip(tensors, swapped.split(widths, dim=1), strict=True)
        ]

    @_not_compiled
    def to_tokens(self, values: Tensor) -> Tensor:
        """Exchange [S, h, size] of own heads for [s, heads, size] of own tokens."""
        swapped = self._swap(values.flatten(1), self.sizes, self._own_sizes)
        # [ranks * s, h * size] -> [ranks, s, h, size] -> [s, ranks, h, size] -> [s, heads, size].
        parts: Tensor = swapped.unflatten(0, (self.ranks.size, -1)).unflatten(2, values.shape[1:])
        return parts.transpose(0, 1).flatten(1, 2)

    def whole(self, values: Tensor) -> Tensor:
        """Sum values over the group; each rank has those of its own tokens and 0 elsewhere.

        The result is the same on all ranks, to the bit. Gradients are not summed: all ranks compute the same loss.
        """
        add: Callable[[Tensor, Ranks], Tensor] = _Sum.apply
        return add(values, self.ranks)

    @property
    def _own_sizes(self) -> tuple[int, ...]:
        return (self.sizes[self.ranks.rank],) * self.ranks.size

    def _swap(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        swap: Callable[[Tensor, Sequence[int], Sequence[int], Ranks], Tensor] = _Swap.apply
        return swap(rows, send, receive, self.ranks)


class _Swap(torch.autograd.Function):
    """`Ranks.all_to_all` with a gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: Sequence[int], receive: Sequence[int], ranks: Ranks) -> Tensor:
        ctx.way = receive, send, ranks
        return ranks.all_to_all(rows, send, receive)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        receive, send, ranks = ctx.way
        return ranks.all_to_all(gradient, receive, send), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: Ranks) -> Tensor:
        # Cloned, since the reduction works in place.
        return ranks.all_reduce(values.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Not summed: each rank has computed this gradient of the same loss.
        return gradient, None
