"""Rollouts through this package against vLLM's own batch call: python benchmarks/vllm_rollouts.py [--model FOLDER]

In one process after the other, on the same model, prompts, lengths and sampling: `vllm.LLM.generate`, then an
`EngineClient` asked by the runner of an explorer worker, with prompts, rewards and experiences. Prints sampled tokens
per second, best of --rounds, and their ratio; 1 means that nothing is lost around the engine. Needs vLLM
(docs/engines.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from rftdask.buffer.task import Task
from rftdask.explorer.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.explorer.engines.host import EngineClient, EngineSpec
from rftdask.explorer.rollout import RolloutDefaults, ServedWeights
from rftdask.explorer.runner import Engines, run_rollout_batch
from rftdask.toy import build_toy_model

GROUP_SIZE = 8
TIMEOUT_S = 600.0


def questions(count: int) -> list[str]:
    return [f"question number {number}: {'what is more? ' * (number % 5)}" for number in range(count)]


def bare(arguments: argparse.Namespace) -> None:
    """Prints the best tokens/s of vLLM alone."""
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_USE_V2_MODEL_RUNNER="0")
    from transformers import AutoTokenizer
    from vllm import LLM
    from vllm import SamplingParams as VllmParams

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    llm = LLM(arguments.model, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, generation_config="vllm")
    prompts, params = [], []
    for number, question in enumerate(questions(arguments.tasks)):
        tokens = tokenizer.encode(question, add_special_tokens=False)
        for sibling in range(GROUP_SIZE):
            prompts.append({"prompt_token_ids": tokens})
            params.append(
                VllmParams(
                    max_tokens=arguments.tokens, ignore_eos=True, logprobs=0, detokenize=False,
                    min_tokens=arguments.tokens, seed=number * GROUP_SIZE + sibling + 1, flat_logprobs=True,
                )
            )  # fmt: skip
    best = 0.0
    for _ in range(arguments.rounds + 1):
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        took_s = time.perf_counter() - began
        best = max(best, sum(len(output.outputs[0].token_ids) for output in outputs) / took_s)
    print(json.dumps({"tokens_per_s": best}), flush=True)


def ours(arguments: argparse.Namespace) -> float:
    """The best tokens/s of whole rollouts."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(arguments.model)
    options = (("dtype", "float32"), ("engine_args", "{}"), ("trust_remote_code", False))
    client = EngineClient(EngineSpec("vllm", arguments.model, options, os.cpu_count() or 1, None))
    client.wait_ready()
    tasks = [
        Task("t", 0, number, prompt=text, truth="4", workflow="simple_workflow", reward_fn="exact_reward")
        for number, text in enumerate(questions(arguments.tasks))
    ]

    async def generate(requests: list[GenerateRequest]) -> list[Generation]:
        return await asyncio.to_thread(client.generate, requests, TIMEOUT_S)

    async def batch() -> float:
        began = time.perf_counter()
        outcome = await run_rollout_batch(
            tasks,
            repeat_times=GROUP_SIZE,
            explore_step=1,
            engines=Engines(generate, tokenizer),
            defaults=RolloutDefaults(SamplingParams(arguments.tokens, min_tokens=arguments.tokens)),
            weights=ServedWeights(0, ""),
        )
        took_s = time.perf_counter() - began
        return sum(len(each.tokens) - each.prompt_length for each in outcome.experiences) / took_s

    try:
        return max(asyncio.run(batch()) for _ in range(arguments.rounds + 1))
    finally:
        client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="model folder; default: a toy of 2 million weights")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        bare(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        if not arguments.model:
            build_toy_model(folder, hidden_size=256, intermediate_size=512, num_layers=4, num_heads=4)
            arguments.model = folder
        sizes = ("tasks", "tokens", "rounds", "model")
        command = [f"--{name}={getattr(arguments, name)}" for name in sizes]
        done = subprocess.run(
            [sys.executable, __file__, "--bare", *command], check=True, stdout=subprocess.PIPE, text=True
        )
        found = next(line for line in done.stdout.splitlines() if line.startswith('{"tokens_per_s"'))  # vLLM logs there
        alone = float(json.loads(found)["tokens_per_s"])
        whole = ours(arguments)
    print(f"vllm.LLM.generate {alone:8.0f} tokens/s   rollouts {whole:8.0f} tokens/s   ratio {whole / alone:.2f}")


if __name__ == "__main__":
    main()
