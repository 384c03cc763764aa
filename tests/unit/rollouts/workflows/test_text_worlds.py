"""Promise: where a folder of ALFWorld's games is named, each task draws one by its seed, the same everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from rftdask.data.task import Task
from rftdask.errors import UserError
from rftdask.rollouts.workflows.text_worlds import draw, find_games


def test_a_seed_draws_one_of_the_games_and_an_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no game\.tw-pddl; run alfworld-download"):
        find_games(str(tmp_path))
    for name in ("c", "a/one", "b"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "game.tw-pddl").touch()
    (tmp_path / "b/traj_data.json").touch()
    games = find_games(str(tmp_path))
    assert games == [str(tmp_path / name / "game.tw-pddl") for name in ("a/one", "b", "c")]
    drawn = [draw(games, Task("games", 0, 7, row=row)) for row in ({"seed": 0}, {"seed": 5}, {})]
    assert drawn == [games[0], games[2], games[1]]  # without a seed by the task's number, 7
