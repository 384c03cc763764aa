"""Model shape: sizes of a model, from its config.json and the heads of its weight files, or of common open models.

No weights are loaded. For local files and known models, neither torch nor transformers is needed; for other names on
the Hugging Face Hub the model is built from its configuration on torch's meta device.
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
from rftdask.storage.checked_json import parse_object

MAX_LOGITS = 2**27
"""Logits that a trainer holds at once: 512 MiB in float32, 1,024 positions of a vocabulary of 131,072."""
WITH_ADAPTER = (
    "has an adapter_config.json next to its weights: transformers adds that adapter to them and vLLM does not. If the "
    "weights include the adapter, remove the file; otherwise move the adapter to a folder of its own, and name that in "
    "model.lora_configs[0].path"
)
"""Problem of a model folder whose weights depend on the library that loads it."""
_JSON_FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("generation_config.json", "model.safetensors.index.json"),
)
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder, from which memory and FLOPs are estimated."""

    weights: Mapping[str, tuple[int, ...]]
    """Name -> shape of every tensor, tied ones once."""
    hidden_size: int
    num_layers: int
    query_size: int
    """Width of the queries: heads * size of a head."""
    key_size: int
    """Width of the keys, and of the values."""
    head_size: int
    intermediate_size: int
    """Width of the MLP; in a mixture of experts, summed over the experts of a token."""
    experts_per_token: int
    """0: not a mixture of experts."""
    normalizes_heads: bool
    """True if queries and keys have norms."""
    vocab_size: int
    bytes_at_rest: int
    """Bytes of an element in the model's files."""
    is_quantized: bool = False
    """True if the files hold quantized elements with scales, so that `weights` is approximate."""

    @property
    def num_parameters(self) -> int:
        """Number of all weights, tied ones once."""
        return sum(math.prod(shape) for shape in self.weights.values())

    @property
    def num_expert_parameters(self) -> int:
        """Number of the weights of all experts; 0: not a mixture of experts."""
        return sum(math.prod(shape) for name, shape in self.weights.items() if ".experts." in name)

    @property
    def num_outside(self) -> int:
        """Number of weights outside the layers: embeddings, output layer, last norm."""
        return sum(count for (is_outside, _), count in self.rows.items() if is_outside)

    @cached_property
    def rows(self) -> Mapping[tuple[bool, int], int]:
        """(True if outside the layers, rows of the tensor) -> number of weights.

        An expert is a row of one tensor of all experts, as in transformers, even if the files have one for each.
        """
        joined_names = {name: re.sub(r"\.experts\.\d+\.", ".experts.", name) for name in self.weights}
        num_experts, rows = Counter(joined_names.values()), Counter[tuple[bool, int]]()
        for name, shape in self.weights.items():
            joined = joined_names[name]
            is_outside = not any(map(str.isdigit, name.split(".")))
            rows[is_outside, max(1, *shape[:1]) if joined == name else num_experts[joined]] += math.prod(shape)
        return rows

    def lora_parameters(self, lora: LoraConfig) -> int:
        """Return the number of adapter weights, rank * (in + out) for each layer that PEFT would adapt."""

        def is_named(names: str | tuple[str, ...], layer: str) -> bool:
            if isinstance(names, str):
                return re.fullmatch(names, layer) is not None
            return any(layer == name or layer.endswith(f".{name}") for name in names)

        total = 0
        for name, shape in self.weights.items():
            layer = name.removesuffix(".weight")  # unchanged for a bias
            # PEFT adapts linear layers, not biases, norms, or embeddings (unless named, which the config rejects).
            # Experts and their routers are not linear layers in transformers.
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

    Raises: DataError: the model does not exist, or is not a decoder.
    """
    folder = Path(model_path)
    is_whole, known = True, None
    if not folder.exists():
        if not is_model_name(model_path):
            text = "it is neither a folder nor a name on the Hub"
            raise DataError(f"model.model_path {model_path} cannot be sized: {text}")
        folder = cached_folder(model_path) or folder
        is_whole = has_weights(folder)  # the cache may hold some of the files
        known = None if is_whole else known_model(model_path)
        if not folder.exists() and known is None:
            require_hub(
                f"model.model_path: {model_path!r}",
                f"give a folder with its config.json (hf download {model_path} config.json --local-dir DIR, on a "
                "machine with a network)",
            )
    # From the table, the files, or a model on the meta device.
    weights: Mapping[str, tuple[int, ...]]
    try:
        if known is not None:
            weights, config = known
        elif is_whole and [*folder.glob("*.safetensors")] and (folder / "config.json").is_file():
            config, weights = _parse(folder / "config.json"), _read_heads(folder)
        else:
            # Late: only needed without files.
            import torch
            from transformers import AutoConfig, AutoModelForCausalLM

            built = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
            with torch.device("meta"):
                model: Any = AutoModelForCausalLM.from_config(built, trust_remote_code=trust_remote_code)
            config = built.to_dict()
            weights = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    except (OSError, ValueError) as error:
        raise DataError(f"cannot determine the parameter shapes of model.model_path {folder}: {error}") from error
    is_quantized = bool(config.get("quantization_config"))
    config = config.get("text_config") or config
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_size = config.get("head_dim") or hidden // heads
        # Activations depend on the experts of a token, not on all experts.
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
        raise DataError(f"{model_path}: its config.json has no {error}, so it is not a decoder") from error


def check_folder(folder: Path) -> None:
    """Check a model folder's config.json, the heads of its weight files and its tokenizer.json for consistency.

    Raises: ValueError: they are inconsistent, or one cannot be read.
    """
    # All JSON files that transformers reads, so that errors show before a child process loads them.
    read = {name: _parse(folder / name) for name in _JSON_FILES if (folder / name).is_file()}
    config = read["config.json"].get("text_config") or read["config.json"]
    if config.get("num_hidden_layers") == 0:
        raise ValueError("its config.json has num_hidden_layers 0")
    is_embedding = re.compile(r"(.*\.)?(embed_tokens|wte|word_embeddings|embed_in)\.weight")
    shapes = [shape for name, shape in _read_heads(folder).items() if is_embedding.fullmatch(name)]
    if not shapes:  # an architecture with other names cannot be checked here
        return
    rows, size = shapes[0]
    expected = config.get("vocab_size", rows), config.get("hidden_size", size)
    if expected != (rows, size):
        raise ValueError(f"its embeddings are {rows} x {size}, but its config.json has {expected[0]} x {expected[1]}")
    if tokenizer := read.get("tokenizer.json"):
        vocabulary = tokenizer.get("model", {}).get("vocab", {})
        ids = [len(vocabulary) - 1] if isinstance(vocabulary, list) else list(vocabulary.values())
        # A token beyond the embeddings would crash a kernel, hours into a run.
        largest = max([*ids, *(token["id"] for token in tokenizer.get("added_tokens", ()))], default=0)
        if largest >= rows:
            raise ValueError(f"its tokenizer has token {largest}, but its embeddings end at {rows - 1}")


def _parse(file: Path) -> dict[str, Any]:
    try:
        return parse_object(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from error


def _read_heads(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor. Raises: ValueError: a file is incomplete, or not a safetensors file."""
    weights: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        if not file.is_file():  # reading a FIFO would block forever
            raise ValueError(f"{file.name} is not a file")
        with file.open("rb") as stream:  # the size of the head in 8 bytes, then the head as JSON
            size = int.from_bytes(stream.read(8), "little")
            if not 0 < size <= file.stat().st_size - 8:
                raise ValueError(f"{file.name} is incomplete, or not a safetensors file")
            head = parse_object(stream.read(size))
        tensors = {name: entry for name, entry in head.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        # An interrupted download has a whole head and too few bytes after it.
        if file.stat().st_size != 8 + size + end:
            raise ValueError(f"{file.name} has {file.stat().st_size} bytes, but its head describes {8 + size + end}")
        weights |= {name: tuple(entry["shape"]) for name, entry in tensors.items()}
    return weights


# ---- known models: numbers of their public config.json; tests compare the derived weights with the published counts

# Widths count elements; `head` is the size of one head. `moe` is "experts/experts per token", and `inner` then the
# width of one expert. qwen2 has biases for queries, keys and values; qwen3 has norms for queries and keys.
_COLUMNS = ("name", "family", "hidden", "layers", "heads", "kv_heads", "head", "inner", "vocab", "tied", "moe")
_TABLE = """
Qwen/Qwen2.5-0.5B                         qwen2    896  24  14  2  64  4864 151936 tied   -
Qwen/Qwen2.5-1.5B                         qwen2   1536  28  12  2 128  8960 151936 tied   -
Qwen/Qwen2.5-3B                           qwen2   2048  36  16  2 128 11008 151936 tied   -
Qwen/Qwen2.5-7B                           qwen2   3584  28  28  4 128 18944 152064 untied -
Qwen/Qwen2.5-Math-7B                      qwen2   3584  28  28  4 128 18944 152064 untied -
Qwen/Qwen2.5-Coder-7B                     qwen2   3584  28  28  4 128 18944 152064 untied -
Qwen/Qwen2.5-14B                          qwen2   5120  48  40  8 128 13824 152064 untied -
Qwen/Qwen2.5-32B                          qwen2   5120  64  40  8 128 27648 152064 untied -
Qwen/Qwen2.5-72B                          qwen2   8192  80  64  8 128 29568 152064 untied -
deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B qwen2   1536  28  12  2 128  8960 151936 untied -
deepseek-ai/DeepSeek-R1-Distill-Qwen-7B   qwen2   3584  28  28  4 128 18944 152064 untied -
deepseek-ai/DeepSeek-R1-Distill-Qwen-14B  qwen2   5120  48  40  8 128 13824 152064 untied -
deepseek-ai/DeepSeek-R1-Distill-Qwen-32B  qwen2   5120  64  40  8 128 27648 152064 untied -
deepseek-ai/DeepSeek-R1-Distill-Llama-8B  llama   4096  32  32  8 128 14336 128256 untied -
deepseek-ai/DeepSeek-R1-Distill-Llama-70B llama   8192  80  64  8 128 28672 128256 untied -
Qwen/Qwen3-0.6B                           qwen3   1024  28  16  8 128  3072 151936 tied   -
Qwen/Qwen3-1.7B                           qwen3   2048  28  16  8 128  6144 151936 tied   -
Qwen/Qwen3-4B                             qwen3   2560  36  32  8 128  9728 151936 tied   -
Qwen/Qwen3-8B                             qwen3   4096  36  32  8 128 12288 151936 untied -
Qwen/Qwen3-14B                            qwen3   5120  40  40  8 128 17408 151936 untied -
Qwen/Qwen3-32B                            qwen3   5120  64  64  8 128 25600 151936 untied -
Qwen/Qwen3-30B-A3B                        qwen3   2048  48  32  4 128   768 151936 untied 128/8
Qwen/Qwen3-235B-A22B                      qwen3   4096  94  64  4 128  1536 151936 untied 128/8
meta-llama/Llama-3.2-1B                   llama   2048  16  32  8  64  8192 128256 tied   -
meta-llama/Llama-3.2-3B                   llama   3072  28  24  8 128  8192 128256 tied   -
meta-llama/Llama-3.1-8B                   llama   4096  32  32  8 128 14336 128256 untied -
meta-llama/Llama-3.1-70B                  llama   8192  80  64  8 128 28672 128256 untied -
meta-llama/Llama-3.3-70B                  llama   8192  80  64  8 128 28672 128256 untied -
mistralai/Mistral-7B-v0.3                 llama   4096  32  32  8 128 14336  32768 untied -
mistralai/Mistral-7B-Instruct-v0.3        llama   4096  32  32  8 128 14336  32768 untied -
mistralai/Mixtral-8x7B-v0.1               llama   4096  32  32  8 128 14336  32000 untied 8/2
mistralai/Mixtral-8x7B-Instruct-v0.1      llama   4096  32  32  8 128 14336  32000 untied 8/2
"""
MODELS: Mapping[str, Mapping[str, str]] = {
    line.split()[0]: dict(zip(_COLUMNS, line.split(), strict=True)) for line in _TABLE.strip().splitlines()
}
"""Name on the Hub -> its row."""
_VARIANT = r"(-(Base|Instruct|Thinking|2507))*"  # suffixes of models with the same shape


def known_model(model_path: str) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]] | None:
    """Return (name -> shape of every tensor, configuration as in config.json) for a name on the Hub; None: unknown.

    Tied tensors are included once; the experts of a layer are one tensor, as in transformers.
    """
    row = next((row for name, row in MODELS.items() if re.fullmatch(re.escape(name) + _VARIANT, model_path)), None)
    if row is None:
        return None
    hidden, layers, inner, vocab, head = (int(row[key]) for key in ("hidden", "layers", "inner", "vocab", "head"))
    queries, keys = int(row["heads"]) * head, int(row["kv_heads"]) * head
    config: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": int(row["heads"]),
        "num_key_value_heads": int(row["kv_heads"]),
        "head_dim": head,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "dtype": "bfloat16",
    }
    layer: dict[str, tuple[int, ...]] = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    layer |= {f"self_attn.{name}": shape for name, shape in attention.items()} | {"self_attn.o_proj": (hidden, queries)}
    if row["family"] == "qwen3":
        layer |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
    if row["moe"] == "-":
        layer |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    else:
        experts, taken = map(int, row["moe"].split("/"))
        config |= {"num_experts_per_tok": taken, "moe_intermediate_size": inner}
        layer |= {"mlp.gate": (experts, hidden)}
    weights = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for number in range(layers):
        at = f"model.layers.{number}"
        weights |= {f"{at}.{name}.weight": shape for name, shape in layer.items()}
        if row["family"] == "qwen2":
            weights |= {f"{at}.self_attn.{name}.bias": shape[:1] for name, shape in attention.items()}
        if row["moe"] != "-":
            weights |= {
                f"{at}.mlp.experts.gate_up_proj": (experts, 2 * inner, hidden),
                f"{at}.mlp.experts.down_proj": (experts, hidden, inner),
            }
    if row["tied"] == "untied":
        weights["lm_head.weight"] = (vocab, hidden)
    return weights, config
