"""Rewards of expected answers: a reward that fails on a part of the data is found before a run."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rftdask.config.schema.buffer import TasksetConfig
from rftdask.config.schema.explorer import ExplorerConfig
from rftdask.data.tasksets import Taskset
from rftdask.rollouts.try_workflow import rewards_of_truths

NUMBERS_ONLY = "def pay(response, truth, task): return float(response == truth and truth.isdigit())\n"
BY_LENGTH = "def pay(response, truth, task): return len(truth) / 10\n"


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Description of the rewards of the parameters: source of the reward, answers."""
    source, answers = request.param
    name = f"paid_{abs(hash((source, *answers)))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    return describe(tmp_path, answers, default_reward_fn_type=f"{name}.pay")


def describe(folder: Path, answers: Sequence[str], judges: Sequence[dict[str, str]] = (), **section: str) -> str:
    rows = folder / "tasks.jsonl"
    rows.write_text("".join(json.dumps({"question": "how far?", "answer": answer}) + "\n" for answer in answers))
    columns = {"prompt_key": "question", "response_key": "answer"}
    taskset = Taskset(TasksetConfig.model_validate({"name": "t", "path": str(rows), "format": columns, **section}))
    explorer = ExplorerConfig.model_validate({"sandbox": {"mode": "never"}, "auxiliary_models": list(judges)})
    return asyncio.run(rewards_of_truths(taskset, explorer))


QUESTION = "; is the reward wrong for such answers?"
SOME = "1 on 2 rows, 0 on 1 row, for example row 1: '5 km'" + QUESTION
MANY = "0.4 on 1 row, 0.3 on 1 row, 0.1 on 1 row, others on 1, for example row 0: 'a'" + QUESTION


@pytest.mark.parametrize(
    ("described", "text"),
    [
        ((NUMBERS_ONLY, ["3", "5 km", "7"]), SOME),
        ((NUMBERS_ONLY, ["3", "7"]), "1 on 2 rows"),
        ((BY_LENGTH, ["a", "aa", "aaa", "aaaa"]), MANY),
    ],
    indirect=["described"],
)
def test_rewards_of_expected_answers_are_described(described: str, text: str) -> None:
    assert described == f"reward of the expected answer: {text}"


@pytest.mark.parametrize(
    "described", [(NUMBERS_ONLY, ["", ""]), ("def pay(response, truth, task): 1 / 0\n", ["3"])], indirect=True
)
def test_without_answers_or_rewards_nothing_is_described(described: str) -> None:
    assert described == ""


def test_rewards_by_a_judge_are_not_described(tmp_path: Path) -> None:
    judge = {"name": "judge", "model_path": "a-model"}
    assert describe(tmp_path, ["3", "7"], [judge], default_workflow_type="math_rm_workflow") == ""


@pytest.mark.parametrize("described", [(NUMBERS_ONLY, [str(number) for number in range(250)])], indirect=True)
def test_a_large_taskset_is_sampled_over_its_length(described: str) -> None:
    assert described == "reward of the expected answer: 1 on 84 rows"
