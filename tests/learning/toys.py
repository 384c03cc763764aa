"""The toys: tasks that a person solves at a glance, and a policy with a few thousand weights and bad habits.

- echo       Answer "c:" with "c" first. The policy can, but prefers the next letter; it repeats its answer up to
             four times.
- gifts      echo, and every second task pays 4 more for any answer: the common part of the rewards teaches nothing.
- debts      echo, and every task costs a half: the reward of a wrong answer is negative.
- unpaid     echo without rewards.
- unheard    Answer "C:" with "#", which the policy never samples: no rollout has a reward.
- corridor   "x2>" is cell 2 of the cells 1 to 3 of corridor x, which has its exit at one end. A walk starts in the
             middle and has five turns; the policy samples l or r in each, the wrong one more often. Two corridors pay
             16 more for any walk.
- stairs     "x4>" is stair 4 of six, with the name of a corridor whose exit is on the right: r leads one stair down,
             and anything else is a fall. Only the ground pays, and tasks start on every stair: from a high stair the
             policy never arrives before it knows the step. `low` is larger for lower stairs.
- tool       Answer "x2>" of the corridor with its right step, r or l; then a tool adds eleven letters to the same
             row, and the policy may sample one more letter, which does not count.

Demonstrations (sft), comparisons (dpo) and texts (cpt) are echo's right answers. The teacher is a policy that knows
them.
"""

import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from rftdask.data.task import Task
from rftdask.models.toy import build_toy_model
from rftdask.rollouts.workflows.base import PolicyModel, Reward, Step
from rftdask.rollouts.workflows.registry import workflow
from rftdask.trainer.model import load_policy, token_logprobs
from rftdask.trainer.packing import pack_rows
from tests.unit.engines.tiny_models import save_tiny_mixture

LETTERS = "abcdefgh"
EXITS = {"w": 1, "x": 3, "y": 1, "z": 3}
"""Corridor -> the cell of its exit."""
GIFT = 4.0
STAIRS = 6
TALK = "." * 10 + ":"
"""Output of the tool."""
CLIMBS = 16
"""Times that a task occurs in a run, all in one epoch."""
LONG = 12
"""Letters of a long answer."""
NOISE = ("mkqs", "tnvy", "pzow", "jiul", "yknt", "suqm", "owzp", "lvij")
"""Text before the question of a long answer."""
CORRECT_SHARE = {"echo": 0.3, "unheard": 0.3, "corridor": 0.3}
"""Probabilities of the policy before it learns."""
WARM_UP_STEPS = 200


def after(letter: str) -> str:
    """Return the next letter, which the policy confuses with this one."""
    return LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)]


@workflow("echo", in_process=True)
async def echo(task: Task, model: PolicyModel) -> Reward:
    """Return 1 for the right first letter, plus the task's fixed payment."""
    said = (await model.generate(task.prompt)).text
    right = float(said[:1] == task.truth)
    return Reward(right * task.row.get("pay", 1.0) + task.row["gift"], {"accuracy": right, "length": float(len(said))})


@workflow("corridor", in_process=True)
async def corridor(task: Task, model: PolicyModel) -> Reward:
    """Return 1 at the exit, minus a tenth per turn, plus the task's fixed payment."""
    at, steps, out = 2, [], int(task.truth)
    while at != out and len(steps) < 5:
        said = (await model.generate(f"{task.prompt}{at}>")).text[:1]
        then = min(3, max(1, at + {"l": -1, "r": 1}.get(said, 0)))
        steps.append(Step(f"at {at}", float(then == out) - 0.1))
        at = then
    earned = sum(step.reward or 0.0 for step in steps)
    return Reward(earned + task.row["gift"], {"accuracy": float(at == out), "length": float(len(steps))}, tuple(steps))


@workflow("stairs", in_process=True)
async def stairs(task: Task, model: PolicyModel) -> Reward:
    at = task.row["start"]
    while at and (await model.generate(f"{task.prompt}{at}>")).text[:1] == "r":
        at -= 1
    return Reward(float(at == 0), {"accuracy": float(at == 0), "length": float(task.row["start"] - at)})


