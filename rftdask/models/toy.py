"""Toy policy and toy task for the quickstart and the tests, without a download.

The policy is a random Qwen2 of about 0.8 million weights with one token per byte. The task is adding a number below ten
to a number of two digits: "47+8=" -> "55". The warm-up answers (`sft.jsonl`) come from a sloppy teacher, whose sum is
ten too high more often than not; only the rewards of reinforcement training correct this mistake. The questions of
`eval.jsonl` do not occur in the other files.

Invariant: the same arguments give the same bytes, for tasks on any machine, for weights with one version of torch.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAD, EOS = "<|pad|>", "<|eos|>"
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE_CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_toy_model(
    path: str | Path,
    *,
    seed: int = 0,
    hidden_size: int = 192,
    intermediate_size: int = 384,
    num_layers: int = 2,
    num_heads: int = 3,
    max_position_embeddings: int = 2048,
) -> None:
    """Write a Qwen2 with random weights and its byte tokenizer as a Hugging Face folder.

    Args:
        path: folder, created if missing; files of the same names are replaced.
        seed: seed of the weights. The global random state of torch does not change.

    Raises: ValueError: `hidden_size` / `num_heads` is not an even integer.
    """
    if hidden_size % num_heads or (hidden_size // num_heads) % 2:
        raise ValueError(f"hidden_size {hidden_size} / num_heads {num_heads} must be an even integer")
    import torch  # late: the tasks do not need torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = _byte_tokenizer(max_position_embeddings)
    tokenizer.save_pretrained(Path(path))
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=max_position_embeddings,
        initializer_range=0.04,  # the usual 0.02 suits wide models, and learned more slowly in trials on these tasks
        tie_word_embeddings=False,  # tied embeddings took longer to learn in trials on these tasks
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    # Forked, so that the random state of a notebook does not change.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).float()
    model.save_pretrained(path)


def build_toy_image_model(path: str | Path, *, seed: int = 0) -> None:
    """Write a Qwen2.5-VL with random weights, with the toy policy's tokenizer and an image processor.

    An image of 28 x 28 pixels is one token. Args: see `build_toy_model`.
    """
    import torch  # late: as above
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = _byte_tokenizer(1024, IMAGE_TOKENS)
    tokenizer.chat_template = IMAGE_CHAT_TEMPLATE
    tokenizer.save_pretrained(Path(path))
    start, end, image, video = map(tokenizer.convert_tokens_to_ids, IMAGE_TOKENS)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "initializer_range": 0.04,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
            **ends,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [0],
            "initializer_range": 0.04,
        },
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
        **ends,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config).float()
    model.save_pretrained(path)
    sizes = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 28 * 28, "max_pixels": 56 * 56}
    kinds = {"processor_class": "Qwen2_5_VLProcessor", "image_processor_type": "Qwen2VLImageProcessor"}
    Path(path, "preprocessor_config.json").write_text(json.dumps({**kinds, **sizes}, indent=2) + "\n")


def _byte_tokenizer(max_length: int, special: Sequence[str] = ()) -> Any:
    from tokenizers.pre_tokenizers import ByteLevel  # late: as above
    from transformers import Qwen2Tokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # the file is written in milliseconds
    # Qwen2's class, which AutoTokenizer requires for this architecture. Without merges each byte is one token.
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *special, *sorted(ByteLevel.alphabet())])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token=PAD,
        eos_token=EOS,
        unk_token=PAD,  # required by the class, but never produced: every byte is known
        additional_special_tokens=list(special),
        padding_side="left",
        model_max_length=max_length,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_toy_tasks(
    folder: str | Path, *, seed: int = 0, num_eval: int = 100, num_answers: int = 16, correct_share: float = 0.3
) -> None:
    """Write sft, train, eval, pairs and graded.jsonl into `folder`, which is created if missing.

    Args:
        seed: seed of the split, the errors and the order of the rows.
        num_eval: number of held-out questions; all others are trained on.
        num_answers: warm-up answers for each training question.
        correct_share: fraction of correct warm-up answers; the others are ten too high.

    Rows of `sft.jsonl` are {"prompt", "response"}, of `pairs.jsonl` {"prompt", "chosen", "rejected"}, of the others
    {"question", "answer"}; `graded.jsonl` also has {"ease"}, which is higher for smaller sums.

    Raises: ValueError: no question would be left for training, or `correct_share` is not in [0, 1].
    """
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10)]
    if not 0 < num_eval < len(pairs):
        raise ValueError(f"num_eval {num_eval} must be in 1..{len(pairs) - 1}: there are {len(pairs)} questions")
    if not 0 <= correct_share <= 1:
        raise ValueError(f"correct_share {correct_share} must be in [0, 1]")
    rng.shuffle(pairs)
    eval_pairs, train_pairs = pairs[:num_eval], pairs[num_eval:]
    warm_up: list[dict[str, str | int]] = []
    for _ in range(num_answers):  # each question once before any is repeated
        rng.shuffle(train_pairs)
        for a, b in train_pairs:
            error = 0 if rng.random() < correct_share else 10
            warm_up.append({"prompt": f"{a}+{b}=", "response": str(a + b + error)})

    sums = [(f"{a}+{b}=", a + b) for a, b in train_pairs]
    files: dict[str, list[dict[str, str | int]]] = {
        "sft": warm_up,
        "pairs": [{"prompt": q, "chosen": str(n), "rejected": str(n + 10)} for q, n in sums],
        "graded": [{"question": q, "answer": str(n), "ease": -n} for q, n in sums],
        "train": [{"question": q, "answer": str(n)} for q, n in sums],
        "eval": [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in eval_pairs],
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        Path(folder, f"{name}.jsonl").write_text(text, encoding="utf-8", newline="\n")
