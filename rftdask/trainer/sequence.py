"""Sequence: one packed sequence split over neighboring ranks, each with a run of its tokens (DeepSpeed Ulysses,
arXiv:2309.14509). It knows neither models nor losses.

All but attention looks at one token at a time, and is computed where the token lies. For attention the ranks swap: from
all heads of some tokens to some heads of all tokens, and back. What is said of tokens is then brought together, so each
rank of the group makes the same loss of the same rows; the gradient of a number goes to the rank that computed it.
Invariant: added over the ranks of a group, gradients are those of one rank with the whole sequence.
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

from rftdask.trainer.ranks import Ranks

_Function = TypeVar("_Function", bound=Callable[..., Any])
# Layers are compiled, exchanges with other ranks are not. PyTorch's decorator itself says nothing of types.
_not_compiled: Callable[[_Function], _Function] = torch.compiler.disable


@dataclass(frozen=True)
class SequenceSplit:
    """How one sequence of tokens is split. Letters: S tokens of it; s tokens of this rank; h heads of this rank.

    Example: 7 tokens over two ranks are tokens 0, 1, 2 and 3, 4, 5, 6.
    """

    ranks: Ranks
    """Of the group, in the order of their parts."""
    num_tokens: int
    """S."""

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each rank; they differ by one at most."""
        # By multiplication, so that the parts of all ranks meet without a word between them.
        ends = [self.num_tokens * number // self.ranks.size for number in range(self.ranks.size + 1)]
        return tuple(end - begin for begin, end in pairwise(ends))

    @property
    def own(self) -> slice:
        """The tokens of this rank."""
        start = sum(self.sizes[: self.ranks.rank])
        return slice(start, start + self.sizes[self.ranks.rank])

    @_not_compiled
    def to_heads(self, query: Tensor, *keys_and_values: Tensor) -> list[Tensor]:
        """[s, heads, size] of own tokens -> [S, h, size] of own heads, by one exchange.

        Keys and values may have fewer heads than queries; they are repeated as often as gives each rank whole heads.
        Raises: ValueError: the ranks do not divide the heads of the query.
        """
        size = self.ranks.size
        if query.shape[1] % size:
            raise ValueError(f"{query.shape[1]} attention heads cannot be split over {size} ranks")
        # Fewer heads of keys than ranks: each is given to as many ranks as use it.
        times = size // math.gcd(size, keys_and_values[0].shape[1])
        tensors = [query, *(t.repeat_interleave(times, 1) if times > 1 else t for t in keys_and_values)]
        # [ranks, s, numbers for that rank]: what goes to one rank lies together.
        parts = torch.cat([t.unflatten(1, (size, -1)).flatten(2) for t in tensors], dim=2).transpose(0, 1)
        swapped = self._swap(parts.flatten(0, 1), self._own_sizes, self.sizes)
        # Query, keys and values went in one exchange, side by side; here they are parted again.
        widths = [t.shape[1] // size * t.shape[2] for t in tensors]
        return [
            part.unflatten(1, (t.shape[1] // size, t.shape[2]))
            for t, part in zip(tensors, swapped.split(widths, dim=1), strict=True)
        ]

    @_not_compiled
    def to_tokens(self, values: Tensor) -> Tensor:
        """[S, h, size] of own heads -> [s, heads, size] of own tokens."""
        swapped = self._swap(values.flatten(1), self.sizes, self._own_sizes)
        # [ranks * s, h * size] -> [ranks, s, h, size] -> [s, ranks, h, size] -> [s, heads, size].
        parts: Tensor = swapped.unflatten(0, (self.ranks.size, -1)).unflatten(2, values.shape[1:])
        return parts.transpose(0, 1).flatten(1, 2)

    def whole(self, values: Tensor) -> Tensor:
        """The sum over the group of what each rank gives for its own tokens, 0 elsewhere; the same on all of them, to
        the bit. The gradient of the sum is that of a rank's own part: all make the same loss, which counts once.
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
    """`Ranks.all_to_all`; its gradient goes back the same way."""

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
        # A clone: the reduction works in place, and the input is the caller's.
        return ranks.all_reduce(values.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Not summed over the ranks: each of them has computed this same gradient of the same loss.
        return gradient, None
