"""Time from the command to an accuracy: rftdask, TRL's `GRPOTrainer` and a bare PyTorch loop, on the same task.

    python benchmarks/race.py [--task sums digits letters] [--seeds 5] [--steps 24] [--quick] [--json FILE]
        [--curves FILE.svg]

For each task and seed, SFT on a sloppy teacher's answers warms up a toy policy (not timed). Then each arm is a separate
command that learns from rewards: the same weights, questions, reward (1 for the exact answer), rollouts per step (64
questions times 8, temperature 1), clipped loss averaged over tokens without a KL term, AdamW with one learning rate,
and two cores. The arms alternate, so that load on the machine affects all.

- rftdask: `rftdask run config.yaml`, with all files of a run: log, ledger, checkpoints, metrics, report.
- TRL: a script like that of its README, with metrics from its own callback; it writes its final model.
- floor: one file, one process, transformers' `generate` and the loss in plain PyTorch; it writes its final model.

Wall time is from the command to the end of its process. One function then measures the accuracy of all arms with greedy
answers to held-out questions. The curves are mean rewards of a step's rollouts over the seconds since the command; "to
accuracy" is the first step whose reward, averaged with the two before it, reaches 0.9 of the lowest of the three best
rewards. `--curves` draws them: a thin line per seed, and in bold the mean reward at the median time of a step. Ratios
are medians over seeds. TRL is in the extra `conformance`; without it, its rows are omitted with a message.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any

import yaml
from report import Report, make_parser

from rftdask.models.toy import build_toy_model
from rftdask.monitor.metrics import read_metrics
from rftdask.storage import open_storage
from rftdask.trainer.checkpoint import HF_FOLDER, checkpoint_folder, newest_valid_checkpoint

LR, BETAS, CLIP = 4e-4, (0.9, 0.99), (0.2, 0.28)
NUM_TASKS, GROUP_SIZE, MAX_TOKENS, NUM_EVAL = 64, 8, 4, 100
FORMAT = {"prompt_type": "raw", "prompt_key": "question", "response_key": "answer"}
Curve = list[tuple[float, float]]
"""(seconds since the command, mean reward of a step's rollouts)."""
NAMES = {"ours": ("rftdask", "#2a6fb0"), "trl": ("TRL", "#c4572e"), "bare": ("bare loop", "#7a7a7a")}
"""Names and colors of the arms."""


def sums(rng: random.Random) -> tuple[str, str, str]:
    """Return a question, its answer and the answer of the sloppy teacher."""
    a, b = rng.randrange(10, 100), rng.randrange(10)
    return f"{a}+{b}=", str(a + b), str(a + b + 10)


def digits(rng: random.Random) -> tuple[str, str, str]:
    """Sort three digits; the teacher sorts them in descending order."""
    number = [rng.randrange(10) for _ in range(3)]
    return "".join(map(str, number)) + ">", *("".join(map(str, sorted(number, reverse=r))) for r in (False, True))


def letters(rng: random.Random) -> tuple[str, str, str]:
    """Repeat three letters in reverse; the teacher repeats them unchanged."""
    word = "".join(rng.choices("abcdefghij", k=3))
    return f"{word}<", word[::-1], word


TASKS: dict[str, Callable[[random.Random], tuple[str, str, str]]] = {"sums": sums, "digits": digits, "letters": letters}


def write_task(folder: Path, task: str, seed: int, warm_up_steps: int) -> None:
    """Write the rows of a task and a model warmed up on them to `folder`."""
    rng = random.Random(seed)
    answers: dict[str, tuple[str, str]] = {}
    while len(answers) < 600:
        question, right, wrong = TASKS[task](rng)
        answers[question] = (right, wrong)
    rows = [{"question": question, "answer": right} for question, (right, _) in answers.items()]
    demonstrations = [
        {"question": question, "answer": answers[question][rng.random() > 0.3]}
        for _ in range(16)
        for question in rng.sample(list(answers)[NUM_EVAL:], len(answers) - NUM_EVAL)
    ]
    for name, content in (("eval", rows[:NUM_EVAL]), ("train", rows[NUM_EVAL:]), ("taught", demonstrations)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    build_toy_model(
        folder / "cold", seed=seed, hidden_size=256, intermediate_size=512, num_layers=1, num_heads=8
    )  # as in the quickstart
    if warm_up_steps == 0:
        (folder / "model").symlink_to("cold")
        return
    tree = common(folder, folder / "cold", "warm-up", seed) | {
        "mode": "train",
        "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": LR, "betas": BETAS, "weight_decay": 0.0}},
        "buffer": {
            "train_batch_size": 32,
            "total_epochs": 100,
            "trainer_input": {"experience_buffer": {"path": str(folder / "taught.jsonl"), "format": FORMAT}},
        },
        "trainer": {"total_steps": warm_up_steps},
    }
    run(folder, tree)
    (folder / "model").symlink_to(trained(folder, "warm-up"))


