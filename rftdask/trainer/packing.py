"""Packing: the rows of a micro-batch as one sequence without padding.

It knows neither models nor losses. Rows lie in it as pieces: each row is one; or, packed lean, a prompt that several
rows begin with is one piece, computed once, and each of their responses another, which sees the prompt and itself.
Invariants: a token of the packed sequence is a token of a row (but for a few where fewer tokens than ranks are split);
pieces that see the most tokens come first, so that pieces of one size are neighbors.

Letters: B rows of a micro-batch; P pieces; S tokens of all of them; K tokens that they see, a shared prompt once for
each piece; T response tokens of the longest response; Q response tokens of all rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rftdask.data.images import ImageProcessor
from rftdask.trainer.ranks import Ranks

if TYPE_CHECKING:
    from rftdask.trainer.sequence import SequenceSplit


@dataclass(frozen=True)
class Spans:
    """Where pieces lie in a packed sequence and what they see of it, which is all that attention must know."""

    lengths: tuple[int, ...]
    """Tokens of each piece in the order in which they lie."""
    seen: tuple[int, ...]
    """Tokens that the last token of each piece sees, itself among them: the most first. Never less than `lengths`."""
    ends: Tensor
    """[P + 1] int32 on the device of the model: 0, then where each piece ends (cu_seqlens of the attention kernels)."""
    seen_ends: Tensor
    """[P + 1] int32, the same of what they see."""
    seen_K: Tensor | None
    """[K] int64 places in S of what they see, piece after piece; None: all see themselves alone."""

    @cached_property
    def blocks(self) -> tuple[tuple[int, int, int], ...]:
        """(pieces, tokens of each, tokens that each sees) of neighbors of one size: what attention takes as a batch
        without padding."""
        sizes = zip(self.lengths, self.seen, strict=True)
        return tuple((len(list(same)), *size) for size, same in groupby(sizes))


@dataclass(frozen=True)
class PackedImages:
    """The images of packed rows."""

    names_P: tuple[tuple[str, ...], ...]
    """Of the row of each piece, in the order in which the pieces lie."""
    processor: ImageProcessor


@dataclass(frozen=True)
class PackedRows:
    """The rows of a micro-batch, packed; what is said of them has their given order again.

    Example: rows [5 6 7] and [8 9 3 4] become tokens_S = [8 9 3 4 5 6 7], positions_S = [0 1 2 3 0 1 2]. Lean, the rows
    [5 6 7 1] and [5 6 8 1] with prompts of two tokens become tokens_S = [7 8 5 6], positions_S = [2 2 0 1].
    """

    tokens_S: Tensor
    """int64; with `split` the part of this rank, and so are positions_S and everything of Q."""
    positions_S: Tensor
    """int64, from 0 in each row."""
    spans: Spans
    num_rows: int
    max_response: int
    """T."""
    before_Q: Tensor
    """int64: places in S of what predicts the response tokens, row by row as given."""
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
    images: PackedImages | None = None
    """None: no row has any."""

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
    images: Sequence[tuple[str, ...]] | None = None,
    processor: ImageProcessor | None = None,
    lean: bool = False,
) -> PackedRows:
    """Pack rows whose first `prompt_lengths_B` tokens are the prompt, the rest the response.

    Args:
        sequence: the ranks that split the sequence with this one, which all pack the same rows; None: nobody does.
        experts: [L, X] of each row; see `PackedRows`.
        images, processor: names of the images of each row, and what gives them to a model.
        lean: only what predicts response tokens is packed: no row's last token, and equal prompts once.
    Raises: ValueError: a row without a prompt: nothing predicts its first token.
    """
    if int(prompt_lengths_B.min()) < 1:
        raise ValueError("a row has no prompt, so nothing predicts its first token; give it at least one prompt token")
    lengths_B = np.array([len(row) for row in tokens])
    response_B = lengths_B - prompt_lengths_B
    # Each piece is the tokens begin .. end of a row, and sees those before them, too, which lie in the piece of its
    # prompt. The first B pieces are of the rows as given.
    row_P, begin_P, end_P = np.arange(len(tokens)), np.zeros_like(lengths_B), lengths_B
    prompt_P = row_P
    if lean:
        alike = defaultdict[bytes, list[int]](list)
        for row in np.flatnonzero(response_B):
            # Tokens of images are alike, and the images are not.
            own = "".join(images[row]).encode() if images is not None else b""
            alike[own + tokens[row][: prompt_lengths_B[row]].tobytes()].append(row)
        shared = [rows for rows in alike.values() if len(rows) > 1]
        first = np.array([rows[0] for rows in shared], np.int64)
        row_P = np.concatenate([row_P, first])
        prompt_P = np.arange(len(row_P))
        for piece, rows in enumerate(shared, len(tokens)):
            prompt_P[rows] = piece
        begin_P = np.where(prompt_P == np.arange(len(row_P)), 0, prompt_lengths_B[row_P])
        end_P = np.concatenate([np.where(response_B > 0, lengths_B - 1, 0), prompt_lengths_B[first]])
    lengths_P = end_P - begin_P
    # Stable: pieces of one size lie as they were given, so the same micro-batch gives the same sequence and bits.
    order = np.lexsort((-lengths_P, -end_P))
    order = order[lengths_P[order] > 0]
    ends = np.concatenate([[0], np.cumsum(lengths_P[order])])
    start_P = np.zeros_like(lengths_P)
    # The inverse of the sort: piece order[i] begins where the i-th packed one does.
    start_P[order] = ends[:-1]

    def places(pieces: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Where tokens lie, by the piece that sees them and their number in its row."""
        of_prompt, own = start_P[prompt_P[pieces]], start_P[pieces] - begin_P[pieces]
        return np.asarray(np.where(index < begin_P[pieces], of_prompt, own) + index)

    row_Q, column_Q = np.repeat(np.arange(len(tokens)), response_B), _counted(response_B)
    # What predicts a token is the one before it.
    before_Q = places(row_Q, prompt_lengths_B[row_Q] + column_Q - 1)
    size = 1 if sequence is None else sequence.size
    # Pieces of one token, of no consequence: every rank has a token, without which models fail.
    spare = np.zeros(max(0, size - int(ends[-1])), np.int64)
    tokens_S = np.concatenate([*(tokens[row_P[i]][begin_P[i] : end_P[i]] for i in order), spare])
    positions_S = np.concatenate([_counted(lengths_P[order]) + np.repeat(begin_P[order], lengths_P[order]), spare])
    # They see themselves alone.
    lengths, seen = (np.concatenate([values[order], spare + 1]) for values in (lengths_P, end_P))
    seen_K = None
    if begin_P.any():
        own_K = places(np.repeat(order, end_P[order]), _counted(end_P[order]))
        seen_K = np.concatenate([own_K, ends[-1] + np.arange(len(spare))])
    split = None
    if sequence is not None and size > 1:
        # Late: the module loads the compiler of PyTorch, which takes seconds, and who packs whole sequences, or only
        # looks at rewards, does without it.
        from rftdask.trainer.sequence import SequenceSplit

        split = SequenceSplit(sequence, len(tokens_S))
    held = slice(0, len(tokens_S)) if split is None else split.own
    own_Q = (before_Q >= held.start) & (before_Q < held.stop)

    experts_SX = None
    if experts is not None:
        of_spare = np.full((len(spare), experts[0].shape[1]), -1, np.int16)
        experts_SX = np.concatenate([*(experts[row_P[i]][begin_P[i] : end_P[i]] for i in order), of_spare])
    # Greedy tokens have no distribution of their own: they are scored as if sampled at 1.
    temperature_B = np.where(temperature_B == 0, 1.0, temperature_B)

    def put(values: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(values).to(device=device, dtype=dtype)

    def put_ends(lengths: np.ndarray) -> Tensor:
        return put(np.concatenate([[0], np.cumsum(lengths)]), torch.int32)

    target_Q = np.concatenate([row[length:] for row, length in zip(tokens, prompt_lengths_B, strict=True)])
    return PackedRows(
        tokens_S=put(tokens_S[held]),
        positions_S=put(positions_S[held]),
        spans=Spans(
            tuple(lengths.tolist()),
            tuple(seen.tolist()),
            put_ends(lengths),
            put_ends(seen),
            None if seen_K is None else put(seen_K),
        ),
        num_rows=len(tokens),
        max_response=int(response_B.max()),
        before_Q=put(before_Q[own_Q] - held.start),
        target_Q=put(target_Q[own_Q]),
        row_Q=put(row_Q[own_Q]),
        column_Q=put(column_Q[own_Q]),
        temperature_Q=None if np.all(temperature_B == 1) else put(temperature_B[row_Q[own_Q]], torch.float32),
        split=split,
        experts_SX=None if experts_SX is None else put(experts_SX[held], torch.int16),
        images=None
        if images is None or processor is None or not any(images)
        else PackedImages((*(images[row_P[i]] for i in order), *([()] * len(spare))), processor),
    )


def _counted(lengths: np.ndarray) -> np.ndarray:
    """0, 1, ... up to each length, one after another."""
    counted: np.ndarray = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return counted
