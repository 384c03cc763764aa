"""A tiny Qwen2 of a shape that vLLM takes: its attention on a CPU wants heads of 64. It writes ASCII, a token each."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

END_IDS = (1, 2)
IMAGE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")


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


def save_idefics3(folder: Path, seed: int) -> Path:
    """An Idefics3 with that tokenizer, which sees an image as 56 x 56 pixels and four tokens, between others. Models of
    this kind vLLM loads without torchvision, whose builds want a torch for GPUs."""
    save_qwen2(folder, seed, tied=False)
    tokenizer = Qwen2Tokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", *IMAGE_TOKENS]})
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    ends = {"pad_token_id": 0, "eos_token_id": list(END_IDS), "bos_token_id": None}
    config = Idefics3Config(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
            "initializer_range": 0.1,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 1024,
            "initializer_range": 0.1,
            **ends,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
        **ends,
    )
    torch.manual_seed(seed)
    Idefics3ForConditionalGeneration(config).float().save_pretrained(folder)
    sizes = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 56}, "do_image_splitting": False}
    Idefics3Processor(Idefics3ImageProcessorPil(**sizes), tokenizer, image_seq_len=4).save_pretrained(folder)
    return folder
