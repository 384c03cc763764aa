"""Tokens per second, MFU and peak memory of a train step on one GPU, for the shape of Qwen3-0.6B, compared with a bare
loop and TRL.

    python benchmarks/gpu_train.py [--lengths 16384 65536] [--runs 3] [--json FILE]     on one GPU
    python benchmarks/gpu_train.py --peak        only memory, of the same and of LoRA with the shape of Qwen2.5-7B
    python benchmarks/gpu_train.py --tiny [--peak]                                      anywhere: a tiny shape

The weights are random; the configuration is written out below, so nothing is downloaded. A step is
`TorchEngine.train_step` on one rollout of the given length (a prompt of 1,024 tokens): forward, PPO's clipped loss
without a KL term, backward with recomputed activations, AdamW; weights in float32, products in bfloat16. LoRA has rank
16 on all linear layers.

MFU counts the operations of the model without recomputation: per token, 6 operations per weight that multiplies it (4
for LoRA, whose frozen weights have no gradient), and 12 * layers * heads * size of a head * length / 2 of attention.
Source: arXiv:2204.02311 appendix B, halved because attention is causal. The peak is the maker's dense bfloat16 figure.

Each length is also measured, in the same run, data types and with recomputed activations, for a bare loop
(transformers' own loss on the same tokens with PyTorch's AdamW) and for `GRPOTrainer.training_step` of TRL on the same
prepared rollout with its own optimizer. Both compute all logits at once; if these do not fit the GPU, a row reports it.
TRL is in the extra `conformance`; without it, its rows are omitted with a message. Logprobs are measured first: ours in
chunks of logits, PyTorch's fused cross entropy (2.13) and Liger's, to decide whether a fused one is worth its rounding.

Compare with prime-rl's rows of 2026-02-01 for one H100 (benchmarks/results/BENCHMARKS.md there, also with recomputed
activations): full 11.90k tokens/s, 11.1 % at 16k and 10.15k, 26.8 % at 64k; LoRA 13.34k, 10.9 % and 9.97k, 25.2 %.
"""

from __future__ import annotations

import gc
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from report import Report, make_parser
from transformers import AutoModelForCausalLM, Qwen3Config

from rftdask.algorithm.compose import build_algorithm
from rftdask.buffer.batches.batch import TrainingBatch, supervised_batch
from rftdask.config import Config, load_config
from rftdask.driver.memory_estimate import GB, estimate
from rftdask.models.model_shape import ModelShape, read_shape
from rftdask.models.toy import build_toy_model
from rftdask.trainer.engines.strategies.fsdp2 import FSDP2
from rftdask.trainer.engines.torch_engine import TorchEngine
from rftdask.trainer.model import predicting_states, token_logprobs
from rftdask.trainer.packing import pack_rows
from rftdask.trainer.process_ranks import ProcessRanks

PEAK_FLOPS = {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "L40S": 362e12}
"""Dense bfloat16 FLOPS from the makers' data sheets; the first name whose words the device's name contains."""
LORA_RANK = 16
PRIME_RL = {(False, 16_384): 11_900, (False, 65_536): 10_150, (True, 16_384): 13_340, (True, 65_536): 9_970}
"""(LoRA, length) -> tokens/s on one H100, measured on 2026-02-01."""
MFU_AIM = 0.4
"""Aim for 16,384 tokens with all weights trained."""
Step = Callable[[], object]


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
    with torch.device(
        "cuda" if large and torch.cuda.is_available() else "cpu"
    ):  # draws seven billion numbers, which is faster on the GPU
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)


def model_folder(models: Path, tiny: bool, large: bool = False) -> str:
    """Return the folder of the model of 0.6 or seven billion weights; create it if it is missing."""
    folder = models / ("7b" if large else "0.6b")
    if not folder.exists():
        write_model(str(folder), tiny, large)
    return str(folder)


