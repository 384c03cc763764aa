"""A tiny random Qwen2, saved as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

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
