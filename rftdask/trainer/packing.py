"""Packing: the rows of a micro-batch as one sequence without padding.

The sequence consists of pieces. Each row is a piece; lean, a prompt shared by several rows is one piece, computed
once, and each response is another one, which sees the prompt and itself.
Invariants: every token of the sequence is a token of a row, except for filler if there are fewer tokens than ranks that
split it; pieces that see the most tokens come first, so that pieces of one size are neighbors.

Letters: B rows of a micro-batch; P pieces; S tokens of all pieces; K tokens that the pieces see, with a shared prompt
once for each piece; T response tokens of the longest response; Q response tokens of all rows.
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
from rftdask.processes.ranks import Ranks

if TYPE_CHECKING:
    from rftdask.trainer.sequence import SequenceSplit


@dataclass(frozen=True)
class Spans:
    """Positions of the pieces in a packed sequence, and of the tokens that they see; all that attention needs."""

    lengths: tuple[int, ...]
    """Tokens of each piece, in the order of the sequence."""
    seen: tuple[int, ...]
    """Tokens that the last token of each piece sees, including itself; descending, and never below `lengths`."""
    ends: Tensor
    """[P + 1] int32 on the device of the model: 0, then the end of each piece (cu_seqlens of attention kernels)."""
    seen_ends: Tensor
    """[P + 1] int32: 0, then the ends of the tokens seen by each piece."""
    seen_K: Tensor | None
    """[K] int64 positions in S of the tokens seen, piece after piece; None: each piece only sees itself."""

    @cached_property
    def blocks(self) -> tuple[tuple[int, int, int], ...]:
        """(pieces, tokens of each, tokens seen by each) of neighbors of one size, a batch without padding."""
        sizes = zip(self.lengths, self.seen, strict=True)
        return tuple((len(list(same)), *size) for size, same in groupby(sizes))


@dataclass(frozen=True)
class PackedImages:
    """Images of packed rows."""

    names_P: tuple[tuple[str, ...], ...]
    """Image names of the row of each piece, in the order of the sequence."""
    processor: ImageProcessor


@dataclass(frozen=True)
class PackedRows:
    """Packed rows of a micro-batch; Q has the original order of the rows.

    Example: rows [5 6 7] and [8 9 3 4] become tokens_S = [8 9 3 4 5 6 7], positions_S = [0 1 2 3 0 1 2]. Lean, the rows
    [5 6 7 1] and [5 6 8 1] with prompts of two tokens become tokens_S = [7 8 5 6], positions_S = [2 2 0 1].
    """

    tokens_S: Tensor
    """int64. With `split` this and all other S and Q tensors hold the part of this rank."""
    positions_S: Tensor
    """int64, from 0 in each row."""
    spans: Spans
    num_rows: int
    max_response: int
    """T."""
    before_Q: Tensor
    """int64: positions in S of the tokens that predict the response tokens."""
    target_Q: Tensor
    """int64: the response tokens."""
    row_Q: Tensor
    """int64: row number of each response token."""
    column_Q: Tensor
    """int64: position of each response token in its response, from 0."""
    temperature_Q: Tensor | None
    """float32: sampling temperature of each response token, 0 (greedy) counting as 1; None: all at 1."""
    split: SequenceSplit | None = None
    """Split of the sequence over ranks; None: it is whole."""
    experts_SX: Tensor | None = None
    """int16: experts to use for each token, -1 where the router chooses; None: it always chooses."""
    images: PackedImages | None = None
    """None: no row has images."""

    def aligned(self, values_Q: Tensor) -> Tensor:
        """Return [B, T] values of the response tokens ([B, T, K] for K values each), 0 beyond a row's end."""
        # Scattered by (row, column): responses differ in length, and some tokens may be on another rank.
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
        sequence: ranks that split the sequence with this one, all packing the same rows; None: it is not split.
        experts: [L, X] experts of each row; see `PackedRows`.
        images, processor: image names of each row, and their processor.
        lean: omit tokens that predict nothing, the last one of each row, and pack equal prompts once.
    Raises: ValueError: a row has no prompt, so nothing predicts its first token.
    """
    if int(prompt_lengths_B.min()) < 1:
        raise ValueError("a row has no prompt, so nothing predicts its first token; give it at least one prompt token")
    lengths_B = np.array([len(row) for row in tokens])
    response_B = lengths_B - prompt_lengths_B
    # A piece consists of the tokens begin .. end of a row; it also sees the tokens before `begin`, which are in the
    # piece of its prompt. The first B pieces belong to the rows in their original order.
    row_P, begin_P, end_P = np.arange(len(tokens)), np.zeros_like(lengths_B), lengths_B
    prompt_P = row_P
    if lean:
        by_prompt = defaultdict[bytes, list[int]](list)
        for row in np.flatnonzero(response_B):
            # With their images: different images have equal tokens.
            names = "".join(images[row]).encode() if images is not None else b""
            by_prompt[names + tokens[row][: prompt_lengths_B[row]].tobytes()].append(row)
        shared = [rows for rows in by_prompt.values() if len(rows) > 1]
        first = np.array([rows[0] for rows in shared], np.int64)
        row_P = np.concatenate([row_P, first])
        prompt_P = np.arange(len(row_P))
        for piece, rows in enumerate(shared, len(tokens)):
            prompt_P[rows] = piece
        begin_P = np.where(prompt_P == np.arange(len(row_P)), 0, prompt_lengths_B[row_P])
        end_P = np.concatenate([np.where(response_B > 0, lengths_B - 1, 0), prompt_lengths_B[first]])
    lengths_P = end_P - begin_P
    # A stable sort, so the same micro-batch gives the same sequence and the same bits.
    order = np.lexsort((-lengths_P, -end_P))
    order = order[lengths_P[order] > 0]
    ends = np.concatenate([[0], np.cumsum(lengths_P[order])])
    start_P = np.zeros_like(lengths_P)
    start_P[order] = ends[:-1]

    def find(pieces: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Return positions in S of tokens, by the piece that sees them and their index in its row."""
        in_prompt, in_piece = start_P[prompt_P[pieces]], start_P[pieces] - begin_P[pieces]
        return np.asarray(np.where(index < begin_P[pieces], in_prompt, in_piece) + index)

    row_Q, column_Q = np.repeat(np.arange(len(tokens)), response_B), _counted(response_B)
    # A token is predicted by the one before it.
    before_Q = find(row_Q, prompt_lengths_B[row_Q] + column_Q - 1)
    size = 1 if sequence is None else sequence.size
    # Filler pieces of one token, which only see themselves: models fail on a rank without tokens.
    filler = np.zeros(max(0, size - int(ends[-1])), np.int64)
    tokens_S = np.concatenate([*(tokens[row_P[i]][begin_P[i] : end_P[i]] for i in order), filler])
    positions_S = np.concatenate([_counted(lengths_P[order]) + np.repeat(begin_P[order], lengths_P[order]), filler])
    lengths, seen = (np.concatenate([values[order], filler + 1]) for values in (lengths_P, end_P))
    seen_K = None
    if begin_P.any():
        rows_K = find(np.repeat(order, end_P[order]), _counted(end_P[order]))
        seen_K = np.concatenate([rows_K, ends[-1] + np.arange(len(filler))])
    split = None
    if sequence is not None and size > 1:
        # Late: the module loads the compiler of PyTorch, which takes seconds and is needed only for split sequences.
        from rftdask.trainer.sequence import SequenceSplit

        split = SequenceSplit(sequence, len(tokens_S))
    local = slice(0, len(tokens_S)) if split is None else split.own
    is_local_Q = (before_Q >= local.start) & (before_Q < local.stop)

    experts_SX = None
    if experts is not None:
        no_experts = np.full((len(filler), experts[0].shape[1]), -1, np.int16)
        experts_SX = np.concatenate([*(experts[row_P[i]][begin_P[i] : end_P[i]] for i in order), no_experts])
    # Greedy tokens are scored as if sampled at 1: a greedy distribution has no logprobs.
    temperature_B = np.where(temperature_B == 0, 1.0, temperature_B)

    def to_device(values: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(values).to(device=device, dtype=dtype)

    def to_ends(lengths: np.ndarray) -> Tensor:
        return to_device(np.concatenate([[0], np.cumsum(lengths)]), torch.int32)

    packed_images = None
    if images is not None and processor is not None and any(images):
        packed_images = PackedImages((*(images[row_P[i]] for i in order), *([()] * len(filler))), processor)
    target_Q = np.concatenate([row[length:] for row, length in zip(tokens, prompt_lengths_B, strict=True)])
    temperature_Q = temperature_B[row_Q[is_local_Q]]
    return PackedRows(
        tokens_S=to_device(tokens_S[local]),
        positions_S=to_device(positions_S[local]),
        spans=Spans(
            tuple(lengths.tolist()),
            tuple(seen.tolist()),
            to_ends(lengths),
            to_ends(seen),
            None if seen_K is None else to_device(seen_K),
        ),
        num_rows=len(tokens),
        max_response=int(response_B.max()),
        before_Q=to_device(before_Q[is_local_Q] - local.start),
        target_Q=to_device(target_Q[is_local_Q]),
        row_Q=to_device(row_Q[is_local_Q]),
        column_Q=to_device(column_Q[is_local_Q]),
        temperature_Q=None if np.all(temperature_B == 1) else to_device(temperature_Q, torch.float32),
        split=split,
        experts_SX=None if experts_SX is None else to_device(experts_SX[local], torch.int16),
        images=packed_images,
    )


def _counted(lengths: np.ndarray) -> np.ndarray:
    """Return 0, 1, ... up to each length, one after another."""
    counted: np.ndarray = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return counted