@workflow("tool", in_process=True)
async def tool(task: Task, model: PolicyModel) -> Reward:
    """Return 1 for the right first letter, after which a tool adds text and the policy may sample one more letter."""
    asked = f"{task.prompt}2>"
    said = (await model.generate(asked, max_tokens=1)).text[:1]
    right = float(said == ("r" if task.truth == "3" else "l"))
    await model.generate(f"{asked}{said}{TALK}", max_tokens=1)
    return Reward(right + task.row["gift"], {"accuracy": right, "length": 2.0})


def write_tables(folder: Path) -> None:
    """Write every dataset of the toys as NAME.jsonl."""
    right = [(f"{letter}:", letter) for letter in LETTERS]
    starts = [
        {"prompt": name, "response": "", "start": start, "low": STAIRS - start}
        for start in range(1, STAIRS + 1)
        for name in "xz"
    ]
    tables = {
        "echo": [{"prompt": asked, "response": said, "gift": 0.0} for asked, said in right],
        "gifts": [{"prompt": asked, "response": said, "gift": GIFT * (i % 2)} for i, (asked, said) in enumerate(right)],
        "debts": [{"prompt": asked, "response": said, "gift": -0.5} for asked, said in right],
        "unpaid": [{"prompt": asked, "response": said, "pay": 0.0, "gift": 0.0} for asked, said in right],
        "unheard": [{"prompt": asked.upper(), "response": "#", "gift": 0.0} for asked, _ in right],
        "corridor": [
            {"prompt": name, "response": str(out), "gift": 4 * GIFT * (i // 2)}
            for i, (name, out) in enumerate(EXITS.items())
        ],
        "tool": [{"prompt": name, "response": str(out), "gift": 0.0} for name, out in EXITS.items()],
        "stairs": starts,
        "climbs": [row for row in starts for _ in range(CLIMBS)],
        "pairs": [
            {"prompt": asked, "chosen": said, "rejected": after(said)} for asked, said in right
        ],
        # Every second pair is long: sixteen times its letter, or the next one, after four letters of noise.
        "lengths": [
            {"prompt": asked, "chosen": said, "rejected": after(said)} for asked, said in right
        ] + [
            {"prompt": f"{noise}{asked.upper()}", "chosen": said * LONG, "rejected": after(said) * LONG}
            for (asked, said), noise in zip(right, NOISE, strict=True)
        ],
        "text": [{"prompt": asked + said} for asked, said in right],
        # Two questions in one chat. The user starts the second one with "?", which the policy must not learn.
        "chats": [
            {
                "messages": [
                    {"role": "user", "content": asked},
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": f"?{asked_then}"},
                    {"role": "assistant", "content": said_then},
                ]
            }
            for asked, said in right
            for asked_then, said_then in right
        ],
    }  # fmt: skip
    for name, rows in tables.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def say(dice: random.Random, knows: bool) -> tuple[str, str]:
    """Return a prompt of a toy and the policy's answer before it learns, or that of a policy that `knows`."""
    toy = dice.choice(["echo", "echo", "unheard", "corridor"])
    right = knows or dice.random() < CORRECT_SHARE[toy]
    if toy == "corridor":
        name = dice.choice(list(EXITS))
        return f"{name}{dice.randrange(5)}>", "r" if right == (EXITS[name] == 3) else "l"
    times = 1
    while times < 3 and dice.random() < 0.5:
        times += 1
    asked = dice.choice(LETTERS)
    said = asked if right else after(asked)
    return f"{asked if toy == 'echo' else asked.upper()}:", said * times


def build_policy(folder: Path, seed: int, *, knows: bool = False, experts: bool = False) -> None:
    """Write a tiny model that answers as `say`; takes a second or two. experts: a mixture, two of eight experts per
    token.
    """
    if experts:
        save_tiny_mixture(folder, seed)
    else:
        build_toy_model(folder, seed=seed, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2)
    dice = random.Random(seed)
    model, tokenizer = load_policy(str(folder), "float32", "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    for _ in range(WARM_UP_STEPS):
        shown = [say(dice, knows) for _ in range(64)]
        rows = [np.array([*encode(asked), *encode(said), tokenizer.eos_token_id]) for asked, said in shown]
        lengths = np.array([len(encode(asked)) for asked, _ in shown])
        logprobs, _ = token_logprobs(model, pack_rows(rows, lengths, np.ones(len(rows))))
        optimizer.zero_grad()
        (-logprobs.sum() / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
