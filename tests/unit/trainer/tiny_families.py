"""Tiny random models of several families, in memory."""

from typing import Any

import torch
import transformers

from tests.numerics import shifted_seed

VOCAB_SIZE = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "initializer_range": 0.3,  # attention that is not uniform
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def make_model(config_class: Any = transformers.Qwen2Config, **sizes: Any) -> Any:
    torch.manual_seed(shifted_seed(0))
    return transformers.AutoModelForCausalLM.from_config(config_class(**SIZES | sizes)).eval()
