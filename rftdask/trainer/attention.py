"""Attention over packed rows: every token sees its own row up to itself, and nothing of any other; what rows that begin
alike have in common lies in the sequence once (`pack_rows`).

It is an attention implementation of transformers, found under the name `PACKED`; a model that is given `spans` along
with its tokens passes them on to it. Without `spans` it is plain SDPA, so generating and scoring unpacked rows work as
before. It knows no model: whether one computes packed rows rightly is measured when it is loaded (`pack_if_equal`).

How: on a GPU in half precision the variable-length kernel of PyTorch, one call for all rows. Elsewhere SDPA over
batches of pieces of one size, which need neither a mask nor padding. A block-diagonal mask over the whole sequence
took 10 to 50 times as long on a CPU; padding rows of like length into fewer batches gained nothing.
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
"""Most that hidden states may differ, relative to their norm: far more than rounding, far less than another row."""


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
    **more: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: query [1, heads, S, size], key and value with fewer heads; returns [1, S, heads, size].

    split: the tokens given are this rank's part of those that `spans` tells of.
    Raises: ValueError: the layer asks for what packed rows cannot have: learned biases, sinks or capped scores.
    """
    # Generating, or rows given one by one: then it is SDPA with the mask that transformers made.
    if spans is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
    beyond = [name for name in ("position_bias", "s_aux", "softcap") if more.get(name) is not None]
    if beyond:
        raise ValueError(f"{type(module).__name__} uses {', '.join(beyond)}, which packed rows cannot have")
    # [1, heads, S, size] -> [S, heads, size], as the kernel and the split take it.
    query_S, key_S, value_S = (tensor.transpose(1, 2)[0] for tensor in (query, key, value))
    if query.is_cuda and torch.is_autocast_enabled("cuda"):  # custom kernels are not cast by it
        half = torch.get_autocast_dtype("cuda")
        query_S, key_S, value_S = query_S.to(half), key_S.to(half), value_S.to(half)
    # From here on all tokens of some heads, in place of some tokens of all heads.
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
    # Late: as it is imported it registers operators, a tenth of a second that no CPU has a use for.
    from torch.nn.attention.varlen import varlen_attn

    # What sees the most lies first.
    longest, most = max(spans.lengths), spans.seen[0]
    # The kernel counts the tokens before one and not the one itself; -1: no limit. It aligns the ends of a piece and of
    # what that sees.
    left = -1 if window is None or window >= most else window - 1
    # PyTorch 2.11 shares heads of keys among those of queries unasked, and does not know the switch that 2.12 wants.
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
            assert spans.seen_K is not None, "who sees more than itself is told what"
            places = spans.seen_K[seen_begin:seen_end]
            keys, values = key_S.index_select(0, places), value_S.index_select(0, places)
        # [pieces * length, heads, size] -> [pieces, heads, length, size], without a copy.
        query = query_S[begin:end].unflatten(0, (pieces, length)).transpose(1, 2)
        key, value = (t.unflatten(0, (pieces, seen)).transpose(1, 2) for t in (keys, values))
        mask = None
        if length < seen or (window is not None and window < seen):
            # A token sees itself and what is before it, with a window the window - 1 before it.
            place = torch.arange(seen, device=query_S.device)
            behind = place[seen - length :, None] - place[None, :]
            mask = (behind >= 0) & (behind < (window or seen))
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
    """[S, H] last hidden states of the rows' tokens (if they are split, of this rank's); `model` is a causal language
    model or its body.

    A model that does not pack computes one row after another: slower on many short rows, padded nowhere all the same.
    """
    body: Any = getattr(model, "base_model", model)
    if body.config._attn_implementation == PACKED and (rows.images is None or packs_images(body)):
        return _packed_states(body, rows)
    assert rows.split is None, "only rows that are packed are split, see `check_splits`"
    return _states_alone(body, rows)


def _packed_states(body: Any, rows: PackedRows) -> Tensor:
    given: dict[str, Any] = {"position_ids": rows.positions_S[None]}
    if rows.images is not None:
        pieces = list(zip(_seen(rows), rows.spans.lengths, strict=True))
        given = packed_with_images(body, pieces, rows.images.names_P, rows.images.processor)
    states: Tensor = body(
        input_ids=rows.tokens_S[None],
        **given,
        # Four dimensions: models take it for a finished mask and build none, which would be [S, S].
        attention_mask=rows.tokens_S.new_ones((1, 1, 1, 1), dtype=torch.bool),
        use_cache=False,
        spans=rows.spans,
        split=rows.split,
    ).last_hidden_state[0]
    return states


def _seen(rows: PackedRows) -> Sequence[Tensor]:
    """Of each piece the tokens that it sees."""
    seen_K = rows.spans.seen_K
    tokens_K = rows.tokens_S if seen_K is None else rows.tokens_S[seen_K]
    return torch.split(tokens_K, list(rows.spans.seen))


def _states_alone(body: Any, rows: PackedRows) -> Tensor:
    """The same of each piece by a pass of its own, over all that it sees."""
    states = []
    for piece, (tokens, length) in enumerate(zip(_seen(rows), rows.spans.lengths, strict=True)):
        inputs: dict[str, Any] = {"input_ids": tokens[None]}
        if rows.images is not None:
            inputs, _ = with_images(body, tokens[None], rows.images.names_P[piece], rows.images.processor)
        states.append(body(**inputs, use_cache=False).last_hidden_state[0, -length:])
    return torch.cat(states)


@torch.no_grad()
def pack_if_equal(model: PreTrainedModel) -> bool:
    """Let `model` compute rows packed if it then says of each what it says of it alone; whether it does.

    Models with a state that crosses rows (some linear attentions) or attention of their own are found here. Layers that
    differ from full attention only in rows longer than those tried here are known by name.
    """
    body: Any = model.base_model
    usual = model.config._attn_implementation
    # Sliding windows and chunks differ from full attention only in long rows, so they are known by name.
    if not set(getattr(model.config.get_text_config(), "layer_types", None) or ()) <= _LAYERS:
        return False
    embeddings: Any = model.get_input_embeddings()
    vocabulary = embeddings.weight.shape[0]
    # Of different lengths, so that a state that crosses from one row to the next shows.
    tokens = [np.arange(begin, end) % vocabulary for begin, end in ((0, 3), (0, 7), (1, 4), (0, 5))]
    both = [pack_rows(tokens, np.full(4, 2), np.ones(4), model.device, lean=lean) for lean in (False, True)]
    alone = torch.cat([_states_alone(body, rows) for rows in both])
    try:
        model.set_attn_implementation(PACKED)
        packed = torch.cat([_packed_states(body, rows) for rows in both])
    except (ValueError, TypeError, RuntimeError, AttributeError):
        # NaN compares as not close, so the model is trained row by row.
        packed = torch.full_like(alone, torch.nan)
    equal = bool((packed - alone).norm() <= _CLOSE[alone.dtype] * alone.norm())
    if not equal:
        # As it was: the model is then trained row by row, slower and right.
        model.set_attn_implementation(usual)
    return equal


def check_splits(model: PreTrainedModel, num_parts: int) -> None:
    """Whether a sequence can be split over ranks. Raises: ValueError: the model does not pack, or has odd heads."""
    name = type(model).__name__
    if model.config._attn_implementation != PACKED:
        raise ValueError(f"{name} does not compute packed rows, which is what ranks split a sequence by")
    heads = model.config.get_text_config().num_attention_heads
    if heads % num_parts:
        raise ValueError(f"{name} has {heads} attention heads, which {num_parts} ranks cannot split evenly")
