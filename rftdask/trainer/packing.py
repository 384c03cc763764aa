"""Packing: the rows of a micro-batch as one sequence without padding.

It knows neither models nor losses. Invariants: a token of the packed sequence is a token of a row (but for a few where
fewer tokens than ranks are split); rows lie in it from the longest to the shortest, so that rows of one length are
neighbors.

Letters: B rows of a micro-batch; S tokens of all of them; T response tokens of the longest response; Q response tokens
of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rftdask.trainer.ranks import Ranks

if TYPE_CHECKING:
    from rftdask.trainer.sequence import SequenceSplit


@dataclass(frozen=True)
class RowSpans:
    """Where rows lie in a packed sequence, which is all that attention must know."""

    lengths: tuple[int, ...]
    """Tokens of each row in the order in which they lie, the longest first."""
    ends: Tensor
    """[B + 1] int32 on the device of the model: 0, then where each row ends (cu_seqlens of the attention kernels)."""

    @cached_property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """(rows, tokens of each) of neighboring rows of one length: what attention takes as a batch without padding."""
        return tuple((len(list(same)), length) for length, same in groupby(self.lengths))


@dataclass(frozen=True)
class PackedRows:
    """The rows of a micro-batch, packed; what is said of them has their given order again.

    Example: rows [5 6 7] and [8 9 3 4] become tokens_S = [8 9 3 4 5 6 7], positions_S = [0 1 2 3 0 1 2].
    """

    tokens_S: Tensor
    """int64; with `split` the part of this rank, and so are positions_S and everything of Q."""
    positions_S: Tensor
    """int64, from 0 in each row."""
    spans: RowSpans
    num_rows: int
    max_response: int
    """T."""
    place_Q: Tensor
    """int64: places in S of the response tokens, row by row as given; the place before each is what predicts it, and
    the token itself may be the first of the next rank."""
    target_Q: Tensor
    """int64: the response tokens."""
    row_Q: Tensor
    """int64: number of its row, as given."""
    column_Q: Tensor
    """int64: which token of its response it is, from 0."""
    temperature_Q: Tensor | None
    """float32: at which the response token was sampled, 0 (greedy) counting as 1; None: at 1, all of them."""
    split: SequenceSplit | None = None
    """How the sequence is split over ranks; None: it is not."""
    experts_SX: Tensor | None = None
    """int16: experts that the tokens are to take, -1 where a router is to choose; None: it always is."""

    def aligned(self, values_Q: Tensor) -> Tensor:
        """[B, T] of what is said of every response token ([B, T, K] of K numbers each), 0 beyond a row's end."""
        # Scattered by (row, column): responses differ in length, and of a split sequence some are another rank's.
        shape = (self.num_rows, self.max_response, *values_Q.shape[1:])
        aligned_BT = values_Q.new_zeros(shape).index_put((self.row_Q, self.column_Q), values_Q)
        return aligned_BT if self.split is None else self.split.whole(aligned_BT)


def pack_rows(
    tokens: Sequence[np.ndarray],
    prompt_lengths_B: np.ndarray,
    temperature_B: np.ndarray,
    device: torch.device | str = "cpu",
    *,
    sequence: Ranks | None = None,
    experts: Sequence[np.ndarray] | None = None,
) -> PackedRows:
    """Pack rows whose first `prompt_lengths_B` tokens are the prompt, the rest the response.

    Args:
        sequence: the ranks that split the sequence with this one, which all pack the same rows; None: nobody does.
        experts: [L, X] of each row; see `PackedRows`.
    Raises: ValueError: a row without a prompt: nothing predicts its first token.
    """
    if int(prompt_lengths_B.min()) < 1:
        raise ValueError("a row has no prompt, so nothing predicts its first token; give it at least one prompt token")
    lengths_B = np.array([len(row) for row in tokens])
    # Stable: rows of one length lie as they were given, so the same micro-batch gives the same sequence and bits.
    order = np.argsort(-lengths_B, kind="stable")
    # [B + 1] in the packed order; `start_B` in the order given.
    ends = np.concatenate([[0], np.cumsum(lengths_B[order])])
    start_B = np.empty_like(lengths_B)
    # The inverse of the sort: row order[i] begins where the i-th packed one does.
    start_B[order] = ends[:-1]
    response_B = lengths_B - prompt_lengths_B
    row_Q = np.repeat(np.arange(len(tokens)), response_B)
    column_Q = _counted(response_B)
    # Where a row begins, past its prompt, then one place for each token of the response.
    place_Q = (start_B + prompt_lengths_B)[row_Q] + column_Q
    size = 1 if sequence is None else sequence.size
    # Rows of one token, of no consequence: every rank has a token, without which models fail.
    spare = np.zeros(max(0, size - int(ends[-1])), np.int64)
    tokens_S = np.concatenate([*(tokens[i] for i in order), spare])
    positions_S = np.concatenate([_counted(lengths_B[order]), spare])
    # Spare tokens are rows of length 1: they see themselves alone.
    spans_B = np.concatenate([lengths_B[order], spare + 1])
    split = None
    if sequence is not None and size > 1:
        # Late: the module loads the compiler of PyTorch, which takes seconds, and who packs whole sequences, or only
        # looks at rewards, does without it.
        from rftdask.trainer.sequence import SequenceSplit

        split = SequenceSplit(sequence, len(tokens_S))
    held = slice(0, len(tokens_S)) if split is None else split.own
    own_Q = (place_Q > held.start) & (place_Q <= held.stop)  # what predicts a token lies one before it

    experts_SX = None
    if experts is not None:
        of_spare = np.full((len(spare), experts[0].shape[1]), -1, np.int16)
        experts_SX = np.concatenate([*(experts[i] for i in order), of_spare])
    # Greedy tokens have no distribution of their own: they are scored as if sampled at 1.
    temperature_B = np.where(temperature_B == 0, 1.0, temperature_B)

    def put(values: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(values).to(device=device, dtype=dtype)

    return PackedRows(
        tokens_S=put(tokens_S[held]),
        positions_S=put(positions_S[held]),
        spans=RowSpans(tuple(spans_B.tolist()), put(np.concatenate([[0], np.cumsum(spans_B)]), torch.int32)),
        num_rows=len(tokens),
        max_response=int(response_B.max()),
        place_Q=put(place_Q[own_Q] - held.start),
        # Out of the whole sequence: the target of a rank's last token is the first token of the next rank.
        target_Q=put(tokens_S[place_Q[own_Q]]),
        row_Q=put(row_Q[own_Q]),
        column_Q=put(column_Q[own_Q]),
        temperature_Q=None if np.all(temperature_B == 1) else put(temperature_B[row_Q[own_Q]], torch.float32),
        split=split,
        experts_SX=None if experts_SX is None else put(experts_SX[held], torch.int16),
    )


def _counted(lengths: np.ndarray) -> np.ndarray:
    """0, 1, ... up to each length, one after another."""
    counted: np.ndarray = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return counted
