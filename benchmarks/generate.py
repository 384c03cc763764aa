"""Tokens per second of the transformers engine against `model.generate`, on the batch shape of GRPO.

64 prompts x 8 siblings, a Qwen2 of about one million parameters, 8 new tokens, temperature 1, one thread. The runs
alternate, so that a change of the machine's load meets both; the ratio of the medians is printed.

    OMP_NUM_THREADS=1 python benchmarks/generate.py [prompt_tokens]

Prompts are between half of `prompt_tokens` (default 24) and all of it long.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from rftdask.explorer.engines import make_engine
from rftdask.explorer.engines.base import GenerateRequest, SamplingParams

NUM_PROMPTS, GROUP_SIZE, NEW_TOKENS, NUM_RUNS, VOCAB_SIZE = 64, 8, 8, 7, 100


def write_model(folder: str) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, eos_token_id=None, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def time_s(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main(prompt_tokens: int) -> None:
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    lengths = random.integers(prompt_tokens // 2, prompt_tokens + 1, NUM_PROMPTS)
    prompts = [tuple(random.integers(1, VOCAB_SIZE, length).tolist()) for length in lengths]
    sampling = SamplingParams(max_tokens=NEW_TOKENS)
    requests = [
        GenerateRequest(prompt, sampling, seed=number * GROUP_SIZE + sibling)
        for number, prompt in enumerate(prompts)
        for sibling in range(GROUP_SIZE)
    ]
    input_ids = torch.zeros(len(requests), max(lengths), dtype=torch.int64)
    for row, request in enumerate(requests):
        input_ids[row, -len(request.prompt_tokens) :] = torch.tensor(request.prompt_tokens)
    attention_mask = (input_ids != 0).long()
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        engine = make_engine("transformers", folder)
        model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def reference() -> object:
        return model.generate(
            input_ids=input_ids, attention_mask=attention_mask, do_sample=True, max_new_tokens=NEW_TOKENS,
            return_dict_in_generate=True, output_logits=True, pad_token_id=0, top_k=0,
        )  # fmt: skip

    times: dict[str, list[float]] = {"engine": [], "model.generate": []}
    for _ in range(NUM_RUNS):
        for name, call in (("engine", lambda: engine.generate(requests)), ("model.generate", reference)):
            times[name].append(time_s(call))
    for name, values in times.items():
        print(f"{name:15} {median(values) * 1e3:7.1f} ms  {len(requests) * NEW_TOKENS / median(values):9.0f} tokens/s")
    print(f"ratio {median(times['model.generate']) / median(times['engine']):.2f} (above 1: the engine is quicker)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 24)
