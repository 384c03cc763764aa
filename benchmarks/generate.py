"""Tokens per second of rollouts through rftdask, compared with the engine's own batch call, on the batch shape of GRPO.

    OMP_NUM_THREADS=1 python benchmarks/generate.py [--engine vllm] [--hidden 128] [--layers 4] [--quick] [--json
    FILE]

Ours is a complete rollout: workflow, chat template and tokenizer (of bytes), runner, engine in its own process, tokens
with logprobs, reward. The bare call is `model.generate` of transformers, or `LLM.generate` of vLLM with our engine's
settings, on the same token ids, with the same sampling and lengths. Responses have 1 to --max-tokens tokens, to
simulate ends of text; --even gives all of them --max-tokens tokens.

With --turns 4 the benchmark compares rollouts of several turns with long-tailed lengths (at most --max-tokens, a fifth
of it on average) on one engine: requests sent as they come (`StreamingQueue`) against one call at a time
(`LockstepQueue`). A call ends with its longest response, so short rollouts wait for the slowest in each turn.

    OMP_NUM_THREADS=1 python benchmarks/generate.py --turns 4 --prompts 16 --siblings 1 --max-tokens 128

The runs alternate, so that load on the machine affects both. Reported are medians and the median of the ratios of the
pairs of runs (above 1 ours is faster), with the smallest and largest ratio, both per second and per CPU second of all
processes; use the latter on a busy machine. vLLM is an extra; for CPUs, tests/vllm_engine/install_vllm.sh creates an
environment with it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import string
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import psutil
import torch
from report import Report, make_parser
from transformers import AutoModelForCausalLM, Qwen2Config, StoppingCriteria, StoppingCriteriaList

from rftdask.config.schema.explorer import ExplorerConfig, InferenceModelConfig
from rftdask.config.schema.model import ModelConfig
from rftdask.data.task import Task
from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.engines.client import EngineClient, EngineSpec
from rftdask.rollouts.policy.request_queues import GenerateBatch, Streaming
from rftdask.rollouts.runner import TextEngine, run_work_unit
from rftdask.rollouts.workflows.base import PolicyModel
from rftdask.rollouts.workflows.registry import workflow
from rftdask.synchronizer.published import Published

VOCAB_SIZE = 128
VLLM_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_USE_V2_MODEL_RUNNER": "0"}
"""Environment that our engine sets on a CPU, also given to the bare engine."""


def write_model(folder: str, hidden: int = 128, layers: int = 4) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=hidden, intermediate_size=hidden * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, max_position_embeddings=4096,
        eos_token_id=None, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


class ByteTokenizer:
    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        return str(conversation[-1]["content"])

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode("latin1")


def start_engine(engine: str, folder: str) -> EngineClient:
    section = InferenceModelConfig.model_validate(
        {"engine_type": engine, "engine_num": 1, "dtype": "float32", "seed": 42}
    )
    model = ModelConfig(model_path=folder, max_model_len=4096, max_prompt_tokens=2048, max_response_tokens=2048)
    client = EngineClient(EngineSpec(section, model, threads=1))
    client.wait_ready()
    return client


async def roll_out(
    tasks: Sequence[Task], repeat_times: int, generate: GenerateBatch | Streaming, max_tokens: int
) -> None:
    outcome = await run_work_unit(
        tasks,
        repeat_times=repeat_times,
        explore_step=1,
        policy=TextEngine(generate, ByteTokenizer()),
        explorer=ExplorerConfig(),
        model=ModelConfig(model_path="none", max_response_tokens=max_tokens),
        sampling={tasks[0].taskset: SamplingParams(max_tokens=max_tokens, ignore_eos=True)},
        weights=Published(0, "", ""),
    )
    failed = [each.error for each in outcome.experiences if not each.status.trainable]
    if failed:
        raise SystemExit(f"{len(failed)} rollouts failed, the first: {failed[0]}")


class Ours:
    """Rollouts of `tasks`; the i-th request ends after `lengths[i]` tokens."""

    def __init__(self, engine: str, folder: str, tasks: Sequence[Task], lengths: Sequence[int]) -> None:
        self.requests: list[GenerateRequest] = []
        self._tasks, self._lengths = tasks, lengths
        self._client = start_engine(engine, folder)

    def __call__(self) -> None:
        asyncio.run(self._roll_out())

    async def _roll_out(self) -> None:
        await roll_out(self._tasks, len(self._lengths) // len(self._tasks), self._generate, max(self._lengths))

    async def _generate(self, requests: list[GenerateRequest]) -> list[Generation]:
        assert len(requests) == len(self._lengths), "one call holds them all"
        self.requests = [
            replace(request, sampling=replace(request.sampling, max_tokens=length, ignore_eos=True))
            for request, length in zip(requests, self._lengths, strict=True)
        ]
        return await asyncio.to_thread(self._client.generate, self.requests, 600.0)

    def close(self) -> None:
        self._client.close()


class _Lengths(StoppingCriteria):
    def __init__(self, last_columns: torch.Tensor) -> None:
        self._last_columns = last_columns

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self._last_columns


def bare_transformers(folder: str, requests: Sequence[GenerateRequest]) -> Callable[[], object]:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    longest = max(len(request.prompt_tokens) for request in requests)
    input_ids = torch.zeros(len(requests), longest, dtype=torch.int64)
    for row, request in enumerate(requests):
        input_ids[row, -len(request.prompt_tokens) :] = torch.tensor(request.prompt_tokens)
    lengths = torch.tensor([request.sampling.max_tokens for request in requests])
    return lambda: model.generate(
        input_ids=input_ids, attention_mask=(input_ids != 0).long(), do_sample=True, pad_token_id=0, top_k=0,
        max_new_tokens=int(lengths.max()), stopping_criteria=StoppingCriteriaList([_Lengths(longest + lengths)]),
    )  # fmt: skip


def bare_vllm(folder: str, requests: Sequence[GenerateRequest]) -> Callable[[], object]:
    from vllm import LLM
    from vllm import SamplingParams as Sampling

    llm = LLM(
        model=folder, dtype="float32", max_model_len=4096, skip_tokenizer_init=True, enforce_eager=True,
        enable_chunked_prefill=False, generation_config="vllm", disable_log_stats=True,
    )  # fmt: skip
    prompts: Any = [{"prompt_token_ids": list(request.prompt_tokens)} for request in requests]
    sampling = [
        Sampling(
            max_tokens=request.sampling.max_tokens, temperature=request.sampling.temperature,
            seed=request.seed & (2**63 - 1), logprobs=0, ignore_eos=True, detokenize=False,
        )
        for request in requests
    ]  # fmt: skip
    return lambda: llm.generate(prompts, sampling, use_tqdm=False)


@workflow("benchmark_turns", in_process=True)
async def take_turns(task: Task, model: PolicyModel) -> float:
    """Generate the numbers of tokens listed in the truth, turn by turn, each after the whole text so far."""
    text = task.prompt
    for max_tokens in map(int, task.truth.split()):
        text += (await model.generate(text, max_tokens=max_tokens)).text
    return 1.0


def compare_desks(report: Report, arguments: argparse.Namespace, folder: str, tasks: Sequence[Task]) -> None:
    """Compare requests sent as they come with one call at a time, on tasks of several turns."""
    drawn = random.Random(1)
    longest = arguments.max_tokens
    turns = [[max(4, round(longest * drawn.random() ** 4)) for _ in range(arguments.turns)] for _ in tasks]
    tasks = [
        replace(task, workflow="benchmark_turns", reward_fn="", truth=" ".join(map(str, lengths)))
        for task, lengths in zip(tasks, turns, strict=True)
    ]
    num_tokens = arguments.siblings * sum(map(sum, turns))
    client = start_engine(arguments.engine, folder)

    async def one_call(requests: list[GenerateRequest]) -> list[Generation]:
        return await asyncio.to_thread(client.generate, requests, 600.0)

    def queue(generate: GenerateBatch | Streaming) -> Callable[[], object]:
        return lambda: asyncio.run(roll_out(tasks, arguments.siblings, generate, longest))

    come, call = queue(Streaming(client.submit, 600.0)), queue(one_call)
    try:
        come(), call()  # warm up
        pairs = [(time_s(come), time_s(call)) for _ in range(arguments.runs)]
    finally:
        client.close()
    add_pairs(report, "turns, requests as they come", "in calls", pairs, num_tokens)


def cpu_s() -> float:
    """Return the CPU seconds of this process and its descendants."""
    here = psutil.Process()
    times = [process.cpu_times() for process in (here, *here.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def time_s(call: Callable[[], object]) -> tuple[float, float]:
    """Return (wall seconds, CPU seconds)."""
    began_s, began_cpu_s = time.perf_counter(), cpu_s()
    call()
    return time.perf_counter() - began_s, cpu_s() - began_cpu_s


def add_pairs(
    report: Report,
    work: str,
    other_name: str,
    pairs: Sequence[tuple[tuple[float, float], tuple[float, float]]],
    num_tokens: int,
    goal: float | None = None,
) -> None:
    for number, clock in enumerate(("second", "CPU second")):
        ours_s, other_s = ([run[number] for run in runs] for runs in zip(*pairs, strict=True))
        ratios = [other / ours for ours, other in zip(ours_s, other_s, strict=True)]
        report.add(
            work, num_tokens / median(ours_s), f"tokens per {clock}", against=other_name,
            other=num_tokens / median(other_s), ratio=median(ratios), goal=goal, goal_of="ratio",
        )  # fmt: skip
        print(f"    ratios of {len(ratios)} pairs: {min(ratios):.2f} to {max(ratios):.2f}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument(
        "--prompt-tokens", type=int, default=24, help="tokens of the longest prompt; the shortest has half as many"
    )
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--even", action="store_true")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    report = Report(arguments)
    if arguments.quick:
        arguments.prompts, arguments.siblings, arguments.runs = 4, 2, 2
    drawn = random.Random(0)
    least = arguments.prompt_tokens // 2
    tasks = [
        Task(
            taskset="t", epoch=0, index=number, truth="", workflow="simple_workflow", reward_fn="exact_reward",
            prompt="".join(drawn.choices(string.ascii_letters, k=drawn.randint(least, arguments.prompt_tokens))),
        )
        for number in range(arguments.prompts)
    ]  # fmt: skip
    longest = arguments.max_tokens
    lengths = [drawn.randint(longest if arguments.even else 1, longest) for _ in range(len(tasks) * arguments.siblings)]
    bare_name = {"transformers": "model.generate", "vllm": "LLM.generate"}[arguments.engine]
    os.environ.update(VLLM_ENV)
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, arguments.hidden, arguments.layers)
        if arguments.turns > 1:
            compare_desks(report, arguments, folder, tasks)
            report.write()
            return
        ours = Ours(arguments.engine, folder, tasks, lengths)
        try:
            ours()  # warm up, and record the requests
            bare = (bare_transformers if arguments.engine == "transformers" else bare_vllm)(folder, ours.requests)
            bare()
            pairs = [(time_s(ours), time_s(bare)) for _ in range(arguments.runs)]
        finally:
            ours.close()
    add_pairs(report, "rollouts", bare_name, pairs, sum(lengths), goal=0.95)
    report.write()


if __name__ == "__main__":
    main()
