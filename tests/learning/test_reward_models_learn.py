"""Promises: a reward model ranks unseen pairs, and a policy learns from its scores."""

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from rftdask.data.task import Task
from rftdask.rollouts.rewards import compute_reward
from rftdask.trainer.checkpoint import HF_FOLDER
from tests.learning.cases import Case, config_of, toys_of
from tests.learning.harness import Run
from tests.learning.toys import LETTERS, after


def trained(folder: Path, pairs: Path, steps: int) -> tuple[Any, Path]:
    """The metrics of all steps of a reward model, and its folder."""
    tree = config_of(Case("reward_model", toy="echo", dataset="pairs", steps=steps), 0, toys_of(0))
    tree["buffer"]["trainer_input"]["experience_buffer"]["path"] = str(pairs)
    run = Run(tree, ("trainer.save_hf_checkpoint=last",), folder)
    return run.train(), Path(run.config.checkpoint_job_dir) / f"global_step_{steps}" / HF_FOLDER


def words_in_order(dice: random.Random, words: list[str], count: int) -> list[tuple[str, str]]:
    """Pairs of words, the one with more a first."""
    pairs = (sorted(dice.sample(words, 2), key=lambda word: -word.count("a")) for _ in itertools.count())
    return list(itertools.islice(((x, y) for x, y in pairs if x.count("a") != y.count("a")), count))


def test_a_reward_model_ranks_unseen_responses(tmp_path: Path) -> None:
    """The word with more a is preferred; the words of the held-out pairs are in no other pair."""
    words = ["".join(letters) for letters in itertools.product("ab", repeat=7)]
    random.Random(0).shuffle(words)
    train, held_out = (words_in_order(random.Random(1), part, 64) for part in (words[:96], words[96:]))
    rows = [{"prompt": "say:", "chosen": chosen, "rejected": rejected} for chosen, rejected in train]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics, model = trained(tmp_path, tmp_path / "words.jsonl", steps=40)
    assert metrics["loss"].iloc[0] == pytest.approx(math.log(2.0)), "its head begins at 0"

    def score(response: str) -> float:
        task = Task("t", 0, 0, prompt="say:")
        return compute_reward(task, response, "reward_model", {"model_path": str(model)}).value

    right = [score(chosen) > score(rejected) for chosen, rejected in held_out]
    assert sum(right) > 0.9 * len(right)


def test_a_policy_learns_from_a_reward_model(tmp_path: Path) -> None:
    _, model = trained(tmp_path, toys_of(0) / "pairs.jsonl", steps=60)
    tree = config_of(Case("grpo", toy="echo"), 0, toys_of(0))
    scored = {"default_workflow_type": "simple_workflow", "default_reward_fn_type": "reward_model"}
    tree["buffer"]["explorer_input"]["taskset"] |= {**scored, "reward_fn_args": {"model_path": str(model)}}
    run = Run(tree, (), tmp_path)
    run.train()
    assert all(run.logprob(f"{letter}:", letter) > run.logprob(f"{letter}:", after(letter)) for letter in LETTERS)
