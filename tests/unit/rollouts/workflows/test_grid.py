"""Promises of the grid: moves as on paper, and the position and reward of each step."""

from typing import Any

import pytest

from rftdask.rollouts.workflows.base import Reward, Step
from rftdask.rollouts.workflows.grid import QUESTION, Grid
from tests.unit.rollouts.workflows.test_shipped_workflows import Script, play


def walk(text: str, *words: str, messages: Any = (), **fields: Any) -> tuple[Reward, list[Any]]:
    """The reward of a policy that answers with the words, and the prompts."""
    model = Script(words)
    return play("grid_workflow", model, prompt=text, messages=messages, **fields), model.prompts


def test_walk_reports_position_and_reward_of_each_step() -> None:
    words = ("I go Right.", "right", "down", "RIGHT", "never asked")
    reward, asked = walk("S.#\n#.G", *words, workflow_args={"bump_penalty": 0.25})
    assert reward == Reward(
        0.75,
        {"accuracy": 1.0, "num_turns": 4.0},
        (Step("at 0,0", 0.0), Step("at 0,1", -0.25), Step("at 0,1", 0.0), Step("at 1,1", 1.0)),
    )
    assert asked[2] == QUESTION.format(map=".P#\n#.G")


def test_walk_ends_after_its_last_turn() -> None:
    reward, _ = walk("S..G", "right", "what?", "right", workflow_args={"max_turns": 3})
    assert reward == Reward(
        -0.1, {"accuracy": 0.0, "num_turns": 3.0}, (Step("at 0,0", 0.0), Step("at 0,1", -0.1), Step("at 0,1", 0.0))
    )


@pytest.mark.parametrize("word", ["up", "down", "left"])
def test_moves_stop_at_walls_and_map_edges(word: str) -> None:
    grid = Grid.of("S.G\n#..")
    assert grid.moved(word) == grid


def test_chat_keeps_its_system_prompt_and_shows_the_map() -> None:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "SG"})
    assert walk("SG", "right", messages=messages)[1] == [[("system", "Be brief."), ("user", QUESTION.format(map="PG"))]]


@pytest.mark.parametrize("text", ["..G", "S.S\n..G", "S.."])
def test_map_without_one_start_and_goal_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a map needs one S and one G"):
        walk(text)
