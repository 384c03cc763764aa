"""Models that fit 1 to 64 GPUs, and `rftdask estimate` against published peaks; prints docs/sizes.md.

    python benchmarks/sizes.py [--json FILE] > docs/sizes.md

Pure arithmetic: no GPU, no network, no torch. A test compares the page with this output.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rftdask.cluster.layout import plan_machines
from rftdask.config import Config, load_config
from rftdask.config.schema.model import LoraConfig
from rftdask.driver.memory_estimate import (
    GB,
    USABLE,
    Estimate,
    TrainSizes,
    estimate,
    gpu_bytes,
    load_bytes,
    logit_bytes,
    train_parts,
    train_sizes,
)
from rftdask.models.model_shape import read_shape

GPU = "H100 80GB"
GIB = 2**30
HOST_BYTES = 1000 * GB
"""Host memory of a machine that must hold weights and optimizer state."""
MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.3-70B", "Qwen/Qwen3-235B-A22B")
MACHINES = ((1, 1), (1, 8), (4, 8), (8, 8))
"""(machines, GPUs per machine)."""
WAYS = (
    ("all weights", ()),
    ("all weights, offloaded", ("trainer.offload_policy=true",)),
    ("LoRA 16", ("model.lora_configs=[{lora_rank: 16}]",)),
)
_PRIME = "https://github.com/PrimeIntellect-ai/prime-rl/tree/559b447/benchmarks/baselines"
# (model, GPUs, rank of LoRA or 0, tokens of a pass, published peak in GiB): one or eight H100, FSDP2, recomputed
# activations, mode rl. For a run of prime-rl the peak is max_memory_reserved.
PEAKS = (
    ("Qwen/Qwen3-0.6B", 1, 0, 16_384, 12.53),
    ("Qwen/Qwen3-0.6B", 1, 0, 65_536, 19.56),
    ("Qwen/Qwen3-0.6B", 1, 16, 16_384, 5.15),
    ("Qwen/Qwen3-0.6B", 1, 16, 65_536, 11.45),
    ("Qwen/Qwen3-4B", 1, 16, 16_384, 23.30),
    ("Qwen/Qwen3-4B", 1, 16, 65_536, 41.99),
    ("Qwen/Qwen3-4B", 8, 0, 16_384, 17.10),
    ("Qwen/Qwen3-4B", 8, 0, 65_536, 36.10),
    ("Qwen/Qwen3-4B", 8, 16, 16_384, 10.26),
    ("Qwen/Qwen3-4B", 8, 16, 65_536, 28.85),
    ("Qwen/Qwen3-30B-A3B", 8, 0, 16_384, 74.59),
    ("Qwen/Qwen3-30B-A3B", 8, 0, 65_536, 105.35),
)
_TITAN = "https://github.com/pytorch/torchtitan/blob/31a17bf/benchmarks/llama3_h100_202412_torchtitan.md"
# (model, GPUs, tokens of a pass and rank, published peak in GiB): FSDP2, layers recomputed and compiled, 8-bit
# products, all logits of a pass at once in float32.
WITH_ALL_LOGITS = (("meta-llama/Llama-3.1-8B", 8, 32_768, 83.9),)
_VERL = "https://github.com/verl-project/verl/blob/a74fc52/docs/perf/device_tuning.rst"
# (model, rank of LoRA or 0, number of 80 GB GPUs of the smallest published run).
SMALLEST = (
    ("Qwen/Qwen2.5-0.5B", 32, 1),
    ("Qwen/Qwen2.5-3B", 32, 1),
    ("Qwen/Qwen2.5-7B", 32, 1),
    ("Qwen/Qwen2.5-14B", 32, 2),
    ("Qwen/Qwen2.5-32B", 32, 4),
    ("Qwen/Qwen2.5-72B", 32, 8),
    ("Qwen/Qwen2.5-7B", 0, 2),
    ("Qwen/Qwen2.5-14B", 0, 4),
    ("Qwen/Qwen2.5-72B", 0, 32),
)


def make_config(model: str, machines: tuple[int, int], *settings: str) -> Config:
    """Configuration of GRPO without a reference model, prompts of 1,024 and responses of 8,192 tokens, on vLLM."""
    tree: dict[str, Any] = {
        "mode": "both",
        "model": {"model_path": model, "max_prompt_tokens": 1024, "max_response_tokens": 8192},
        "algorithm": {"algorithm_type": "grpo", "kl_loss_fn": "none"},
        "buffer": {"batch_size": 64, "explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
        "explorer": {"rollout_model": {"engine_type": "vllm"}},
        "trainer": {"gradient_checkpointing": True, "max_token_len_per_gpu": 9216},
        "deterministic": False,
        "cluster": {
            "type": "joined" if machines[0] > 1 else "local",
            "node_num": machines[0],
            "gpu_per_node": machines[1],
        },
    }
    return load_config(tree, list(settings))


def plan(model: str, machines: tuple[int, int]) -> tuple[str, list[Estimate], str, float] | None:
    """Return (what is trained, memory of trainer, engines and host, placement, bytes to load) of the first variant that
    fits after loading; None: none fits.
    """
    num_gpus, usable = machines[0] * machines[1], USABLE * gpu_bytes(GPU)
    # Half or a quarter of the GPUs sample; on one machine, otherwise all GPUs train and sample alternately.
    splits = [(num_gpus // 2, False), (num_gpus // 4, False), *([(num_gpus, True)] if machines[0] == 1 else [])]
    tried = [(way, split, tensor) for way in WAYS for split in splits for tensor in (1, 2, 4, 8)]
    for (way, settings), (num_sampling, by_turns), tensor in tried:
        num_engines = num_sampling // tensor
        if not num_engines or tensor > machines[1]:
            continue
        sampling = f"tensor_parallel_size={tensor}", f"engine_num={num_engines}"
        config = make_config(
            model,
            machines,
            *settings,
            *(f"explorer.rollout_model.{setting}" for setting in sampling),
            *(["cluster.colocate=true"] if by_turns else []),
        )
        layout = plan_machines(config)
        estimates = estimate(config, None, layout, gpu_bytes(GPU))
        trainer, engines, host = estimates
        lasting = host.total_bytes - part(host, "loading")
        if trainer.total_bytes <= usable and not trainer.problem and not engines.problem and lasting <= HOST_BYTES:
            at_once = f"{trainer.num_gpus} rank{'s' * (trainer.num_gpus > 1)}, {num_engines} x {tensor}"
            shape = read_shape(model)
            loading = load_bytes(shape, train_sizes(config, shape, layout))
            return way, estimates, at_once + ", by turns" * by_turns, loading
    return None


def part(estimate: Estimate, name: str) -> float:
    return sum(each.num_bytes for each in estimate.parts if each.name == name)


def fits_table() -> list[str]:
    lines = [
        "| model | GPUs | trained | ranks, engines x GPUs | a rank | to load | weights, cache of engines | host |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        for machines in MACHINES:
            at = f"| {model} | {machines[0]} x {machines[1]} "
            fitting = plan(model, machines)
            if fitting is None:
                lines.append(f"{at}| does not fit | | | | | |")
                continue
            way, (trainer, engines, host), where, loading = fitting
            lines.append(
                f"{at}| {way} | {where} | {trainer.total_bytes / GB:.0f} | {loading / GB:.0f} | "
                f"{part(engines, 'weights') / GB:.0f}, "
                f"{part(engines, 'KV cache') / GB:.0f} | {(host.total_bytes - part(host, 'loading')) / GB:.0f} |"
            )
    return lines


def peak_bytes(model: str, num_gpus: int, lora_rank: int, tokens: int) -> float:
    """Estimate of `rftdask estimate` for one of PEAKS, with float32 weights under LoRA, as in the published run."""
    shape = replace(read_shape(model), bytes_at_rest=4)
    trained = shape.lora_parameters(LoraConfig(lora_rank=lora_rank)) if lora_rank else None
    # The published trainer also shards on one GPU.
    sizes = TrainSizes(tokens=tokens, num_ranks=num_gpus, sharded=True, checkpointing=True, trained=trained)
    return sum(each.num_bytes for each in train_parts(shape, sizes))


def peak_with_all_logits(model: str, num_gpus: int, tokens: int) -> float:
    """The same if all logits of a pass were computed at once, with as many bytes per logit as in our chunks."""
    shape = read_shape(model)
    more = 12.0 * tokens * shape.vocab_size - logit_bytes(shape, tokens)
    return peak_bytes(model, num_gpus, 0, tokens) + more


def fewest_ranks(model: str, lora_rank: int, offloaded: bool) -> int:
    """Fewest 80 GB GPUs, a power of two, that hold a trainer with passes of 4,096 tokens."""
    shape = read_shape(model)
    trained = shape.lora_parameters(LoraConfig(lora_rank=lora_rank)) if lora_rank else None
    num_ranks = 1
    while True:
        sizes = TrainSizes(
            4096,
            num_ranks,
            sharded=num_ranks > 1 or offloaded,
            offloaded=offloaded,
            checkpointing=True,
            trained=trained,
        )
        if sum(each.num_bytes for each in train_parts(shape, sizes)) <= USABLE * gpu_bytes(GPU):
            return num_ranks
        num_ranks *= 2


def main() -> None:
    from report import (
        Report,
        make_parser,
    )  # late: report is importable only as a script, not for the test that imports this module

    args = make_parser(__doc__).parse_args()
    print_page()
    if args.json is not None:
        report = Report(args)
        for model, num_gpus, lora_rank, tokens, peak in PEAKS:
            work = f"{model}, {num_gpus} GPUs, {f'LoRA {lora_rank}' if lora_rank else 'all'}, {tokens:,} tokens"
            ours = peak_bytes(model, num_gpus, lora_rank, tokens) / GIB
            report.add(work, ours, "GiB", less_is_better=True, against="prime-rl", other=peak)
        report.write()


def print_page() -> None:
    """Print docs/sizes.md."""
    print("""# What fits: models, GPUs, and published peaks