def common(folder: Path, model: Path, name: str, seed: int) -> dict[str, Any]:
    """Return the sections that all runs share."""
    return {
        "name": name,
        "checkpoint_root_dir": str(folder / "runs"),
        "seed": seed,
        "model": {"model_path": str(model), "max_prompt_tokens": 16, "max_response_tokens": MAX_TOKENS},
        "cluster": {"num_cpus": 2},
        "monitor": {"monitor_type": "none"},
    }


def run(folder: Path, tree: dict[str, Any]) -> None:
    """Run `rftdask run`. Raises: subprocess.CalledProcessError."""
    path = folder / f"{tree['name']}.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(tree))))
    subprocess.run(
        [sys.executable, "-m", "rftdask", "run", str(path), "--progress", "none"], check=True, capture_output=True
    )


def trained(folder: Path, name: str) -> Path:
    """Return the path of the model that a run of rftdask trained."""
    storage = open_storage(str(folder / "runs" / "rftdask" / name))
    step = newest_valid_checkpoint(storage)
    assert step is not None
    return Path(storage.url, checkpoint_folder(step), HF_FOLDER)


def ours(folder: Path, seed: int, steps: int) -> tuple[float, Curve, Path]:
    """Return seconds, curve and final model of `rftdask run`."""
    tasks = {"path": str(folder / "train.jsonl"), "format": FORMAT, "data_selector": {"selector_type": "shuffle"}}
    tree = common(folder, folder / "model", "race", seed) | {
        "algorithm": {
            "algorithm_type": "grpo",
            "repeat_times": GROUP_SIZE,
            "kl_loss_fn": "none",
            "policy_loss_fn_args": dict(zip(("clip_range_low", "clip_range_high"), CLIP, strict=True)),
            "optimizer": {"lr": LR, "betas": BETAS, "weight_decay": 0.0},
        },
        "buffer": {
            "batch_size": NUM_TASKS,
            "total_epochs": 100,
            "explorer_input": {"taskset": tasks, "default_reward_fn_type": "exact_reward"},
        },
        "trainer": {"total_steps": steps},
        "synchronizer": {"sync_offset": 1},
    }
    began, start = time.time(), time.perf_counter()
    run(folder, tree)
    seconds = time.perf_counter() - start
    frame = read_metrics(open_storage(str(folder / "runs" / "rftdask" / "race")), "explorer")
    return (
        seconds,
        [(at - began, reward) for at, reward in zip(frame.time_s, frame.reward, strict=True)],
        trained(folder, "race"),
    )


def other(arm: str, folder: Path, seed: int, steps: int) -> tuple[float, Curve, Path]:
    """Return seconds, curve and final model of an arm of this file, run in a separate process."""
    began, start = time.time(), time.perf_counter()
    run_arm(__file__, arm, folder, seed, steps)
    seconds = time.perf_counter() - start
    rewards = json.loads((folder / f"{arm}.json").read_text())
    return seconds, [(at - began, reward) for at, reward in rewards], folder / arm


def run_arm(script: str, arm: str, folder: Path, seed: int, steps: int) -> None:
    """Run an arm of a script in a separate process. Raises: subprocess.CalledProcessError."""
    subprocess.run(
        [sys.executable, script, "--arm", arm, "--folder", str(folder), "--seed", str(seed), "--steps", str(steps)],
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )


