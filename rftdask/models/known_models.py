"""Shapes of common open models, to size them without a network, torch or transformers.

The numbers come from the models' public config.json; tests compare the derived weights with the published counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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
_VARIANT = r"(-(Base|Instruct|Thinking|2507))*"
"""Suffixes of models with the same shape."""


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
