"""Model shape: what the sizes of a model follow from, read from its config.json and the heads of its weight files.

It loads no weights. With the files at hand, and for the models of known_models.py, it needs neither torch nor
transformers; for another name on the Hugging Face Hub it builds the model without memory (torch's meta device), which
needs the configuration alone.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rftdask.config.schema.model import LoraConfig
from rftdask.data.hub import cached_folder, has_weights, is_model_name, require_hub
from rftdask.errors import DataError
from rftdask.models.known_models import known_model
from rftdask.storage.checked_json import parse_object

MAX_LOGITS = 2**27
"""Logits that a trainer holds at a time: 512 MiB in float32, 1,024 positions of a vocabulary of 131,072."""
_JSON_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "model.safetensors.index.json",
)
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder: what memory and FLOPs follow from."""

    weights: Mapping[str, tuple[int, ...]]
    """Name -> shape of every tensor, tied ones once."""
    hidden_size: int
    num_layers: int
    query_size: int
    """Width of the queries: heads * size of a head."""
    key_size: int
    """Width of the keys, which is that of the values."""
    head_size: int
    intermediate_size: int
    """Width of the MLP; in a mixture of experts, the sum over the experts that a token takes."""
    experts_per_token: int
    """0: every token passes the one MLP."""
    normalizes_heads: bool
    """True where queries and keys pass a norm of their own."""
    vocab_size: int
    bytes_at_rest: int
    """Bytes of a number in the model's files."""
    is_quantized: bool = False
    """The files have numbers of fewer bits than that, with scales beside them, so that `weights` only comes close."""

    @property
    def num_parameters(self) -> int:
        """Of all weights, each once."""
        return sum(math.prod(shape) for shape in self.weights.values())

    @property
    def num_expert_parameters(self) -> int:
        """Of all experts; 0 where there are none."""
        return sum(math.prod(shape) for name, shape in self.weights.items() if ".experts." in name)

    @property
    def num_outside(self) -> int:
        """Weights outside of the layers: embeddings, output layer, last norm."""
        return sum(count for (is_outside, _), count in self.rows.items() if is_outside)

    @cached_property
    def rows(self) -> Mapping[tuple[bool, int], int]:
        """(Are they outside of the layers, rows of their tensor) -> number of weights. An expert is a row of one tensor
        of all experts, as transformers holds them, also where the files have a tensor for each.
        """
        of_experts = {name: re.sub(r"\.experts\.\d+\.", ".experts.", name) for name in self.weights}
        num_experts, rows = Counter(of_experts.values()), Counter[tuple[bool, int]]()
        for name, shape in self.weights.items():
            is_alone = of_experts[name] == name
            is_outside = not any(map(str.isdigit, name.split(".")))
            rows[is_outside, max(1, *shape[:1]) if is_alone else num_experts[of_experts[name]]] += math.prod(shape)
        return rows

    def lora_parameters(self, lora: LoraConfig) -> int:
        """Count the weights of adapters on the layers that PEFT would take: rank * (in + out) each."""

        def is_named(names: str | tuple[str, ...], layer: str) -> bool:
            if isinstance(names, str):
                return re.fullmatch(names, layer) is not None
            return any(layer == name or layer.endswith(f".{name}") for name in names)

        total = 0
        for name, shape in self.weights.items():
            # Unchanged for a bias, which is how it is told apart below.
            layer = name.removesuffix(".weight")
            # PEFT adapts linear layers: no biases, no norms, no embeddings (unless they are named, which we refuse).
            # Experts and what chooses among them are no linear layers in transformers.
            if len(shape) != 2 or layer == name or "embed" in layer.rpartition(".")[2]:
                continue
            if ".experts." in name or layer.endswith(".gate"):
                continue
            if lora.exclude_modules is not None and is_named(lora.exclude_modules, layer):
                continue
            linear = layer != "lm_head" and "norm" not in layer
            if linear if lora.target_modules == "all-linear" else is_named(lora.target_modules, layer):
                total += lora.lora_rank * sum(shape) + (shape[0] if lora.use_dora else 0)
        return total


