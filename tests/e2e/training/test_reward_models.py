"""Promises: a reward model ranks unseen pairs, and it scores the rollouts of a run through the processes of the run.

The word with more a is preferred; the words of the held-out pairs are in no other pair.
"""

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rftdask import Experiment
from rftdask.config import load_config
from rftdask.data.task import Task
from rftdask.models.toy import build_toy_model
from rftdask.monitor.metrics import MetricsWriter, read_metrics
from rftdask.rollouts.rewards import compute_reward
from rftdask.storage import open_storage
from rftdask.trainer.checkpoint import HF_FOLDER
from rftdask.trainer.rank import build_trainer

pytestmark = pytest.mark.slow

STEPS = 20
RAW = {"prompt_type": "raw"}


def tree_of(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    return {
        "name": name,
        "checkpoint_root_dir": str(folder / "runs"),
        "model": {"model_path": str(folder / "model"), "max_prompt_tokens": 16, "max_response_tokens": 8},
        "cluster": {"num_cpus": 2},
        "monitor": {"monitor_type": "none"},
        **sections,
    }


def words_in_order(dice: random.Random, words: list[str], count: int) -> list[tuple[str, str]]:
    """Pairs of words, the one with more a first."""
    pairs = (sorted(dice.sample(words, 2), key=lambda word: -word.count("a")) for _ in itertools.count())
    return list(itertools.islice(((x, y) for x, y in pairs if x.count("a") != y.count("a")), count))


def score(model: Path, response: str) -> float:
    task = Task("t", 0, 0, prompt="say:")
    return compute_reward(task, response, "reward_model", {"model_path": str(model)}).value


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame, Path, list[tuple[str, str]]]:
    """The folder, the metrics of training, the reward model and the held-out pairs; the trainer's rank runs in this
    process.
    """
    folder = tmp_path_factory.mktemp("reward-model")
    words = ["".join(letters) for letters in itertools.product("ab", repeat=7)]
    random.Random(0).shuffle(words)
    shown, held_out = (words_in_order(random.Random(1), part, 64) for part in (words[:96], words[96:]))
    rows = [{"prompt": "say:", "chosen": chosen, "rejected": rejected} for chosen, rejected in shown]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_toy_model(folder / "model", hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2)
    source = {"path": str(folder / "words.jsonl"), "format": RAW, "data_selector": {"selector_type": "shuffle"}}
    algorithm = {"algorithm_type": "reward_model", "optimizer": {"lr": 3e-3}}
    buffer = {"train_batch_size": 16, "total_epochs": 100, "trainer_input": {"experience_buffer": source}}
    config = load_config(
        tree_of(folder, "scorer", mode="train", algorithm=algorithm, buffer=buffer, trainer={"total_steps": STEPS})
    )
    storage = open_storage(config.checkpoint_job_dir)
    with MetricsWriter(storage, "trainer") as metrics:
        build_trainer(config, storage, STEPS, metrics, lambda event: None).run()
    model = Path(config.checkpoint_job_dir) / f"global_step_{STEPS}" / HF_FOLDER
    return folder, read_metrics(storage, "trainer").sort_values("step"), model, held_out


def test_it_orders_pairs_that_it_has_not_seen(trained: tuple[Path, pd.DataFrame, Path, list[tuple[str, str]]]) -> None:
    _, metrics, model, held_out = trained
    assert metrics["loss"].iloc[0] == pytest.approx(math.log(2.0)), "its head begins at 0"
    assert metrics["reward_accuracy"].iloc[-3:].mean() > 0.9
    right = [score(model, chosen) > score(model, rejected) for chosen, rejected in held_out]
    assert sum(right) > 0.9 * len(right)


def test_it_scores_the_rollouts_of_a_run(trained: tuple[Path, pd.DataFrame, Path, list[tuple[str, str]]]) -> None:
    folder, _, model, _ = trained
    (folder / "tasks.jsonl").write_text('{"prompt": "say:", "response": ""}\n' * 4)
    scored = {"default_reward_fn_type": "reward_model", "reward_fn_args": {"model_path": str(model)}}
    taskset = {"path": str(folder / "tasks.jsonl"), "format": RAW, **scored}
    buffer = {"batch_size": 4, "total_epochs": 2, "explorer_input": {"taskset": taskset}}
    algorithm = {"algorithm_type": "grpo", "kl_loss_fn": "none"}
    run = Experiment(**tree_of(folder, "scored", algorithm=algorithm, buffer=buffer, trainer={"total_steps": 2}))
    assert run.run(progress="none").status == "finished"
    assert (run.metrics("trainer")["reward_std"] > 0).all(), "responses get different rewards"
