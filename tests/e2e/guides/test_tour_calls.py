"""Promises of docs/tour.md, checked by a run with a user's loss: the two paths in it are those of the code, function by
function, and each has at most six of the package's own calls.

A stack ends with its thread. The path from the command crosses two threads and a process, so it is composed of the
stacks at which work is handed over; see `recorded_run`.
"""

import re
from pathlib import Path

import pytest

from tests.e2e.own_stack import STACKS, Call, read_own_calls
from tests.e2e.toy_runs import DEADLINE_S, write_grpo_config
from tests.integration.run_cases import RunProcess

MOST_CALLS = 6
TOUR = (Path(__file__).parents[3] / "docs/tour.md").read_text()


def way_in_the_tour(title: str) -> list[Call]:
    section = TOUR.split(f"## {title}\n")[1].split("\n## ")[0]
    return [(file, name) for name, file in re.findall(r"^\| \[`([\w.]+)`\]\(\.\./([\w/.]+)\)", section, flags=re.M)]


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, list[Call]]]:
    """Places that a run of two steps and one rank recorded, and the path to each."""
    folder = tmp_path_factory.mktemp("recorded")
    config = write_grpo_config(
        folder,
        algorithm={"policy_loss_fn": "tests.e2e.own_losses.RecordedLoss"},
        trainer={"total_steps": 2, "save_interval": 0},
    )
    program = ("-m", "tests.e2e.recorded_run")
    env = {STACKS: str(folder / "stacks.jsonl")}
    with RunProcess("run", str(config), "--progress", "plain", env=env, program=program) as run:
        run.end(DEADLINE_S, code=0)
    return read_own_calls(folder / "stacks.jsonl")


def test_the_command_reaches_a_rank_as_the_tour_describes(stacks: list[tuple[str, list[Call]]]) -> None:
    ways = dict(stacks)
    # `supervise` is what runs for one rank; the rest is how any child process starts.
    (supervisor, *child) = ways["process of a rank"]
    assert {file for file, _ in child} == {"rftdask/processes/child.py"}
    way = [*ways["Gang.run"], *ways["supervise"], supervisor]
    assert way == way_in_the_tour("From the command to the ranks")
    assert len(way) <= MOST_CALLS


def test_a_rank_reaches_the_loss_by_the_way_in_the_tour(stacks: list[tuple[str, list[Call]]]) -> None:
    ways = [way for place, way in stacks if place == "loss"]
    assert len(ways) >= 2  # at least one per step
    for way in ways:
        assert way == way_in_the_tour("From a rank to the loss")
        assert len(way) + len(["the loss"]) <= MOST_CALLS