def read_rows(folder: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def trl_arm(folder: Path, seed: int, steps: int) -> None:
    """Train with TRL's trainer, as its documentation shows."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    curve: Curve = []

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        rewards = [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]
        curve.append((time.time(), sum(rewards) / len(rewards)))
        return rewards

    rows = [{"prompt": row["question"], "answer": row["answer"]} for row in read_rows(folder, "train")]
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, report_to=[], beta=0.0, loss_type="bnpo",
        learning_rate=LR, adam_beta1=BETAS[0], adam_beta2=BETAS[1], weight_decay=0.0, max_grad_norm=1.0,
        lr_scheduler_type="constant", per_device_train_batch_size=NUM_TASKS * GROUP_SIZE, num_generations=GROUP_SIZE,
        max_steps=steps, max_completion_length=MAX_TOKENS, temperature=1.0, epsilon=CLIP[0], epsilon_high=CLIP[1],
        gradient_checkpointing=False, disable_tqdm=True, save_strategy="no", seed=seed, logging_steps=1,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str((folder / "model").resolve()),
        args=arguments,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows),
    )
    trainer.train()
    trainer.save_model(str(folder / "trl"))
    (folder / "trl.json").write_text(json.dumps(curve))


def bare_arm(folder: Path, seed: int, steps: int) -> None:
    """Run the same rollouts and updates without a framework."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    path = str((folder / "model").resolve())
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0)
    rows, rng, curve = read_rows(folder, "train"), random.Random(seed), []
    for _ in range(steps):
        tasks = [task for task in rng.sample(rows, NUM_TASKS) for _ in range(GROUP_SIZE)]
        inputs = tokenizer([task["question"] for task in tasks], return_tensors="pt", padding=True)
        width = inputs.input_ids.shape[1]
        with torch.no_grad():
            tokens_BT = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=MAX_TOKENS)
        answers_BN = tokens_BT[:, width:]
        texts = tokenizer.batch_decode(answers_BN, skip_special_tokens=True)
        reward_B = torch.tensor([float(text == task["answer"]) for text, task in zip(texts, tasks, strict=True)])
        curve.append((time.time(), float(reward_B.mean())))
        grouped = reward_B.view(NUM_TASKS, GROUP_SIZE)
        advantage_B = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-6)).view(-1)
        # Tokens after the end token are padding; the end token was sampled.
        ended_BN = (answers_BN == tokenizer.eos_token_id).cumsum(1)
        mask_BN = ((ended_BN == 0) | ((ended_BN == 1) & (answers_BN == tokenizer.eos_token_id))).float()
        attention_BT = torch.cat([inputs.attention_mask, mask_BN.long()], 1)
        positions_BT = (attention_BT.cumsum(1) - 1).clamp(min=0)
        logits = model(tokens_BT, attention_mask=attention_BT, position_ids=positions_BT).logits[:, width - 1 : -1]
        logprobs_BN = torch.log_softmax(logits, -1).gather(-1, answers_BN[..., None])[..., 0]
        ratio_BN = (logprobs_BN - logprobs_BN.detach()).exp()
        clipped_BN = ratio_BN.clamp(1 - CLIP[0], 1 + CLIP[1])
        gain_BN = torch.minimum(ratio_BN * advantage_B[:, None], clipped_BN * advantage_B[:, None])
        (-(gain_BN * mask_BN).sum() / mask_BN.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "bare")
    tokenizer.save_pretrained(folder / "bare")
    (folder / "bare.json").write_text(json.dumps(curve))


def accuracy(folder: Path, model_path: Path) -> float:
    """Return the share of held-out questions that the model answers exactly with greedy decoding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "cold")
    model = AutoModelForCausalLM.from_pretrained(model_path)
    rows = read_rows(folder, "eval")
    inputs = tokenizer([row["question"] for row in rows], return_tensors="pt", padding=True)
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_TOKENS)
    texts = tokenizer.batch_decode(tokens[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)


def smooth(curve: Curve) -> Curve:
    """Average each reward with those of the two steps before."""
    return [(curve[i][0], mean(r for _, r in curve[max(0, i - 2) : i + 1])) for i in range(len(curve))]


def seconds_to(curve: Curve, reward: float) -> float:
    """Return when the mean of three steps first reaches a reward, or the end of the curve if it never does."""
    return next((at for at, reached in smooth(curve) if reached >= reward), curve[-1][0])


def draw(curves: Mapping[str, Mapping[str, Sequence[Curve]]], path: Path) -> None:
    """Draw the curves of the tasks as SVG, one per arm and seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(curves), 3.2), layout="constrained")
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for axes, (task, of_arms) in zip(panels, curves.items(), strict=True):
        for arm, of_seeds in of_arms.items():
            name, color = NAMES[arm]
            smoothed = [smooth(curve) for curve in of_seeds]
            for curve in smoothed:
                axes.plot(*zip(*curve, strict=True), color=color, linewidth=0.8, alpha=0.25)
            of_steps = [tuple(zip(*points, strict=True)) for points in zip(*smoothed, strict=True)]
            axes.plot(
                [median(at) for at, _ in of_steps], [mean(reward) for _, reward in of_steps],
                color=color, linewidth=2, label=name,
            )  # fmt: skip
        axes.set_title(task, loc="left", fontsize=10)
        axes.set_xlabel("seconds since the command", fontsize=9)
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1)
        axes.grid(axis="y", color="#dddddd", linewidth=0.7)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(labelsize=8, length=0)
    panels[0].set_ylabel("mean reward of a step", fontsize=9)
    panels[-1].legend(frameon=False, fontsize=9, loc="lower right")
    figure.savefig(path, format="svg", metadata={"Date": None})