def make_batch(length: int, prompt: int, vocab_size: int) -> TrainingBatch:
    random = np.random.default_rng(0)
    rows = [(random.integers(2, vocab_size, length).tolist(), prompt, None)]
    batch = supervised_batch(rows, ["row 0"], 1)
    logprobs = np.full(len(batch.rollout_logprobs), -np.log(vocab_size), np.float32)
    return replace(batch, rewards=np.ones(1, np.float32), rollout_logprobs=logprobs, experts=np.zeros(1, bool))


def make_config(folder: str, lora: bool, length: int = 10**9) -> Config:
    """Configuration of a trainer of rollouts of at most `length` tokens."""
    tree: dict[str, Any] = {
        "mode": "train",
        "model": {"model_path": folder, "max_model_len": length},
        "buffer": {"batch_size": 1},
        "algorithm": {
            "algorithm_type": "reinforceplusplus", "kl_loss_fn": "none", "optimizer": {"weight_decay": 0.0}
        },
        "trainer": {"max_token_len_per_gpu": length, "gradient_checkpointing": True},
        "seed": 0,
    }  # fmt: skip
    if lora:
        tree["model"]["lora_configs"] = [{"lora_rank": LORA_RANK}]
    return load_config(tree)


def make_engine(config: Config, device: str, *, sharded: bool = False) -> TorchEngine:
    """Build the engine. sharded: by fsdp2, as the only rank of the existing process group."""
    strategy = FSDP2(ProcessRanks(), torch.device(device), config.trainer) if sharded else None
    return TorchEngine(config, build_algorithm(config), strategy, device=device)


def flops_of_step(shape: ModelShape, length: int, lora: bool) -> float:
    """Operations of forward and backward pass; the formula is in the module docstring. Tied embeddings count once, as
    output layer.
    """
    each = 4 if lora else 6
    return length * (each * shape.num_parameters + 12 * shape.num_layers * shape.query_size * length / 2)


def peak_flops(device: str) -> float | None:
    if device == "cpu":
        return None
    name = torch.cuda.get_device_name()
    return next((peak for gpu, peak in PEAK_FLOPS.items() if all(word in name for word in gpu.split())), None)


def step_seconds(step: Step, device: str, runs: int) -> tuple[float, float]:
    """Return (median seconds of a step, peak GB on the GPU or 0 without one). Raises: torch.OutOfMemoryError."""
    times = []
    for _ in range(runs + 2):  # the first two steps create the optimizer's state and fill the allocator
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median(times[2:]), torch.cuda.max_memory_allocated() / GB if device == "cuda" else 0.0


def our_step(folder: str, device: str, batch: TrainingBatch, lora: bool) -> Step:
    engine, steps = make_engine(make_config(folder, lora, len(batch.tokens)), device), iter(range(1, 10**6))
    return lambda: engine.train_step(batch, next(steps))


def bare_step(folder: str, device: str, batch: TrainingBatch, lora: bool) -> Step:
    """Step with transformers' model and loss and PyTorch's optimizer, without a framework."""
    # Frozen weights keep the data type of the file, as in our trainer.
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto" if lora else torch.float32)
    if lora:
        from peft import LoraConfig as PeftConfig  # late: an extra that full training does not need

        model.enable_input_require_grads()
        model.add_adapter(PeftConfig(r=LORA_RANK, target_modules="all-linear"))
    model.to(device).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)
    tokens = torch.from_numpy(batch.tokens).long()[None].to(device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def trl_step(folder: str, device: str, batch: TrainingBatch, lora: bool) -> Step:
    from datasets import Dataset  # late, like trl: an extra that the other arms do not need
    from trl import GRPOConfig, GRPOTrainer

    adapters = None
    if lora:
        from peft import LoraConfig as PeftConfig

        adapters = PeftConfig(r=LORA_RANK, target_modules="all-linear")
    scratch, prompt = f"{folder}-trl", int(batch.prompt_lengths[0])
    args = GRPOConfig(
        output_dir=scratch, use_cpu=device == "cpu", bf16=device == "cuda", report_to=[], beta=0.0, learning_rate=1e-6,
        per_device_train_batch_size=1, num_generations=2, steps_per_generation=2, num_iterations=10**6,
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, disable_tqdm=True,
        max_completion_length=len(batch.tokens) - prompt, model_init_kwargs={"dtype": "auto" if lora else "float32"},
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=folder, args=args, reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "1"}] * 2),
        peft_config=adapters,
    )  # fmt: skip
    tokens = torch.from_numpy(batch.tokens).long()[None].to(device)
    inputs = {
        "prompt_ids": tokens[:, :prompt],
        "completion_ids": tokens[:, prompt:],
        "old_per_token_logps": torch.from_numpy(batch.rollout_logprobs)[None].to(device),
        "advantages": torch.ones(1, device=device),
        "num_items_in_batch": torch.tensor(len(batch.tokens) - prompt, device=device),
    }
    inputs |= {f"{part}_mask": torch.ones_like(inputs[f"{part}_ids"]) for part in ("prompt", "completion")}
    trainer._step, trainer._buffered_inputs = 1, [inputs, inputs]  # past the step that generates
    trainer.current_gradient_accumulation_steps = 1
    model: Any = trainer.model
    model.train()
    optimizer = trainer.create_optimizer()

    def step() -> None:
        trainer.training_step(model, {}, None)
        optimizer.step()
        model.zero_grad()

    return step


