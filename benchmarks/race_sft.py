"""SFT from the command to the end: ours, TRL's `SFTTrainer`, and a bare PyTorch loop, on the same answers.

    python benchmarks/race_sft.py [--task sums digits letters] [--seeds 3] [--steps 320] [--quick] [--json FILE]

The tasks, the toy policy and the two cores are those of race.py. Each of the three is a command of its own that trains
the same random weights on the right answers: batches of 32 rows, the mean over the tokens of the answers and their
ends, AdamW of one learning rate, clipped gradients. They take turns, so that a change of the machine's load meets all.

- ours: `rftdask run config.yaml` in mode train, with all that a run writes.
- TRL: a script of its README's kind; it writes its final model.
- the floor: one file, one process, the loss in plain PyTorch; it writes its final model.

Wall time is from the command to the end of its process. The loss is measured afterwards, for all three by one function:
nats per token of the right answers to held-out questions. The orders of rows differ, since each shuffles by itself.
Ratios are medians over seeds. TRL is in the extra `conformance`; without it its rows are left out, which is said. There
is no race for PPO: TRL has none any more.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from race import BETAS, FORMAT, LR, common, main, read_rows, run, run_arm, trained, write_task
from report import Report

BATCH = 32
EPOCHS = 40
"""More than enough rows for the steps."""


def ours(folder: Path, seed: int, steps: int) -> Path:
    """The model of `rftdask run`."""
    tree = common(folder, folder / "model", "race-sft", seed) | {
        "mode": "train",
        "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": LR, "betas": BETAS, "weight_decay": 0.0}},
        "buffer": {
            "train_batch_size": BATCH,
            "total_epochs": EPOCHS,
            "trainer_input": {
                "experience_buffer": {
                    "path": str(folder / "train.jsonl"),
                    "format": FORMAT,
                    "data_selector": {"selector_type": "shuffle"},
                }
            },
        },
        "trainer": {"total_steps": steps},
    }
    run(folder, tree)
    return trained(folder, "race-sft")


def trl_arm(folder: Path, seed: int, steps: int) -> None:
    """TRL's trainer, as its documentation starts one."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"prompt": row["question"], "completion": row["answer"]} for row in read_rows(folder, "train")]
    arguments = SFTConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, report_to=[], learning_rate=LR, adam_beta1=BETAS[0],
        adam_beta2=BETAS[1], weight_decay=0.0, max_grad_norm=1.0, lr_scheduler_type="constant",
        per_device_train_batch_size=BATCH, max_steps=steps, gradient_checkpointing=False, disable_tqdm=True,
        save_strategy="no", seed=seed, logging_steps=1,
    )  # fmt: skip
    trainer = SFTTrainer(model=str((folder / "model").resolve()), args=arguments, train_dataset=Dataset.from_list(rows))
    trainer.train()
    trainer.save_model(str(folder / "trl"))


def bare_arm(folder: Path, seed: int, steps: int) -> None:
    """The same updates with nothing around them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = str((folder / "model").resolve())
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0)
    rows, rng = read_rows(folder, "train"), random.Random(seed)
    order = [row for _ in range(EPOCHS) for row in rng.sample(rows, len(rows))]
    for step in range(steps):
        losses, count = answers_loss(tokenizer, model, order[step * BATCH : (step + 1) * BATCH])
        (losses / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "bare")
    tokenizer.save_pretrained(folder / "bare")


def answers_loss(tokenizer, model, rows: Sequence[dict[str, str]]):  # type: ignore[no-untyped-def]
    """Sum of -log p of the answers' tokens, their ends included, and how many these are."""
    import torch

    asked = [tokenizer(row["question"]).input_ids for row in rows]
    said = [[*tokenizer(row["answer"]).input_ids, tokenizer.eos_token_id] for row in rows]
    width = max(len(a) + len(s) for a, s in zip(asked, said, strict=True))
    # Padded behind, where nothing that counts looks.
    tokens_BT = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels_BT = torch.full((len(rows), width), -100)
    for i, (question, answer) in enumerate(zip(asked, said, strict=True)):
        end = len(question) + len(answer)
        tokens_BT[i, :end] = torch.tensor([*question, *answer])
        labels_BT[i, len(question) : end] = torch.tensor(answer)
    logits = model(tokens_BT).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels_BT[:, 1:].flatten(), reduction="sum")
    return losses, (labels_BT >= 0).sum()


def held_out(folder: Path, model_path: Path) -> float:
    """Nats per token of the right answers to the questions that nobody trained on."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_path)
    with torch.no_grad():
        losses, count = answers_loss(AutoTokenizer.from_pretrained(folder / "cold"), model, read_rows(folder, "eval"))
    return float(losses / count)


def race(task: str, seeds: Sequence[int], steps: int, report: Report) -> None:
    arms = ["ours", *(["trl"] if find_spec("trl") else []), "bare"]
    walls: dict[str, list[float]] = {arm: [] for arm in arms}
    losses: dict[str, list[float]] = {arm: [] for arm in arms}
    for number, seed in enumerate(seeds):
        with tempfile.TemporaryDirectory(prefix="race-") as name:
            folder = Path(name)
            write_task(folder, task, seed, warm_up_steps=0)
            before = held_out(folder, folder / "model")
            for arm in arms[number % len(arms) :] + arms[: number % len(arms)]:
                start = time.perf_counter()
                if arm == "ours":
                    model = ours(folder, seed, steps)
                else:
                    run_arm(__file__, arm, folder, seed, steps)
                    model = folder / arm
                walls[arm].append(time.perf_counter() - start)
                losses[arm].append(held_out(folder, model))
        told = ", ".join(f"{arm} {walls[arm][-1]:.1f} s, {losses[arm][-1]:.3f}" for arm in arms)
        print(f"{task}, seed {seed}: held-out loss before {before:.3f}; {told}", flush=True)
    for arm, name in (("trl", "TRL"), ("bare", "bare loop")):
        if arm in arms:
            ratio = median(theirs / ours_ for ours_, theirs in zip(walls["ours"], walls[arm], strict=True))
            report.add(
                f"{task}: SFT, command to end, {steps} steps", median(walls["ours"]), "s", less_is_better=True,
                against=name, other=median(walls[arm]), ratio=ratio,
            )  # fmt: skip
    for arm in arms:
        report.add(f"{task}: held-out loss of {arm}", median(losses[arm]), "nats per token", less_is_better=True)


if __name__ == "__main__":
    main(__doc__, {"trl": trl_arm, "bare": bare_arm}, race, seeds=3, steps=320)
