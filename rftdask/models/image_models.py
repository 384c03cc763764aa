"""Models that read images: their class, and what one is given for a sequence that has some.

Where the tokens of an image stand for places in two dimensions (M-RoPE), positions behind it do not count tokens: the
model says where they go on.
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
    """The class of transformers that loads the model of a folder, or name, with all that it reads.

    Raises: OSError, ValueError: it has no configuration.
    """
    local = Path(source).is_dir()
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, local_files_only=local)
    reads_images = hasattr(config, "vision_config") and type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def with_images(
    model: Any, tokens_1L: Tensor, names: Sequence[str], images: ImageProcessor
) -> tuple[dict[str, Any], int]:
    """Arguments of the model, or its body, for one sequence, with those of these images whose tokens are in it, and by
    how much positions behind it are shifted against the number of its tokens.
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
    """How many of the images of a row, the first ones, have their tokens among these, the first ones of the row."""
    placeholders = int((images.kinds(tokens, names) > 0).sum())
    ends = accumulate(images.tokens(name).count(images.placeholder_of(name)) for name in names)
    return sum(end <= placeholders for end in ends)


def packs_images(body: Any) -> bool:
    """Whether rows with images can be computed in one pass: the model takes what it saw apart from its tokens."""
    known = inspect.signature(body.forward).parameters
    return "mm_encoder_outputs" in known and "image_grid_thw" in known and hasattr(body, "get_rope_index")


def packed_with_images(
    body: Any, pieces: Sequence[tuple[Tensor, int]], names: Sequence[Sequence[str]], images: ImageProcessor
) -> dict[str, Any]:
    """Arguments of a body that `packs_images`, beside the tokens of all pieces.

    Args:
        pieces: of each the tokens that it sees, and how many of them, the last ones, are its own.
        names: images of the row of each piece.
    """
    positions, shown = [], list[str]()
    for (seen, length), of_row in zip(pieces, names, strict=True):
        before, within = (num_images(tokens, of_row, images) for tokens in (seen[: len(seen) - length], seen))
        positions.append(_positions(body, seen[None], of_row[:within], images)[0][..., -length:])
        shown += of_row[before:within]
    outputs = {}
    for kind, parts in (
        ("image", ("pixel_values", "image_grid_thw")),
        ("video", ("pixel_values_videos", "video_grid_thw")),
    ):
        of_kind = [name for name in shown if is_video(name) == (kind == "video")]
        if not of_kind:
            continue
        # Each image once, whatever rows show it.
        distinct = {name: number for number, name in enumerate(dict.fromkeys(of_kind))}
        made = [images.inputs([name]) for name in distinct]
        pixels, grid = (torch.cat([each[part] for each in made]).to(body.device) for part in parts)
        seen = getattr(body, f"get_{kind}_features")(pixels, grid, return_dict=True).pooler_output
        features: Any = tuple(seen[distinct[name]] for name in of_kind)
        outputs[kind] = BaseModelOutputWithPooling(pooler_output=features)
    return {"position_ids": torch.cat(positions, dim=-1), "mm_encoder_outputs": outputs}


def _positions(body: Any, tokens_1L: Tensor, names: Sequence[str], images: ImageProcessor) -> tuple[Tensor, int]:
    """([3, 1, L] positions of a body with positions in two dimensions, by how much those behind them are shifted)."""
    if not names:
        return torch.arange(tokens_1L.shape[1], device=tokens_1L.device).expand(3, 1, -1), 0
    takes = inspect.signature(body.get_rope_index).parameters
    given = {name: v.to(tokens_1L.device) for name, v in images.inputs(names).items() if name in takes}
    kinds_1L = images.kinds(tokens_1L, names)
    if "mm_token_type_ids" in takes:
        given["mm_token_type_ids"] = kinds_1L
    positions_31L, _ = body.get_rope_index(tokens_1L, **given)
    # What follows begins behind all that stands before, as in vLLM. With transformers' own what follows a video begins
    # behind its height and width alone, and what is sampled behind its time, too.
    begin = end = 0
    for _, run in groupby(kinds_1L[0].tolist()):
        run_31R = positions_31L[..., begin : (begin := begin + len(list(run)))]
        run_31R += end - run_31R.min()
        end = int(run_31R.max()) + 1
    return positions_31L, end - begin