def read_shape(model_path: str, *, trust_remote_code: bool = False) -> ModelShape:
    """Read the shape of the model in a folder, or of a name on the Hub.

    Raises: DataError: there is none, or it is no decoder.
    """
    folder = Path(model_path)
    is_whole, known = True, None
    if not folder.exists():
        if not is_model_name(model_path):
            raise DataError(f"model.model_path {model_path} cannot be sized: it is no folder, and no name on the Hub")
        folder = cached_folder(model_path) or folder
        is_whole = has_weights(folder)  # the cache may hold some of the files
        known = None if is_whole else known_model(model_path)
        if not folder.exists() and known is None:
            require_hub(
                f"model.model_path: {model_path!r}",
                f"give a folder with its config.json (hf download {model_path} config.json --local-dir DIR, where "
                "there is a network)",
            )
    # From the files where they are there; else from the table; else from a model that has shapes and no memory.
    weights: Mapping[str, tuple[int, ...]]
    if known is not None:
        weights, config = known
    elif is_whole and [*folder.glob("*.safetensors")] and (folder / "config.json").is_file():
        try:
            config = _parse(folder / "config.json")
            weights = _read_heads(folder)
        except ValueError as error:
            raise DataError(f"model.model_path {folder} cannot be sized: {error}") from error
    else:
        # Late: only where there are no files to read.
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            built = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
            # Shapes without memory: a model of any size is built in a moment.
            with torch.device("meta"):
                model: Any = AutoModelForCausalLM.from_config(built, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise DataError(f"model.model_path {folder} cannot be sized: {error}") from error
        config = built.to_dict()
        weights = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    is_quantized = bool(config.get("quantization_config"))
    config = config.get("text_config") or config
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_size = config.get("head_dim") or hidden // heads
        # Of a mixture of experts a token computes with the chosen ones only, which is what activations follow from.
        experts = config.get("num_experts_per_tok")
        inner = experts * (config.get("moe_intermediate_size") or config["intermediate_size"]) if experts else None
        return ModelShape(
            weights=weights,
            hidden_size=hidden,
            num_layers=config["num_hidden_layers"],
            query_size=heads * head_size,
            key_size=(config.get("num_key_value_heads") or heads) * head_size,
            head_size=head_size,
            intermediate_size=inner or config["intermediate_size"],
            experts_per_token=experts or 0,
            normalizes_heads=any(name.endswith("q_norm.weight") for name in weights),
            vocab_size=config["vocab_size"],
            bytes_at_rest=_BYTES.get(config.get("dtype") or config.get("torch_dtype") or "float32", 4),
            is_quantized=is_quantized,
        )
    except KeyError as error:
        raise DataError(f"{model_path}: its config.json has no {error}, so it is no decoder to be sized") from error


def check_folder(folder: Path) -> None:
    """Hold a model folder's config.json, the heads of its weight files and its tokenizer.json against each other.

    Raises: ValueError: they do not go together, or one cannot be read.
    """
    # All that transformers reads, so that it meets no surprise in a child process.
    read = {name: _parse(folder / name) for name in _JSON_FILES if (folder / name).is_file()}
    config = read["config.json"].get("text_config") or read["config.json"]
    if config.get("num_hidden_layers") == 0:
        raise ValueError("its config.json says num_hidden_layers 0")
    is_embedding = re.compile(r"(.*\.)?(embed_tokens|wte|word_embeddings|embed_in)\.weight")
    shapes = [shape for name, shape in _read_heads(folder).items() if is_embedding.fullmatch(name)]
    # Of an architecture with other names nothing can be said here; loading it will tell.
    if not shapes:
        return
    rows, size = shapes[0]
    said = config.get("vocab_size", rows), config.get("hidden_size", size)
    if said != (rows, size):
        raise ValueError(f"its embeddings are {rows} x {size}, and its config.json says {said[0]} x {said[1]}")
    if tokenizer := read.get("tokenizer.json"):
        vocabulary = tokenizer.get("model", {}).get("vocab", {})
        ids = [len(vocabulary) - 1] if isinstance(vocabulary, list) else list(vocabulary.values())
        # A token beyond the embeddings would be an error in a kernel, hours into a run.
        largest = max([*ids, *(token["id"] for token in tokenizer.get("added_tokens", ()))], default=0)
        if largest >= rows:
            raise ValueError(f"its tokenizer has the token {largest}, and its embeddings end at {rows - 1}")


def _parse(file: Path) -> dict[str, Any]:
    try:
        return parse_object(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from error


def _read_heads(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor. Raises: ValueError: a file is torn, or of another kind."""
    weights: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        if not file.is_file():  # a FIFO would be waited for without end
            raise ValueError(f"{file.name} is no file")
        with file.open("rb") as stream:  # begins with the size of its head in 8 bytes, then the head as JSON
            size = int.from_bytes(stream.read(8), "little")
            if not 0 < size <= file.stat().st_size - 8:
                raise ValueError(f"{file.name} is torn, or no safetensors file")
            head = parse_object(stream.read(size))
        tensors = {name: entry for name, entry in head.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        # A download that broke off has a whole head and too few bytes behind it.
        if file.stat().st_size != 8 + size + end:
            raise ValueError(f"{file.name} has {file.stat().st_size} bytes, and its head tells of {8 + size + end}")
        weights |= {name: tuple(entry["shape"]) for name, entry in tensors.items()}
    return weights
