"""The workflow of a small environment: walk a grid of text to its goal, one call of the policy for each move.

An example of workflows that tell what each step saw and earned. The prompt of a task is the map: S where the walk
begins, G its goal, # walls, anything else free. The policy is shown the map with a P where it stands and nothing of
what was before, so that a state is a place. Invariant: the same answers give the same walk.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rftdask.data.task import Task
from rftdask.rollouts.workflows.base import PolicyModel, Reward, Step
from rftdask.rollouts.workflows.registry import workflow

_MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_WORD = re.compile(rf"\b({'|'.join(_MOVES)})\b", re.IGNORECASE)
QUESTION = "Walk from P to G; # is a wall. Answer with one of up, down, left, right.\n{map}\n"


@dataclass(frozen=True)
class Grid:
    """A map and where the walk stands. Example: Grid.of("S.G").moved("right").moved("right").is_won"""

    rows: tuple[str, ...]
    at: tuple[int, int]
    """Row and column."""

    @staticmethod
    def of(text: str) -> Grid:
        """Raises: ValueError: not exactly one S and one G."""
        rows = tuple(text.strip().splitlines())
        starts = [(r, row.index("S")) for r, row in enumerate(rows) if "S" in row]
        if text.count("S") != 1 or text.count("G") != 1:
            raise ValueError(f"a map has one S and one G, this one {text.count('S')} and {text.count('G')}: {text!r}")
        return Grid(rows, starts[0])

    @property
    def is_won(self) -> bool:
        """True at the goal."""
        row, column = self.at
        return self.rows[row][column] == "G"

    def moved(self, word: str) -> Grid:
        """After one move; the same grid if that leads into a wall or off the map, or is no move."""
        down, right = _MOVES.get(word, (0, 0))
        row, column = self.at[0] + down, self.at[1] + right
        inside = 0 <= row < len(self.rows) and 0 <= column < len(self.rows[row])
        return Grid(self.rows, (row, column)) if inside and self.rows[row][column] != "#" else self

    def text(self) -> str:
        """The map with a P in place of what is at the place of the walk, the start a free cell like others."""
        lines = [row.replace("S", ".") for row in self.rows]
        row, column = self.at
        lines[row] = f"{lines[row][:column]}P{lines[row][column + 1 :]}"
        return "\n".join(lines)


@workflow("grid_workflow")
async def grid_workflow(task: Task, model: PolicyModel) -> Reward:
    """Walk until the goal or the last turn. The step that reaches the goal earns 1, one that leads nowhere loses.

    `workflow_args`: max_turns (8); bump_penalty (0.1), what a step costs that leads nowhere.
    """
    options = {"max_turns": 8, "bump_penalty": 0.1, **task.workflow_args}
    grid = Grid.of(task.prompt)
    steps: list[Step] = []
    system = [message for message in task.messages if message["role"] == "system"]
    while len(steps) < options["max_turns"] and not grid.is_won:
        question = QUESTION.format(map=grid.text())
        asked = [*system, {"role": "user", "content": question}]
        said = _WORD.search((await (model.chat(asked) if task.messages else model.generate(question))).text)
        after = grid.moved(said[1].lower() if said else "")
        earned = 1.0 if after.is_won else 0.0 if after != grid else -float(options["bump_penalty"])
        # The place before the move: it is what moves are compared by.
        steps.append(Step(f"at {grid.at[0]},{grid.at[1]}", earned))
        grid = after
    metrics = {"accuracy": float(grid.is_won), "num_turns": float(len(steps))}
    return Reward(sum(step.reward or 0.0 for step in steps), metrics, tuple(steps))
