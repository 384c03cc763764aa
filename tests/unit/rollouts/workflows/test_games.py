"""Promise: from a folder of ALFWorld games each task selects one by its seed, the same on every machine."""

from pathlib import Path

import pytest

from rftdask.data.task import Task
from rftdask.errors import UserError
from rftdask.rollouts.workflows.games import draw, find_games


def test_seed_selects_a_game_and_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no game\.tw-pddl below .*; run alfworld-download"):
        find_games(str(tmp_path))
    for name in ("c", "a/one", "b"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "game.tw-pddl").touch()
    (tmp_path / "b/traj_data.json").touch()
    games = find_games(str(tmp_path))
    assert games == [str(tmp_path / name / "game.tw-pddl") for name in ("a/one", "b", "c")]
    drawn = [draw(games, Task("games", 0, 7, row=row)) for row in ({"seed": 0}, {"seed": 5}, {})]
    assert drawn == [games[0], games[2], games[1]]  # without a seed: the task's index, 7