PEERS: dict[str, Callable[[str, str, TrainingBatch, bool], Step]] = {"a bare loop": bare_step, "TRL": trl_step}


def measure(report: Report, folder: str, device: str, length: int, prompt: int, lora: bool, runs: int) -> None:
    """Measure the speed of our step and of its peers, one after the other."""
    shape = read_shape(folder)
    batch, work = make_batch(length, prompt, shape.vocab_size), f"{'LoRA' if lora else 'full'}, {length:,} tokens"
    seconds, held = step_seconds(our_step(folder, device, batch, lora), device, runs)
    peak, flops = peak_flops(device), flops_of_step(shape, length, lora)
    theirs = PRIME_RL.get((lora, length)) if peak == PEAK_FLOPS["H100"] else None
    report.add(work, length / seconds, "tokens/s", against="prime-rl" if theirs else "", other=theirs)
    if peak:
        aim = MFU_AIM if not lora and length == 16_384 else None
        report.add(f"{work}: of the peak", flops / seconds / peak, "MFU", goal=aim)
    if device == "cuda":
        report.add(f"{work}: memory", held, "GB", less_is_better=True)
    for name, peer in PEERS.items():
        if name == "TRL" and find_spec("trl") is None:
            print("TRL is not installed, so it is left out; it is in the extra conformance")
            continue
        free()
        try:
            of_peer, held_by_peer = step_seconds(peer(folder, device, batch, lora), device, runs)
        except torch.OutOfMemoryError:
            most = torch.cuda.max_memory_allocated() / GB
            report.add(f"{work}: {name} is out of memory", most, "GB", less_is_better=True)
            continue
        report.add(work, length / seconds, "tokens/s", against=name, other=length / of_peer)
        if device == "cuda":
            report.add(f"{work}: memory", held, "GB", less_is_better=True, against=name, other=held_by_peer)
    free()


