"""Cache: the keys and values of sequences under way, as transformers keeps them, when rows and columns come and go.

Invariant: the last column is the newest token of every row; what is missing on the left is zero, and masked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def can_join(cache: DynamicCache) -> bool:
    """Whether rows that have come different ways fit into one cache: not where a layer keeps a window or a state of
    the past instead of all keys, because it then knows how many tokens there were, and of one number for all rows.
    """
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def keep(cache: DynamicCache, index_B: Tensor, num_columns: int) -> None:
    """The rows `index_B`, without their first `num_columns` columns, if any; those only of caches that `can_join`."""
    cache.reorder_cache(index_B)  # type: ignore[arg-type]  # any int64 tensor will do
    if num_columns:
        for layer in _layers(cache):
            layer.keys = layer.keys[:, :, num_columns:]
            layer.values = layer.values[:, :, num_columns:]


def join(cache: DynamicCache, others: DynamicCache) -> None:
    """Add the rows of `others` after those of `cache`."""
    for layer, other in zip(_layers(cache), _layers(others), strict=True):
        layer.keys = _joined(layer.keys, other.keys)
        layer.values = _joined(layer.values, other.values)


def _layers(cache: DynamicCache) -> list[Any]:
    return list(cache.layers)


def _joined(ones: Tensor, others: Tensor) -> Tensor:
    """[rows of both, heads, columns, head size], padded on the left."""
    columns = max(ones.shape[2], others.shape[2])
    return torch.cat([pad(part, (0, 0, columns - part.shape[2], 0)) for part in (ones, others)])
