"""A tiny Qwen2 whose shape vLLM accepts: its attention on a CPU needs heads of 64. It writes ASCII, one token per
character.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

END_IDS = (1, 2)
IMAGE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,  # logits that differ between tokens
}


def save_qwen2(folder: Path, seed: int, tied: bool) -> Path:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=128, tie_word_embeddings=tied, eos_token_id=list(END_IDS), bos_token_id=None, pad_token_id=0, **SIZES
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    # The first of the 256 byte characters are the visible ASCII characters.
    tokens = ["<|pad|>", "<|eos|>", "<|end|>", "\u0120", "\u010a", *sorted(ByteLevel.alphabet())[: 128 - 5]]
    special = {"pad_token": tokens[0], "eos_token": tokens[1], "unk_token": tokens[0]}
    vocabulary = {token: index for index, token in enumerate(tokens)}
    Qwen2Tokenizer(vocab=vocabulary, merges=[], additional_special_tokens=tokens[2:3], **special).save_pretrained(
        folder
    )
    return folder


def save_idefics3(folder: Path, seed: int) -> Path:
    """Save an Idefics3 with that tokenizer, which encodes an image as 56 x 56 pixels and four tokens between others.
    vLLM loads models of this kind without torchvision, whose builds require a torch for GPUs.
    """
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
        text_config={"model_type": "llama", "vocab_size": len(tokenizer), **SIZES, **ends},
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


def save_qwen_vl(folder: Path, seed: int, model_type: str) -> Path:
    """Save a Qwen2-VL or Qwen2.5-VL with that tokenizer, which encodes 28 x 28 pixels as one token. vLLM loads it if
    torchvision is available. Only the class of its processor defines the normalization of pixels, none of its files.
    """
    save_qwen2(folder, seed, tied=False)
    tokenizer = Qwen2Tokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", *QWEN_TOKENS]})
    tokenizer.save_pretrained(folder)
    start, end, image, video = map(tokenizer.convert_tokens_to_ids, QWEN_TOKENS)
    ends = {"pad_token_id": 0, "eos_token_id": list(END_IDS), "bos_token_id": None}
    vision = {"depth": 2, "num_heads": 2, "initializer_range": 0.1}
    is_older = model_type == "qwen2_vl"
    if is_older:
        vision |= {"embed_dim": 128, "hidden_size": 128, "mlp_ratio": 2}
    else:
        # Windows of 4 x 4 tokens in the first block, and none in the second.
        vision |= {"hidden_size": 128, "intermediate_size": 64, "out_hidden_size": 128, "fullatt_block_indexes": [1]}
    config = (Qwen2VLConfig if is_older else Qwen2_5_VLConfig)(
        text_config={
            "vocab_size": len(tokenizer),
            **SIZES,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 12, 12]},
            **ends,
        },
        vision_config=vision,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
        **ends,
    )
    torch.manual_seed(seed)
    model = Qwen2VLForConditionalGeneration if is_older else Qwen2_5_VLForConditionalGeneration
    model(config).float().save_pretrained(folder)
    name = "Qwen2VLProcessor" if is_older else "Qwen2_5_VLProcessor"
    sizes = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 28**2, "max_pixels": 140**2}
    kinds = {"processor_class": name, "image_processor_type": "Qwen2VLImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps({**kinds, **sizes}))
    return folder
