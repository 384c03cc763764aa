"""Image models: their class, and their inputs for a sequence with images.

With positions in two dimensions (M-RoPE), positions after an image do not count tokens; the model computes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_outputs import BaseModelOutputWithPooling

from rftdask.data.images import ImageProcessor, is_video


def model_class(source: str, *, trust_remote_code: bool = False) -> Any:
    """Return the class of transformers that loads a model folder or name, including its image inputs.

    Raises: OSError, ValueError: the model has no configuration.
    """
    local = Path(source).is_dir()
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, local_files_only=local)
    reads_images = hasattr(config, "vision_config") and type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def with_images(
    model: Any, tokens_1L: Tensor, names: Sequence[str], images: ImageProcessor
) -> tuple[dict[str, Any], int]:
    """Return (arguments of the model or its body for one sequence, shift of the positions after it).

    Args: names: images of the row; those whose tokens are in the sequence are used.
    """
    names = names[: num_images(tokens_1L, names, images)]
    if not names:
        return {"input_ids": tokens_1L}, 0
    body = getattr(model, "base_model", model)
    inputs = {name: value.to(tokens_1L.device) for name, value in images.inputs(names).items()}
    inputs |= {name: v.to(model.dtype) for name, v in inputs.items() if v.is_floating_point()}
    known = inspect.signature(body.forward).parameters
    inputs = {name: value for name, value in inputs.items() if name in known}
    shift = 0
    if hasattr(body, "get_rope_index"):
        inputs["position_ids"], shift = _positions(body, tokens_1L, names, images)
    elif "mm_token_type_ids" in known:
        inputs["mm_token_type_ids"] = images.kinds(tokens_1L, names)
    return {"input_ids": tokens_1L, **inputs}, shift


def num_images(tokens: Tensor, names: Sequence[str], images: ImageProcessor) -> int:
    """Return how many of a row's images have all their tokens among its first `tokens`."""
    placeholders = int((images.kinds(tokens, names) > 0).sum())
    ends = accumulate(images.tokens(name).count(images.placeholder_of(name)) for name in names)
    return sum(end <= placeholders for end in ends)


def packs_images(body: Any) -> bool:
    """True if rows with images can be packed: the model takes image features separately from tokens."""
    known = inspect.signature(body.forward).parameters
    return "mm_encoder_outputs" in known and "image_grid_thw" in known and hasattr(body, "get_rope_index")


def packed_with_images(
    body: Any, pieces: Sequence[tuple[Tensor, int]], names: Sequence[Sequence[str]], images: ImageProcessor
) -> dict[str, Any]:
    """Return extra forward() arguments for packed rows with images, for a body that `packs_images`.

    Args:
        pieces: (tokens seen, number of own tokens at their end) of each piece.
        names: images of the row of each piece.
    """
    positions, shown = [], list[str]()
    for (seen, length), row_names in zip(pieces, names, strict=True):
        before, within = (num_images(tokens, row_names, images) for tokens in (seen[: len(seen) - length], seen))
        positions.append(_positions(body, seen[None], row_names[:within], images)[0][..., -length:])
        shown += row_names[before:within]
    outputs = {}
    for kind, pixels_key, grid_key in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        kind_names = [name for name in shown if is_video(name) == (kind == "video")]
        if not kind_names:
            continue
        # Each image is encoded once, even if several rows show it.
        distinct = {name: number for number, name in enumerate(dict.fromkeys(kind_names))}
        inputs = [images.inputs([name]) for name in distinct]
        pixels, grid = (torch.cat([each[key] for each in inputs]).to(body.device) for key in (pixels_key, grid_key))
        encoded = getattr(body, f"get_{kind}_features")(pixels, grid, return_dict=True).pooler_output
        features: Any = tuple(encoded[distinct[name]] for name in kind_names)
        outputs[kind] = BaseModelOutputWithPooling(pooler_output=features)
    return {"position_ids": torch.cat(positions, dim=-1), "mm_encoder_outputs": outputs}


def _positions(body: Any, tokens_1L: Tensor, names: Sequence[str], images: ImageProcessor) -> tuple[Tensor, int]:
    """Return ([3, 1, L] positions of a body with M-RoPE, shift of the positions after them)."""
    if not names:
        return torch.arange(tokens_1L.shape[1], device=tokens_1L.device).expand(3, 1, -1), 0
    takes = inspect.signature(body.get_rope_index).parameters
    inputs = {name: v.to(tokens_1L.device) for name, v in images.inputs(names).items() if name in takes}
    kinds_1L = images.kinds(tokens_1L, names)
    if "mm_token_type_ids" in takes:
        inputs["mm_token_type_ids"] = kinds_1L
    positions_31L, _ = body.get_rope_index(tokens_1L, **inputs)
    # Each run begins after the largest position before it, as in vLLM. In transformers, tokens after a video ignore its
    # time axis in prompts, but not in sampled tokens.
    begin = end = 0
    for _, run in groupby(kinds_1L[0].tolist()):
        run_31R = positions_31L[..., begin : (begin := begin + len(list(run)))]
        run_31R += end - run_31R.min()
        end = int(run_31R.max()) + 1
    return positions_31L, end - begin
