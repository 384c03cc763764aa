"""Promises of the grid: moves as on paper, and the position and reward of each step."""

import asyncio
from typing import Any

import pytest

from rftdask.data.task import Task
from rftdask.rollouts.workflows.base import Response, Reward, Step
from rftdask.rollouts.workflows.grid import QUESTION, Grid
from rftdask.rollouts.workflows.registry import find_workflow


class Walker:
    """A PolicyModel that answers with the given words in order and records its prompts."""

    def __init__(self, *words: str) -> None:
        self.asked: list[Any] = []
        self._words = iter(words)

    async def chat(self, messages: Any, **sampling: Any) -> Response:
        self.asked.append([(message["role"], message["content"]) for message in messages])
        return Response(next(self._words), (), (), (), "stop")

    async def generate(self, prompt: str, **sampling: Any) -> Response:
        self.asked.append(prompt)
        return Response(next(self._words), (), (), (), "stop")


def walk(text: str, walker: Walker, **fields: Any) -> Reward:
    task = Task("t", 0, 0, prompt=text, **fields)
    reward = asyncio.run(find_workflow("grid_workflow").run(task, walker))
    assert isinstance(reward, Reward)
    return reward


def test_walk_reports_position_and_reward_of_each_step() -> None:
    walker = Walker("I go Right.", "right", "down", "RIGHT", "never asked")
    reward = walk("S.#\n#.G", walker, workflow_args={"bump_penalty": 0.25})
    assert reward == Reward(
        0.75,
        {"accuracy": 1.0, "num_turns": 4.0},
        (Step("at 0,0", 0.0), Step("at 0,1", -0.25), Step("at 0,1", 0.0), Step("at 1,1", 1.0)),
    )
    assert walker.asked[2] == QUESTION.format(map=".P#\n#.G")


def test_walk_ends_after_its_last_turn() -> None:
    reward = walk("S..G", Walker("right", "what?", "right"), workflow_args={"max_turns": 3})
    assert reward == Reward(
        -0.1, {"accuracy": 0.0, "num_turns": 3.0}, (Step("at 0,0", 0.0), Step("at 0,1", -0.1), Step("at 0,1", 0.0))
    )


@pytest.mark.parametrize("word", ["up", "down", "left"])
def test_moves_stop_at_walls_and_map_edges(word: str) -> None:
    grid = Grid.of("S.G\n#..")
    assert grid.moved(word) == grid


def test_chat_keeps_its_system_prompt_and_shows_the_map() -> None:
    walker = Walker("right")
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "SG"})
    walk("SG", walker, messages=messages)
    assert walker.asked == [[("system", "Be brief."), ("user", QUESTION.format(map="PG"))]]


@pytest.mark.parametrize("text", ["..G", "S.S\n..G", "S.."])
def test_map_without_one_start_and_goal_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a map needs one S and one G"):
        walk(text, Walker())
