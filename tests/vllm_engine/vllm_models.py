"""A tiny Qwen2 of a shape that vLLM takes: its attention on a CPU wants heads of 64. It writes ASCII, a token each."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

END_IDS = (1, 2)


def save_qwen2(folder: Path, seed: int, tied: bool) -> Path:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        eos_token_id=list(END_IDS),
        bos_token_id=None,
        pad_token_id=0,
        initializer_range=0.1,  # logits that differ from token to token
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    # Of the 256 characters that stand for bytes the first are those of ASCII that are seen.
    tokens = ["<|pad|>", "<|eos|>", "<|end|>", "\u0120", "\u010a", *sorted(ByteLevel.alphabet())[: 128 - 5]]
    special = {"pad_token": tokens[0], "eos_token": tokens[1], "unk_token": tokens[0]}
    vocabulary = {token: index for index, token in enumerate(tokens)}
    Qwen2Tokenizer(vocab=vocabulary, merges=[], additional_special_tokens=tokens[2:3], **special).save_pretrained(
        folder
    )
    return folder
