"""Promises of the reward of a trained model: the score of transformers for the tokens of training."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rftdask.config.schema.buffer import FormatConfig
from rftdask.data.datasets import RowsDataset
from rftdask.data.supervised import PreferenceRows
from rftdask.data.task import Task
from rftdask.errors import DataError
from rftdask.models.toy import build_toy_model
from rftdask.rollouts.rewards import compute_reward


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    build_toy_model(folder, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2)
    torch.manual_seed(0)  # the head is initialized randomly
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    model.save_pretrained(folder / "scored")
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder / "scored")
    return folder


@pytest.mark.parametrize("chat", [False, True])
def test_reward_equals_the_score_in_training(model_path: Path, chat: bool) -> None:
    messages = [{"role": "user", "content": "2+2="}] if chat else []
    task = Task("t", 0, 0, prompt="" if chat else "2+2=", messages=tuple(messages))
    settings = {"model_path": str(model_path / "scored")}
    rewards = [compute_reward(task, text, "reward_model", settings).value for text in ("4", "11")]

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    rows = RowsDataset([[{"prompt": "2+2=", "chosen": "4", "rejected": "11"}]], "")
    fmt = FormatConfig(prompt_type="plaintext" if chat else "raw")
    model = AutoModelForSequenceClassification.from_pretrained(model_path / "scored")
    pair = PreferenceRows(rows, tokenizer, fmt, 99).read([0])
    with torch.no_grad():
        scores = [float(model(torch.tensor([row[0]])).logits[0, 0]) for row in pair]
    assert rewards == scores
    assert rewards[0] != rewards[1]


def test_language_model_is_refused_as_reward_model(model_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not a reward model .*'score.weight'.*by algorithm type reward_model"):
        compute_reward(Task("t", 0, 0, prompt="a"), "b", "reward_model", {"model_path": str(model_path)})
