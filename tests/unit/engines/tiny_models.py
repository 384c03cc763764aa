"""Tiny random models, saved as folders."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rftdask.models.toy import build_toy_model
from tests.numerics import shifted_seed

VOCAB_SIZE = 64
END_IDS = (1, 2)


def save_tiny_qwen2(folder: Path, seed: int, tied: bool, **more: Any) -> Path:
    torch.manual_seed(shifted_seed(seed))
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        eos_token_id=list(END_IDS),
        bos_token_id=None,
        pad_token_id=0,
        initializer_range=0.2,  # logits that differ from token to token
        **more,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def save_tiny_mixture(folder: Path, seed: int = 0, **more: Any) -> Path:
    """A random Qwen3-MoE of two layers, with the tokenizer of a toy and undecided routers."""
    build_toy_model(folder, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2)
    vocab_size = AutoConfig.from_pretrained(folder).vocab_size
    torch.manual_seed(shifted_seed(seed))
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    config = Qwen3MoeConfig(
        **sizes,
        **MIXTURE,
        vocab_size=vocab_size,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        tie_word_embeddings=False,
        **more,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder
