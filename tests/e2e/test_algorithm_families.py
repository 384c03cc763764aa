"""One run of every family of algorithms learns: the whole machinery, on a small policy that was warmed up on a sloppy
teacher's answers. It is to repeat a number, "47=" -> "47", and says ten too much more often than not.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from rftdask import Experiment
from rftdask.config import load_config
from rftdask.data.task import Task
from rftdask.models.toy import build_toy_model
from rftdask.monitor.metrics import MetricsWriter, read_metrics
from rftdask.rollouts.rewards import compute_reward
from rftdask.run.preflight import check_inputs
from rftdask.storage import open_storage
from rftdask.trainer.checkpoint import HF_FOLDER
from rftdask.trainer.model import load_policy, token_logprobs
from rftdask.trainer.packing import pack_rows
from rftdask.trainer.rank import build_trainer

pytestmark = pytest.mark.slow

RAW = {"prompt_type": "raw"}
QUESTIONS = {"prompt_type": "raw", "prompt_key": "question", "response_key": "answer"}
SHUFFLED = {"selector_type": "shuffle"}
WARM_UP_STEPS = 160
CORRECT_SHARE = 0.3
"""Of the teacher's answers; the others are ten too high."""
LR = 1e-3


@dataclass(frozen=True)
class Toy:
    """Tasks, preferences, and a policy that was warmed up on the sloppy teacher's answers."""

    folder: Path
    model: Path

    def config(self, name: str, **sections: Any) -> dict[str, Any]:
        algorithm = {"optimizer": {"lr": LR, "betas": [0.9, 0.99], "weight_decay": 0.0}, **sections.pop("algorithm")}
        return {
            "name": name,
            "checkpoint_root_dir": str(self.folder / "runs"),
            "model": {"model_path": str(self.model), "max_prompt_tokens": 16, "max_response_tokens": 4},
            "algorithm": algorithm,
            "cluster": {"num_cpus": 2},
            "monitor": {"monitor_type": "none"},
            **sections,
        }

    def learn(
        self,
        name: str,
        buffer: dict[str, Any] | None = None,
        taskset: dict[str, Any] | None = None,
        **sections: Any,
    ) -> tuple[float, float]:
        """Accuracy on held-out questions before and after learning from rollouts."""
        source = {"path": str(self.folder / "train.jsonl"), "format": QUESTIONS, "data_selector": SHUFFLED}
        explorer_input = {
            "taskset": {**source, **(taskset or {})},
            "eval_tasksets": [self.held_out()],
            "default_reward_fn_type": "exact_reward",
        }
        buffer = {"batch_size": 64, "total_epochs": 100, **(buffer or {}), "explorer_input": explorer_input}
        sections = {"explorer": {"eval_interval": 1000}, "synchronizer": {"sync_offset": 1}, **sections}
        config = self.config(name, buffer=buffer, **sections)
        summary = Experiment(**config).run(progress="none")
        assert summary.status == "finished"
        assert summary.accuracy_before is not None and summary.accuracy_after is not None
        return summary.accuracy_before, summary.accuracy_after

    def train(self, name: str, path: str, **sections: Any) -> Experiment:
        """The finished run on a dataset."""
        source = {"path": str(self.folder / path), "format": RAW, "data_selector": SHUFFLED}
        buffer = {
            "train_batch_size": 32,
            "total_epochs": 100,
            "trainer_input": {"experience_buffer": source, "eval_buffer": {"path": source["path"], "format": RAW}},
            "explorer_input": {"eval_tasksets": [self.held_out()], "default_reward_fn_type": "exact_reward"},
        }
        sections = {"trainer": {"total_steps": 20}, **sections}
        run = Experiment(**self.config(name, buffer=buffer, **sections), mode="train")
        summary = run.run(progress="none")
        assert summary.status == "finished"
        (first, last), losses = summary.stages[0].eval_losses, run.metrics("eval")["eval_loss"]
        assert (len(losses), losses.iloc[0], losses.iloc[-1]) == (2, first, last) and last < 0.9 * first
        return run

    def train_here(self, name: str, path: str, steps: int) -> tuple[pd.DataFrame, Path]:
        """The metrics of all steps on a dataset, and the model after them; the trainer's rank in this process."""
        source = {"path": str(self.folder / path), "format": RAW, "data_selector": SHUFFLED}
        buffer = {"train_batch_size": 32, "total_epochs": 100, "trainer_input": {"experience_buffer": source}}
        tree = self.config(name, algorithm={"algorithm_type": name}, buffer=buffer, mode="train")
        config = load_config(tree, [f"trainer.total_steps={steps}", f"name={name}-{path}"])
        check_inputs([config])
        storage = open_storage(config.checkpoint_job_dir)
        with MetricsWriter(storage, "trainer") as metrics:
            build_trainer(config, storage, steps, metrics, lambda event: None).run()
        frame = read_metrics(storage, "trainer").sort_values("step")
        return frame, Path(config.checkpoint_job_dir) / f"global_step_{steps}" / HF_FOLDER

    def preference(self, model_path: Path) -> float:
        """Share of the held-out questions to which a model finds the right answer likelier than ten too many."""
        model, tokenizer = load_policy(str(model_path), "float32", "cpu")
        rows = [json.loads(line) for line in (self.folder / "eval.jsonl").read_text().splitlines()]
        sides = [[(q["question"], int(q["answer"]) + error) for q in rows] for error in (0, 10)]
        with torch.no_grad():
            right, wrong = (sequence_logprobs(model, tokenizer, side) for side in sides)
        return float((right > wrong).float().mean())

    def held_out(self) -> dict[str, Any]:
        path = str(self.folder / "eval.jsonl")
        return {"name": "held_out", "path": path, "format": QUESTIONS, "rollout_args": {"temperature": 0.0}}


def sequence_logprobs(model: Any, tokenizer: Any, pairs: list[tuple[str, int]]) -> torch.Tensor:
    """[N] log p of each answer and its end, given its question."""
    prompts = [tokenizer.encode(question) for question, _ in pairs]
    rows = [p + tokenizer.encode(str(a)) + [tokenizer.eos_token_id] for p, (_, a) in zip(prompts, pairs, strict=True)]
    packed = pack_rows(
        [np.array(row) for row in rows], np.array([len(prompt) for prompt in prompts]), np.ones(len(rows))
    )
    logprobs, _ = token_logprobs(model, packed)
    return logprobs.sum(-1)


def warm_up(folder: Path, numbers: list[int], correct_share: float = CORRECT_SHARE) -> None:
    """Train the model in the folder on a teacher's answers; some seconds, since it learns to copy two digits."""
    dice = random.Random(0)
    model, tokenizer = load_policy(str(folder), "float32", "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.0)
    for _ in range(WARM_UP_STEPS):
        shown = [(n, 0 if dice.random() < correct_share else 10) for n in dice.choices(numbers, k=32)]
        loss = -sequence_logprobs(model, tokenizer, [(f"{n}=", n + error) for n, error in shown]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    folder = tmp_path_factory.mktemp("families")
    numbers = list(range(10, 90))
    random.Random(0).shuffle(numbers)
    held_out, train = numbers[:20], numbers[20:]
    tables = {
        "eval": [{"question": f"{n}=", "answer": str(n)} for n in held_out],
        "train": [{"question": f"{n}=", "answer": str(n)} for n in train],
        "pairs": [{"prompt": f"{n}=", "chosen": str(n), "rejected": str(n + 10)} for n in train],
        "right": [{"prompt": f"{n}=", "response": str(n)} for n in train],
    }
    for name, rows in tables.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_toy_model(folder / "model", hidden_size=96, intermediate_size=192, num_layers=1, num_heads=3)
    warm_up(folder / "model", train)
    return Toy(folder, folder / "model")


def test_the_policy_was_warmed_up_on_mistakes(toy: Toy) -> None:
    assert toy.preference(toy.model) < 0.5


@pytest.mark.parametrize(
    ("name", "lr", "steps"),
    [
        ("grpo", LR, 12),
        ("opmd", 2 * LR, 20),  # slower: its advantages are not in units of the spread of the rewards
        ("reinforceplusplus", LR, 12),
    ],
)
def test_an_algorithm_on_rollouts_learns(toy: Toy, name: str, lr: float, steps: int) -> None:
    optimizer = {"lr": lr, "betas": [0.9, 0.99], "weight_decay": 0.0}
    algorithm = {"algorithm_type": name, "optimizer": optimizer}
    before, after = toy.learn(name, algorithm=algorithm, trainer={"total_steps": steps})
    assert after > before + 0.3


def test_ppo_with_a_critic_learns(toy: Toy) -> None:
    before, after = toy.learn(
        "ppo",
        {"batch_size": 256},
        algorithm={"algorithm_type": "ppo"},
        trainer={"total_steps": 15, "critic_warmup": 2, "critic": {"lr": LR}},
    )
    assert after > before + 0.3


def test_mix_learns_from_rollouts_and_demonstrations(toy: Toy) -> None:
    shown = {"sft_dataset": {"path": str(toy.folder / "right.jsonl"), "format": RAW, "data_selector": SHUFFLED}}
    before, after = toy.learn(
        "mix",
        {"batch_size": 56, "trainer_input": {"auxiliary_buffers": shown}},
        algorithm={"algorithm_type": "mix", "sample_strategy_args": {"expert_data_ratio": 0.1}},
        trainer={"total_steps": 12},
    )
    assert after > before + 0.3


def test_dpo_learns_what_is_preferred(toy: Toy) -> None:
    run = toy.train("dpo", "pairs.jsonl", algorithm={"algorithm_type": "dpo"})
    metrics = run.metrics("trainer")
    assert metrics["reward_accuracy"].iloc[0] == 0.0, "policy and reference are equal at the first step"
    assert metrics["loss"].iloc[-1] < 0.9 * metrics["loss"].iloc[0]
    # That fewer answers are right afterwards is no contradiction: DPO lowers both sides, the rejected one more.
    before, after = toy.preference(toy.model), toy.preference(Path(run.url) / "global_step_20" / HF_FOLDER)
    assert before < 0.5
    assert after > 0.9


def test_a_reward_model_tells_responses_apart_that_it_has_not_seen(toy: Toy) -> None:
    """Of two words of a and b the one with more a is preferred; words of the held-out pairs are in no other."""
    words = ["".join(letters) for letters in itertools.product("ab", repeat=7)]
    random.Random(0).shuffle(words)
    train, held_out = (words_in_order(random.Random(1), part, 64) for part in (words[:96], words[96:]))
    rows = [{"prompt": "say:", "chosen": chosen, "rejected": rejected} for chosen, rejected in train]
    (toy.folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics, model = toy.train_here("reward_model", "words.jsonl", steps=20)
    assert metrics["loss"].iloc[0] == pytest.approx(math.log(2.0)), "its head begins at 0"
    assert metrics["reward_accuracy"].iloc[-3:].mean() > 0.9
    right = [score(model, "say:", chosen) > score(model, "say:", rejected) for chosen, rejected in held_out]
    assert sum(right) > 0.9 * len(right)


def test_what_a_reward_model_says_is_learned(toy: Toy) -> None:
    """It has seen pairs of the training questions; the accuracy is that of the answers, of which it knows nothing."""
    _, model = toy.train_here("reward_model", "pairs.jsonl", steps=60)
    scored = {"default_reward_fn_type": "reward_model", "reward_fn_args": {"model_path": str(model)}}
    grpo = {"algorithm_type": "grpo"}
    before, after = toy.learn("scored", {"batch_size": 32}, scored, algorithm=grpo, trainer={"total_steps": 12})
    assert after > before + 0.3


def words_in_order(dice: random.Random, words: list[str], count: int) -> list[tuple[str, str]]:
    """Pairs of words, the one with more a first."""
    pairs = (sorted(dice.sample(words, 2), key=lambda word: -word.count("a")) for _ in itertools.count())
    return list(itertools.islice(((x, y) for x, y in pairs if x.count("a") != y.count("a")), count))


def score(model: Path, prompt: str, response: str) -> float:
    """By the reward function."""
    task = Task("t", 0, 0, prompt=prompt)
    return compute_reward(task, response, "reward_model", {"model_path": str(model)}).value


def test_sft_learns_what_it_is_shown(toy: Toy) -> None:
    run = toy.train("sft", "right.jsonl", algorithm={"algorithm_type": "sft"})
    loss = run.metrics("trainer")["loss"]
    assert loss.iloc[-1] < 0.7 * loss.iloc[0]
    assert toy.preference(Path(run.url) / "global_step_20" / HF_FOLDER) > 0.9


@pytest.fixture(scope="module")
def teacher(toy: Toy) -> Path:
    """A model that knows: warmed up on answers that are all right."""
    folder = toy.folder / "teacher"
    build_toy_model(folder, seed=1, hidden_size=96, intermediate_size=192, num_layers=1, num_heads=3)
    warm_up(folder, list(range(10, 90)), correct_share=1.0)
    return folder


def test_a_student_learns_what_its_teacher_knows(toy: Toy, teacher: Path) -> None:
    models = {"explorer": {"eval_interval": 1000, "auxiliary_models": [{"model_path": str(teacher)}]}}
    before, after = toy.learn("jsd", algorithm={"algorithm_type": "jsd"}, trainer={"total_steps": 10}, **models)
    assert after > before + 0.5