def race(task: str, seeds: Sequence[int], steps: int, report: Report) -> dict[str, list[Curve]]:
    """Race the arms on one task and return the curves of each arm by seed."""
    arms = ["ours", *(["trl"] if find_spec("trl") else []), "bare"]
    walls: dict[str, list[float]] = {arm: [] for arm in arms}
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    ends: dict[str, list[float]] = {arm: [] for arm in arms}
    drawn: dict[str, list[Curve]] = {arm: [] for arm in arms}
    for number, seed in enumerate(seeds):
        with tempfile.TemporaryDirectory(prefix="race-") as name:
            folder = Path(name)
            write_task(folder, task, seed, warm_up_steps=0 if report.quick else 320)
            before, curves = accuracy(folder, folder / "model"), {}
            for arm in arms[number % len(arms) :] + arms[: number % len(arms)]:
                seconds, curves[arm], model = (
                    ours(folder, seed, steps) if arm == "ours" else other(arm, folder, seed, steps)
                )
                walls[arm].append(seconds)
                ends[arm].append(accuracy(folder, model))
            wanted = 0.9 * min(max(reward for _, reward in curve) for curve in curves.values())
            for arm in arms:
                times[arm].append(seconds_to(curves[arm], wanted))
                drawn[arm].append(curves[arm])
            results = ", ".join(
                f"{arm} {walls[arm][-1]:.1f} s, to reward {wanted:.2f} {times[arm][-1]:.1f} s, {ends[arm][-1]:.2f}"
                for arm in arms
            )
            print(f"{task}, seed {seed}: accuracy before {before:.2f}; {results}", flush=True)
    goals = {"trl": (1 / 0.8, 1 / 0.7), "bare": (1 / 1.25, None)}
    for arm in arms[1:]:
        name, (at_equal_rollouts, at_equal_accuracy) = NAMES[arm][0], goals[arm]
        for work, values, goal in (
            (f"{task}: command to end, {steps} steps", walls, at_equal_rollouts),
            (f"{task}: command to accuracy", times, at_equal_accuracy),
        ):
            ratio = median(theirs / ours_ for ours_, theirs in zip(values["ours"], values[arm], strict=True))
            report.add(
                work, median(values["ours"]), "s", less_is_better=True, against=name, other=median(values[arm]),
                ratio=ratio, goal=goal, goal_of="ratio",
            )  # fmt: skip
    for arm in arms:
        first_s, goal = median(curve[0][0] for curve in drawn[arm]), 3.0 if arm == "ours" else None
        work = f"{task}: command to the first rollouts of {NAMES[arm][0]}"
        report.add(work, first_s, "s", less_is_better=True, goal=goal)
        report.add(f"{task}: held-out accuracy of {NAMES[arm][0]}", median(ends[arm]), "share")
    return drawn


def main(
    description: str | None,
    arms: Mapping[str, Callable[[Path, int, int], None]],
    run_race: Callable[[str, Sequence[int], int, Report], dict[str, list[Curve]] | None],
    *,
    seeds: int,
    steps: int,
    has_curves: bool = False,
) -> None:
    """Run the command of a race. arms: arms that run in separate processes. run_race: runs all arms on a task. seeds,
    steps: defaults of the options. has_curves: True if run_race returns curves.
    """
    parser = make_parser(description)
    parser.add_argument("--task", nargs="+", choices=TASKS, default=["sums"])
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--arm", choices=arms, help="internal: run this arm in --folder")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    if has_curves:
        parser.add_argument("--curves", type=Path, help="draw the rewards of all arms over time as SVG")
    args = parser.parse_args()
    if args.arm:
        arms[args.arm](args.folder, args.seed, args.steps)
        return
    if find_spec("trl") is None:
        print("TRL is not installed, so it is left out; it is in the extra conformance")
    report = Report(args)
    seeds, steps = (1, 2) if args.quick else (args.seeds, args.steps)
    curves = {task: run_race(task, range(seeds), steps, report) for task in args.task}
    report.write()
    if has_curves and args.curves:
        draw({task: arms_curves for task, arms_curves in curves.items() if arms_curves}, args.curves)


if __name__ == "__main__":
    main(__doc__, {"trl": trl_arm, "bare": bare_arm}, race, seeds=5, steps=24, has_curves=True)
