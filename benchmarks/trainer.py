"""Samples per second of one train step: rftdask, TRL's `GRPOTrainer` and a bare PyTorch loop.

    python benchmarks/trainer.py [--runs 7] [--threads 2] [--quick] [--json FILE]

All three use a Qwen2 of 25 million random float32 weights (written out below), the same 16 rollouts (4 groups of 4;
prompts of 16 to 48 tokens, responses of 8 to 192, most of them short), given logprobs and rewards, the clipped loss of
GRPO averaged over the tokens without a KL term, and one AdamW step with clipping at 1.

A step is everything from the rollouts in memory to the changed weights. Ours is `TorchEngine.train_step`: packing,
advantages, loss, backward, optimizer and metrics. TRL's is `GRPOTrainer.training_step` on prepared and padded inputs
(loss, backward, and entropy and metrics, which it always computes; without gradient checkpointing, its default), then
clipping and its own optimizer. The bare loop does our arithmetic on packed rows with an inline loss. The three
alternate, so that load on the machine affects all. Ratios are of medians, of wall time and of CPU time of the process,
which other processes affect less. TRL is in the extra `conformance`; without it, its rows are omitted with a message.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
import torch
from report import Report, make_parser
from transformers import AutoModelForCausalLM, Qwen2Config

from rftdask.algorithm.compose import make_algorithm
from rftdask.buffer.batches.batch import TrainingBatch, supervised_batch
from rftdask.config import load_config
from rftdask.models.toy import build_toy_model
from rftdask.trainer.attention import hidden_states
from rftdask.trainer.engines.torch_engine import TorchEngine
from rftdask.trainer.model import load_policy
from rftdask.trainer.packing import pack_rows

VOCAB_SIZE, NUM_GROUPS, GROUP_SIZE, MAX_RESPONSE = 14_336, 4, 4, 192
LR = 1e-6


def pad(rows: list[np.ndarray], dtype: type) -> torch.Tensor:
    """Return [rows, longest], padded with zeros at the end of each row, as TRL expects."""
    padded: np.ndarray = np.zeros((len(rows), max(map(len, rows))), dtype)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return torch.from_numpy(padded)


def write_model(folder: str, quick: bool) -> None:
    build_toy_model(folder, hidden_size=32, num_layers=1, num_heads=2)  # for its tokenizer
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=64 if quick else 512, intermediate_size=128 if quick else 1408,
        num_hidden_layers=1 if quick else 6, num_attention_heads=8,
        num_key_value_heads=4, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def make_batch() -> TrainingBatch:
    random = np.random.default_rng(0)
    num_rows = NUM_GROUPS * GROUP_SIZE
    prompts = np.repeat(random.integers(16, 49, NUM_GROUPS), GROUP_SIZE)
    responses = np.clip(random.lognormal(4.0, 0.7, num_rows), 8, MAX_RESPONSE).astype(np.int64)
    rows = [
        (random.integers(2, VOCAB_SIZE, prompt + response).tolist(), int(prompt), None)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    batch = supervised_batch(rows, [f"row {number}" for number in range(num_rows)], GROUP_SIZE)
    return replace(
        batch,
        rewards=random.random(num_rows).astype(np.float32),
        rollout_logprobs=(-9.5 - 0.2 * random.random(len(batch.rollout_logprobs))).astype(np.float32),
        experts=np.zeros(num_rows, bool),
    )


def our_step(folder: str, batch: TrainingBatch) -> Callable[[], object]:
    tree = {
        "mode": "train",
        "model": {"model_path": folder, "max_model_len": 2 * MAX_RESPONSE, "max_response_tokens": MAX_RESPONSE},
        "buffer": {"batch_size": NUM_GROUPS},
        "algorithm": {"optimizer": {"lr": LR, "weight_decay": 0.0}},
        "seed": 0,
    }
    engine = TorchEngine(load_config(tree), make_algorithm("grpo", kl_loss_fn="none"))
    steps = iter(range(1, 10**6))
    return lambda: engine.train_step(batch, next(steps))


def advantages_of(batch: TrainingBatch) -> torch.Tensor:
    rewards = torch.from_numpy(batch.rewards).view(NUM_GROUPS, GROUP_SIZE)
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).view(-1)


def bare_step(folder: str, batch: TrainingBatch) -> Callable[[], object]:
    model, _ = load_policy(folder, "float32", "cpu")
    model.train()
    head: Any = model.get_output_embeddings()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, foreach=True)
    rows = pack_rows(batch.row_tokens(), batch.prompt_lengths, batch.temperatures)
    old_Q = torch.from_numpy(np.concatenate(batch.row_logprobs()))
    advantages_Q = advantages_of(batch)[rows.row_Q]

    def step() -> None:
        hidden_QH = hidden_states(model, rows)[rows.before_Q]
        logprobs_QV = torch.log_softmax(head(hidden_QH), -1)
        logprobs_Q = logprobs_QV.gather(-1, rows.target_Q[:, None])[:, 0]
        ratio_Q = (logprobs_Q - old_Q).exp()
        loss = -torch.minimum(ratio_Q * advantages_Q, ratio_Q.clamp(0.8, 1.2) * advantages_Q).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def trl_step(folder: str, batch: TrainingBatch, scratch: str) -> Callable[[], object]:
    from datasets import Dataset  # late, like trl: an extra that the other two arms do not need
    from trl import GRPOConfig, GRPOTrainer

    num_rows = len(batch)
    args = GRPOConfig(
        output_dir=scratch, use_cpu=True, bf16=False, report_to=[], beta=0.0, loss_type="bnpo", learning_rate=LR,
        per_device_train_batch_size=num_rows, num_generations=GROUP_SIZE, gradient_checkpointing=False,
        num_iterations=10**6, max_completion_length=MAX_RESPONSE, disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=folder, args=args, reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "1"}] * num_rows),
    )  # fmt: skip
    rows = batch.row_tokens()
    prompts = [row[:length] for row, length in zip(rows, batch.prompt_lengths, strict=True)]
    responses = [row[length:] for row, length in zip(rows, batch.prompt_lengths, strict=True)]
    left = [prompt[::-1] for prompt in prompts]  # padded on the left
    trainer._step = 1  # past the step that generates
    trainer._buffered_inputs = [
        {
            "prompt_ids": pad(left, np.int64).flip(1),
            "prompt_mask": pad([np.ones(len(prompt)) for prompt in prompts], np.int64).flip(1),
            "completion_ids": pad(responses, np.int64),
            "completion_mask": pad([np.ones(len(response)) for response in responses], np.int64),
            "old_per_token_logps": pad(batch.row_logprobs(), np.float32),
            "advantages": advantages_of(batch),
            "num_items_in_batch": torch.tensor(sum(map(len, responses))),
        }
    ]
    model: Any = trainer.model
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    optimizer = trainer.create_optimizer()

    def step() -> None:
        trainer.training_step(model, {}, None)
        trainer.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()

    return step


def time_s(call: Callable[[], object]) -> tuple[float, float]:
    """Return (wall seconds, CPU seconds)."""
    start, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - cpu


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    report, runs = Report(args), 1 if args.quick else args.runs
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    batch = make_batch()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as scratch:
        write_model(folder, args.quick)
        steps = {"rftdask": our_step(folder, batch), "bare loop": bare_step(folder, batch)}
        if find_spec("trl") is None:
            print("TRL is not installed, so it is left out; it is in the extra conformance")
        else:
            steps["TRL"] = trl_step(folder, batch, scratch)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for step in steps.values():
            step()  # create the optimizers' state
        for _ in range(runs):
            for name, step in steps.items():
                times[name].append(time_s(step))
    tokens, padded = int(batch.lengths.sum()), padded_tokens(batch)
    print(
        f"{len(batch)} rollouts, {tokens} tokens; padded as TRL does {padded}, of which {1 - tokens / padded:.0%} waste"
    )
    wall = {name: median(value for value, _ in values) for name, values in times.items()}
    cpu = {name: median(value for _, value in values) for name, values in times.items()}
    report.add("samples of a train step", len(batch) / wall["rftdask"], "samples/s")
    for name, goal in (("TRL", 1.5), ("bare loop", 0.95)):
        if name in steps:
            for clock, seconds, bound in (("wall", wall, goal), ("CPU", cpu, None)):
                report.add(
                    f"a train step, {clock} time", seconds["rftdask"], "s", less_is_better=True, against=name,
                    other=seconds[name], goal=bound, goal_of="ratio",
                )  # fmt: skip
    report.write()


def padded_tokens(batch: TrainingBatch) -> int:
    return len(batch) * int(batch.prompt_lengths.max() + (batch.lengths - batch.prompt_lengths).max())


if __name__ == "__main__":
    main()