`benchmarks/sizes.py` prints this page from `rftdask estimate`, whose formulas docs/trainer.md
derives. None of it has run on a GPU. `rftdask estimate CONFIG --gpus 8 --nodes 4 --gpu "H100 80GB"`
estimates your configuration, part by part. The package includes the shapes of these models and of
the others in `rftdask/models/model_shape.py`, so no network is needed.

## Models on 1, 8, 32 and 64 GPUs of 80 GB

Setup: GRPO without a reference model, prompts of 1,024 and responses of 8,192 tokens, passes of as
many tokens, activation checkpointing, AdamW with float32 weights, vLLM engines with 90 % of a GPU.
Half or a quarter of the GPUs sample. On one machine, if that does not fit, all GPUs alternate
between training and sampling ("by turns"). Each row shows the first choice that fits: all weights;
all weights with `trainer.offload_policy`; LoRA. GB are 10^9 bytes per GPU; the plan uses 72 of its
80. A host can hold 1,000 GB. The last column is the peak of its processes, without the page cache.
""")
    print("\n".join(fits_table()))
    print(f"""
**To load**: the peak on a rank's GPU while it reads its rows of the weights.

Remedies for "does not fit": more GPUs, shorter passes (`trainer.max_token_len_per_gpu`), a smaller
optimizer (docs/trainer.md), an engine with 8-bit weights
(`extra_engine_args: {{quantization: fp8_per_block}}`).