def measure_heads(report: Report, device: str, length: int, tiny: bool, runs: int) -> None:
    """Measure logprobs of all tokens and their gradient: ours in chunks of logits, and fused, by PyTorch and Liger."""
    hidden_size, vocab_size = (64, 512) if tiny else (1024, 151_936)
    sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size, "num_hidden_layers": 0, "num_attention_heads": 8}
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(Qwen3Config(**sizes, head_dim=hidden_size // 8))
    batch = make_batch(length, 1, vocab_size)
    rows = pack_rows(batch.row_tokens(), batch.prompt_lengths, batch.temperatures, torch.device(device))
    half = torch.bfloat16 if device == "cuda" else torch.float32

    def ours() -> torch.Tensor:
        return token_logprobs(model, rows)[0]

    def states() -> torch.Tensor:
        return predicting_states(model, rows)

    def of_torch() -> torch.Tensor:
        options = torch.nn.LinearCrossEntropyOptions()
        arguments: Any = states().to(half), model.lm_head.weight.to(half), rows.target_Q
        return -torch.nn.functional.linear_cross_entropy(*arguments, reduction="none", options=options)

    def of_liger() -> torch.Tensor:
        from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Fused  # late: in none of our extras

        return -Fused.apply(states().to(half), model.lm_head.weight.to(half), rows.target_Q)

    ways = {"ours": ours}
    ways |= {"PyTorch's": of_torch} if hasattr(torch.nn.functional, "linear_cross_entropy") else {}
    ways |= {"Liger's": of_liger} if find_spec("liger_kernel") else {}
    seconds = {}
    for name, way in ways.items():

        def step(way: Callable[[], torch.Tensor] = way) -> None:
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                way().sum().backward()
            model.zero_grad()

        seconds[name], held = step_seconds(step, device, runs)
        work = f"logprobs of {length:,} tokens, {vocab_size:,} words"
        against, other = ("", None) if name == "ours" else (f"{name} fused cross entropy", seconds[name])
        report.add(work, seconds["ours"], "s", less_is_better=True, against=against, other=other)
        if device == "cuda":
            report.add(f"{work}: memory, {name}", held, "GB", less_is_better=True)
    if "Liger's" not in ways:
        print("Liger is not installed, so it is left out (liger-kernel; on an H100 with its extra cutedsl)")


def measure_peak(report: Report, folder: str, device: str, length: int, prompt: int, lora: bool, name: str) -> None:
    """Measure the peak of a step against `rftdask estimate` of its configuration; on a CPU only the estimate."""
    batch = make_batch(length, prompt, read_shape(folder).vocab_size)
    _, held = step_seconds(our_step(folder, device, batch, lora), device, 1)
    expected = estimate(make_config(folder, lora, length))[0].total_bytes / GB
    work = f"{name}, {'LoRA' if lora else 'full'}, {length:,} tokens"
    if device == "cuda":
        report.add(f"{work}: memory", held, "GB", less_is_better=True, against="`rftdask estimate`", other=expected)
    else:
        report.add(f"{work}: only the estimate, no GPU", expected, "GB", less_is_better=True)
    free()


NO_PEFT = "peft is not installed here (extra lora)"


def free() -> None:
    """Release the memory of the model before."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = make_parser(__doc__, "--tiny")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16_384, 65_536])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peak", action="store_true", help="only the peak of memory, against the estimate")
    parser.add_argument(
        "--models", type=Path, default=None, metavar="FOLDER", help="folder in which models are kept or created"
    )
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.quick:
        raise SystemExit("no GPU found; --tiny tests the script on the CPU without valid numbers")
    lengths, prompt, runs = ([256], 32, 1) if args.quick else (args.lengths, 1024, args.runs)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU: only tests that the script runs"
    print(f"{name}; torch {torch.__version__}{'; tiny shape' if args.quick else ''}")
    report, ways = Report(args), (False, True) if find_spec("peft") else (False,)
    if True not in ways:
        print(f"LoRA is left out: {NO_PEFT}")
    warnings.simplefilter("ignore")  # warnings of TRL
    with tempfile.TemporaryDirectory() as scratch:
        models = args.models or Path(scratch)
        if not args.peak:
            measure_heads(report, device, lengths[0], args.quick, runs)
            for lora in ways:
                for length in lengths:
                    measure(report, model_folder(models, args.quick), device, length, prompt, lora, runs)
        else:
            for lora in ways:
                folder = model_folder(models, args.quick)
                measure_peak(report, folder, device, lengths[0], prompt, lora, "0.6B")
            if True in ways and (args.quick or torch.cuda.get_device_properties(0).total_memory > 70e9):
                folder = model_folder(models, args.quick, large=True)
                measure_peak(report, folder, device, lengths[0], prompt, True, "7B")
            elif True in ways:
                print("7B is left out: it is for a GPU of 80 GB")
    report.write()


if __name__ == "__main__":
    main()
