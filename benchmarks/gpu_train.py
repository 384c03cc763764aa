"""Tokens per second, MFU and peak memory of a train step on one GPU, for a Qwen3-0.6B-shaped model.

    python benchmarks/gpu_train.py [--lengths 16384 65536] [--runs 5] [--json FILE]     on one GPU
    python benchmarks/gpu_train.py --large                  LoRA on a Qwen2.5-7B-shaped model, at 16,384 tokens
    python benchmarks/gpu_train.py --quick [--large]                                    anywhere: a tiny shape

The weights are random; the configuration is written out below, so nothing is downloaded. A step is
`TorchEngine.train_step` on one rollout of the given length (a prompt of 1,024 tokens): forward, PPO's clipped loss
without a KL term, backward with activations computed again, AdamW; weights in float32, products in bfloat16. LoRA has
rank 16 on all linear layers.

MFU counts what the model needs, not what is computed again: for each token 6 operations per weight that multiplies it
(4 for LoRA, whose frozen weights have no gradient), and 12 * layers * heads * size of a head * length / 2 of attention.
Sources: arXiv:2204.02311 appendix B, halved since attention is causal. The peak is the maker's dense bfloat16 figure.

Beside it a bare loop at the first length: transformers' own loss on the same tokens, in the same data types, with the
same AdamW, and with all logits at once.

To be held against prime-rl's rows of 2026-02-01 for one H100 (benchmarks/results/BENCHMARKS.md there, recomputing
activations too): full 11.90k tokens/s, 11.1 % at 16k and 10.15k, 26.8 % at 64k; LoRA 13.34k, 10.9 % and 9.97k, 25.2 %.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch
from report import Report, make_parser
from transformers import AutoModelForCausalLM, Qwen3Config

from rftdask.algorithm.compose import make_algorithm
from rftdask.buffer.batches.batch import TrainingBatch, supervised_batch
from rftdask.commands.estimate import GB, TrainSizes, train_parts
from rftdask.config import load_config
from rftdask.config.schema.model import LoraConfig
from rftdask.models.model_shape import ModelShape, read_shape
from rftdask.models.toy import build_toy_model
from rftdask.trainer.engines.torch_engine import TorchEngine

PEAK_FLOPS = {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "L40S": 362e12}
"""Dense bfloat16 by the makers' data sheets; the first name that the device's name contains."""
LORA_RANK = 16
PRIME_RL = {(False, 16_384): 11_900, (False, 65_536): 10_150, (True, 16_384): 13_340, (True, 65_536): 9_970}
"""(LoRA, length) -> tokens/s on one H100, of 2026-02-01."""


def write_model(folder: str, tiny: bool, large: bool = False) -> None:
    build_toy_model(folder, hidden_size=32, num_layers=1, num_heads=2)  # for its tokenizer
    sizes = {
        "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    }  # fmt: skip
    if large:
        sizes |= {
            **{"vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944},
            **{"num_attention_heads": 28, "num_key_value_heads": 4},
        }
    if tiny:
        sizes |= {
            **{"num_attention_heads": 16, "num_key_value_heads": 8},
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "head_dim": 16,
        }
    config = Qwen3Config(
        **sizes, tie_word_embeddings=not large, max_position_embeddings=131_072, rope_theta=1e6, eos_token_id=1,
        pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.bfloat16 if large else torch.float32
    with torch.device("cuda" if large and torch.cuda.is_available() else "cpu"):  # seven billion numbers to draw
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)


def make_batch(length: int, prompt: int, vocab_size: int) -> TrainingBatch:
    random = np.random.default_rng(0)
    rows = [(random.integers(2, vocab_size, length).tolist(), prompt, None)]
    batch = supervised_batch(rows, ["row 0"], 1)
    logprobs = np.full(len(batch.rollout_logprobs), -np.log(vocab_size), np.float32)
    return replace(batch, rewards=np.ones(1, np.float32), rollout_logprobs=logprobs, experts=np.zeros(1, bool))


def make_engine(folder: str, device: str, lora: bool) -> TorchEngine:
    tree: dict[str, Any] = {
        "mode": "train",
        "model": {"model_path": folder, "max_model_len": 10**9},
        "buffer": {"batch_size": 1},
        "algorithm": {"optimizer": {"weight_decay": 0.0}},
        "trainer": {"max_token_len_per_gpu": 10**9, "gradient_checkpointing": True},
        "seed": 0,
    }
    if lora:
        tree["model"]["lora_configs"] = [{"lora_rank": LORA_RANK}]
    return TorchEngine(load_config(tree), make_algorithm("reinforceplusplus", kl_loss_fn="none"), device=device)


def flops_of_step(shape: ModelShape, length: int, lora: bool) -> float:
    """Of forward and backward pass, as the head of this file says. Tied embeddings multiply once, as output layer."""
    each = 4 if lora else 6
    return length * (each * shape.num_parameters + 12 * shape.num_layers * shape.query_size * length / 2)


def peak_flops(device: str) -> float | None:
    if device == "cpu":
        return None
    name = torch.cuda.get_device_name()
    return next((peak for gpu, peak in PEAK_FLOPS.items() if all(word in name for word in gpu.split())), None)


def measure(report: Report, folder: str, device: str, length: int, prompt: int, lora: bool, runs: int) -> None:
    shape = read_shape(folder)
    engine = make_engine(folder, device, lora)
    batch = make_batch(length, prompt, shape.vocab_size)
    times = []
    for step in range(1, runs + 3):  # the first two make the optimizer's state and fill the allocator
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        engine.train_step(batch, step)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    seconds = median(times[2:])
    trained = shape.lora_parameters(LoraConfig(lora_rank=LORA_RANK)) if lora else None
    sizes = TrainSizes(tokens=length, checkpointing=True, trained=trained, compute_bytes=2 if device == "cuda" else 4)
    expected = sum(part.num_bytes for part in train_parts(shape, sizes)) / GB
    peak, flops = peak_flops(device), flops_of_step(shape, length, lora)
    work = f"{'LoRA' if lora else 'full'}, {length:,} tokens"
    theirs = PRIME_RL.get((lora, length)) if peak == PEAK_FLOPS["H100"] else None
    report.add(work, length / seconds, "tokens/s", against="prime-rl" if theirs else "", other=theirs)
    if peak:
        report.add(f"{work}: of the peak", flops / seconds / peak, "MFU")
    if device == "cuda":
        held = torch.cuda.max_memory_allocated() / GB
        report.add(f"{work}: memory", held, "GB", less_is_better=True, against="`rftdask estimate`", other=expected)


def bare_loop(folder: str, device: str, length: int, runs: int) -> float:
    """Tokens per second of transformers' model and loss, and PyTorch's optimizer, with nothing around them."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.to(device).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    tokens = torch.randint(2, model.config.vocab_size, (1, length), device=device)
    times = []
    for _ in range(runs + 2):
        began = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return length / median(times[2:])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16_384, 65_536])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--large", action="store_true", help="LoRA on seven billion weights")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.quick:
        raise SystemExit("there is no GPU here; --quick tries the script out on the CPU, and measures nothing")
    lengths, prompt, runs = ([256], 32, 1) if args.quick else (args.lengths, 1024, args.runs)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU: no GPU number exists, the script runs, no more"
    print(f"{name}; torch {torch.__version__}{'; tiny shape' if args.quick else ''}")
    report = Report(args)
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, args.quick, args.large)
        for lora in (True,) if args.large else (False, True):
            for length in lengths[:1] if args.large else lengths:
                measure(report, folder, device, length, prompt, lora, runs)
        if not args.large:
            report.add(
                f"a bare loop, full, {lengths[0]:,} tokens", bare_loop(folder, device, lengths[0], runs), "tokens/s"
            )
    report.write()


if __name__ == "__main__":
    main()