## Against published peaks

The estimates are for our trainer, the peaks for [prime-rl](
{_PRIME})
on the same job: one or eight H100, reserved memory. prime-rl compiles its layers, uses other chunks
of logits, and keeps weights under LoRA in float32, as this estimate does. It also adapts experts,
so its LoRA rows of mixtures of experts are omitted. A ratio above 1 means that our estimate is
higher.

| model | GPUs | trained | tokens a pass | published, GiB | estimate, GiB | ratio |
|---|---|---|---|---|---|---|""")
    for model, num_gpus, lora_rank, tokens, peak in PEAKS:
        ours = peak_bytes(model, num_gpus, lora_rank, tokens) / GIB
        what = f"LoRA {lora_rank}" if lora_rank else "all"
        print(f"| {model} | {num_gpus} | {what} | {tokens:,} | {peak:.1f} | {ours:.1f} | {ours / peak:.2f} |")
    for model, num_gpus, tokens, peak in WITH_ALL_LOGITS:
        ours = peak_with_all_logits(model, num_gpus, tokens) / GIB
        print(f"| {model} | {num_gpus} | all, all logits | {tokens:,} | {peak:.1f} | {ours:.1f} | {ours / peak:.2f} |")
    print(f"""
The last row is [torchtitan's]({_TITAN}),
which trains on all tokens and keeps all logits of a pass. Our trainer never does, so the estimate
of this row counts all logits at as many bytes as those of our chunks. If its ranks split sequences
of 65,536 to 262,144 tokens, each has as many tokens and the same peak (84.0 to 84.5). Its rows with
some activations kept, or split over the ranks that cut layers, use another algorithm and are
omitted.

verl lists the smallest machines on which GRPO runs worked, with trainer and engines on the same
GPUs ([table](
{_VERL})). The
estimates are the fewest GPUs, a power of two, whose 80 GB hold a trainer with passes of 4,096
tokens:

| model | trained | verl | estimate | with `offload_policy` |
|---|---|---|---|---|""")
    for model, lora_rank, num_gpus in SMALLEST:
        ours_offloaded = fewest_ranks(model, lora_rank, True)
        what = f"LoRA {lora_rank}" if lora_rank else "all"
        print(f"| {model} | {what} | {num_gpus} | {fewest_ranks(model, lora_rank, False)} | {ours_offloaded} |")


if __name__ == "__main__":
    main()
