"""SFT from the command to the end: rftdask, TRL's `SFTTrainer` and a bare PyTorch loop, on the same answers.

    python benchmarks/race_sft.py [--task sums digits letters] [--seeds 3] [--steps 320] [--quick] [--json FILE]

Tasks, toy policy and cores are those of race.py. Each arm is a separate command that trains the same random weights on
the right answers: batches of 32 rows, mean loss over the tokens of the answers including their end tokens, AdamW with
one learning rate, clipped gradients. The arms alternate, so that load on the machine affects all.

- rftdask: `rftdask run config.yaml` in mode train, with all files of a run.
- TRL: a script like that of its README; it writes its final model.
- floor: one file, one process, the loss in plain PyTorch; it writes its final model.

Wall time is from the command to the end of its process. One function then measures the loss of all arms: nats per token
of the right answers to held-out questions. The orders of rows differ because each arm shuffles on its own. Ratios are
medians over seeds. TRL is in the extra `conformance`; without it, its rows are omitted with a message. There is no race
for PPO because TRL has removed it.
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
"""Number of epochs, which gives more than enough rows for the steps."""


def ours(folder: Path, seed: int, steps: int) -> Path:
    """Train with `rftdask run` and return the path of its model."""
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
    """Train with TRL's trainer, as its documentation shows."""
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
    """Run the same updates without a framework."""
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
    """Return the sum of -log p of the answers' tokens including their ends, and the number of these tokens."""
    import torch

    questions = [tokenizer(row["question"]).input_ids for row in rows]
    answers = [[*tokenizer(row["answer"]).input_ids, tokenizer.eos_token_id] for row in rows]
    width = max(len(a) + len(s) for a, s in zip(questions, answers, strict=True))
    # Padding on the right does not affect the loss.
    tokens_BT = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels_BT = torch.full((len(rows), width), -100)
    for i, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        end = len(question) + len(answer)
        tokens_BT[i, :end] = torch.tensor([*question, *answer])
        labels_BT[i, len(question) : end] = torch.tensor(answer)
    logits = model(tokens_BT).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels_BT[:, 1:].flatten(), reduction="sum")
    return losses, (labels_BT >= 0).sum()


def held_out(folder: Path, model_path: Path) -> float:
    """Return the nats per token of the right answers to held-out questions."""
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
        results = ", ".join(f"{arm} {walls[arm][-1]:.1f} s, {losses[arm][-1]:.3f}" for arm in arms)
        print(f"{task}, seed {seed}: held-out loss before {before:.3f}; {results}", flush=True)
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
