"""Attention over packed rows: every token attends to its own row up to itself, and to no other row.

An attention implementation of transformers, registered as `PACKED`; a model called with `spans` passes them on to it.
Without `spans` it is plain SDPA. A model packs rows only if the results are right (`pack_if_equal`).

On a GPU in half precision the variable-length kernel of PyTorch handles all rows in one call. Elsewhere SDPA runs over
batches of pieces of one size; on a CPU a block-diagonal mask over the whole sequence took 10 to 50 times as long.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rftdask.models.image_models import packed_with_images, packs_images, with_images
from rftdask.trainer.packing import PackedRows, Spans, pack_rows
from rftdask.trainer.sequence import SequenceSplit

PACKED = "rftdask_packed"
_LAYERS = {"full_attention", "sliding_attention"}
_CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Largest relative difference of hidden states: far above rounding, far below the effect of another row."""


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    spans: Spans | None = None,
    split: SequenceSplit | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers: query [1, heads, S, size], key and value with fewer heads.

    Args: split: None: the tokens are the whole sequence; else they are this rank's part of it.
    Returns: ([1, S, heads, size], None).
    Raises: ValueError: the layer uses learned biases, sinks or capped scores, which packed rows do not support.
    """
    # Generation or unpacked rows: SDPA with the mask of transformers.
    if spans is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    unsupported = [name for name in ("position_bias", "s_aux", "softcap") if options.get(name) is not None]
    if unsupported:
        raise ValueError(f"{type(module).__name__} uses {', '.join(unsupported)}, unsupported for packed rows")
    # [1, heads, S, size] -> [S, heads, size], as the kernel and the split take it.
    query_S, key_S, value_S = (tensor.transpose(1, 2)[0] for tensor in (query, key, value))
    if query.is_cuda and torch.is_autocast_enabled("cuda"):  # autocast does not cast inputs of custom kernels
        half = torch.get_autocast_dtype("cuda")
        query_S, key_S, value_S = query_S.to(half), key_S.to(half), value_S.to(half)
    # From some tokens of all heads to all tokens of some heads.
    if split is not None:
        query_S, key_S, value_S = split.to_heads(query_S, key_S, value_S)
    if query.is_cuda and query_S.dtype in (torch.float16, torch.bfloat16) and not dropout:
        out_S = _by_kernel(query_S, key_S, value_S, spans, scaling, sliding_window)
    else:
        out_S = _by_length(query_S, key_S, value_S, spans, scaling, sliding_window, dropout)
    return (out_S if split is None else split.to_tokens(out_S))[None], None


@cache
def _has_switch(kernel: Callable[..., object]) -> bool:
    return "enable_gqa" in inspect.signature(kernel).parameters


def _by_kernel(
    query_S: Tensor, key_S: Tensor, value_S: Tensor, spans: Spans, scaling: float | None, window: int | None
) -> Tensor:
    # Late: the import registers operators for a tenth of a second, which a CPU does not need.
    from torch.nn.attention.varlen import varlen_attn

    # Pieces are sorted by the tokens that they see, the most first.
    longest, most = max(spans.lengths), spans.seen[0]
    # The kernel counts the tokens before a token, not the token itself; -1: no limit. It aligns the ends of queries and
    # keys.
    left = -1 if window is None or window >= most else window - 1
    # PyTorch 2.12 needs a switch for grouped-query attention that 2.11, which always supports it, does not know.
    switch: dict[str, Any] = {"enable_gqa": query_S.shape[1] != key_S.shape[1]} if _has_switch(varlen_attn) else {}
    if spans.seen_K is not None:
        key_S, value_S = key_S.index_select(0, spans.seen_K), value_S.index_select(0, spans.seen_K)
    out: Any = varlen_attn(
        query_S.contiguous(),
        key_S.contiguous(),
        value_S.contiguous(),
        spans.ends,
        spans.seen_ends,
        longest,
        most,
        scale=scaling,
        window_size=(left, 0),
        **switch,
    )
    assert isinstance(out, Tensor)
    return out


def _by_length(
    query_S: Tensor,
    key_S: Tensor,
    value_S: Tensor,
    spans: Spans,
    scaling: float | None,
    window: int | None,
    dropout: float,
) -> Tensor:
    parts, begin, seen_begin = [], 0, 0
    for pieces, length, seen in spans.blocks:
        end, seen_end = begin + pieces * length, seen_begin + pieces * seen
        keys, values = key_S[begin:end], value_S[begin:end]
        if length < seen:
            assert spans.seen_K is not None, "a piece that sees more than itself has positions in seen_K"
            positions = spans.seen_K[seen_begin:seen_end]
            keys, values = key_S.index_select(0, positions), value_S.index_select(0, positions)
        # [pieces * length, heads, size] -> [pieces, heads, length, size], without a copy.
        query = query_S[begin:end].unflatten(0, (pieces, length)).transpose(1, 2)
        key, value = (t.unflatten(0, (pieces, seen)).transpose(1, 2) for t in (keys, values))
        mask = None
        if length < seen or (window is not None and window < seen):
            # A token sees itself and the tokens before it, with a window only the last window - 1 of them.
            position = torch.arange(seen, device=query_S.device)
            distance = position[seen - length :, None] - position[None, :]
            mask = (distance >= 0) & (distance < (window or seen))
        out = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query_S.shape[1] != key_S.shape[1],
        )
        parts.append(out.transpose(1, 2).flatten(0, 1))
        begin, seen_begin = end, seen_end
    return parts[0] if len(parts) == 1 else torch.cat(parts)


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)


def hidden_states(model: torch.nn.Module, rows: PackedRows) -> Tensor:
    """Return [S, H] last hidden states of the rows' tokens, or of this rank's part if the rows are split. model: a
    causal language model or its body; one that does not pack computes row after row."""
    body: Any = getattr(model, "base_model", model)
    if body.config._attn_implementation == PACKED and (rows.images is None or packs_images(body)):
        return _packed_states(body, rows)
    assert rows.split is None, "only packed rows are split, see `check_model`"
    return _unpacked_states(body, rows)


def _packed_states(body: Any, rows: PackedRows) -> Tensor:
    inputs: dict[str, Any] = {"position_ids": rows.positions_S[None]}
    if rows.images is not None:
        pieces = list(zip(_seen(rows), rows.spans.lengths, strict=True))
        inputs = packed_with_images(body, pieces, rows.images.names_P, rows.images.processor)
    states: Tensor = body(
        input_ids=rows.tokens_S[None],
        **inputs,
        # Four dimensions: models take it for a finished mask, and do not build one of [S, S].
        attention_mask=rows.tokens_S.new_ones((1, 1, 1, 1), dtype=torch.bool),
        use_cache=False,
        spans=rows.spans,
        split=rows.split,
    ).last_hidden_state[0]
    return states


def _seen(rows: PackedRows) -> Sequence[Tensor]:
    """Return the tokens that each piece sees."""
    seen_K = rows.spans.seen_K
    tokens_K = rows.tokens_S if seen_K is None else rows.tokens_S[seen_K]
    return torch.split(tokens_K, list(rows.spans.seen))


def _unpacked_states(body: Any, rows: PackedRows) -> Tensor:
    """Return [S, H] states from one pass for each piece, over all tokens that it sees."""
    states = []
    for piece, (tokens, length) in enumerate(zip(_seen(rows), rows.spans.lengths, strict=True)):
        inputs: dict[str, Any] = {"input_ids": tokens[None]}
        if rows.images is not None:
            inputs, _ = with_images(body, tokens[None], rows.images.names_P[piece], rows.images.processor)
        states.append(body(**inputs, use_cache=False).last_hidden_state[0, -length:])
    return torch.cat(states)


@torch.no_grad()
def pack_if_equal(model: PreTrainedModel) -> bool:
    """Switch `model` to packed attention if its results for a few rows stay the same; returns True if it packs.

    This excludes models whose state crosses rows (some linear attentions) or which have attention of their own.
    """
    body: Any = model.base_model
    original = model.config._attn_implementation
    # Layers that differ from full attention only in longer rows than those tried here are excluded by name.
    if not set(getattr(model.config.get_text_config(), "layer_types", None) or ()) <= _LAYERS:
        return False
    embeddings: Any = model.get_input_embeddings()
    vocabulary = embeddings.weight.shape[0]
    # Different lengths reveal a state that crosses from one row to the next.
    tokens = [np.arange(begin, end) % vocabulary for begin, end in ((0, 3), (0, 7), (1, 4), (0, 5))]
    both = [pack_rows(tokens, np.full(4, 2), np.ones(4), model.device, lean=lean) for lean in (False, True)]
    unpacked = torch.cat([_unpacked_states(body, rows) for rows in both])
    try:
        model.set_attn_implementation(PACKED)
        packed = torch.cat([_packed_states(body, rows) for rows in both])
    except (ValueError, TypeError, RuntimeError, AttributeError):
        packed = torch.full_like(unpacked, torch.nan)  # compares as different
    equal = bool((packed - unpacked).norm() <= _CLOSE[unpacked.dtype] * unpacked.norm())
    if not equal:  # the model is trained row by row, slower but right
        model.set_attn_implementation(original)
    return equal
