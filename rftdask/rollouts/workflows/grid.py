"""A small environment: walk a text grid to its goal, one call of the policy per move.

An example of a workflow that reports the state and reward of each step. A task's prompt is the map: S is the start, G
the goal, # a wall, anything else free. The policy sees the map with a P at its position and no history, so a state is a
position. Invariant: equal answers give equal walks.
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
    """A map and the current position. Example: Grid.of("S.G").moved("right").moved("right").is_won"""

    rows: tuple[str, ...]
    at: tuple[int, int]
    """Row and column."""

    @staticmethod
    def of(text: str) -> Grid:
        """Parse a map. Raises: ValueError: not exactly one S and one G."""
        rows = tuple(text.strip().splitlines())
        starts = [(r, row.index("S")) for r, row in enumerate(rows) if "S" in row]
        if text.count("S") != 1 or text.count("G") != 1:
            raise ValueError(f"a map needs one S and one G, got {text.count('S')} and {text.count('G')}: {text!r}")
        return Grid(rows, starts[0])

    @property
    def is_won(self) -> bool:
        row, column = self.at
        return self.rows[row][column] == "G"

    def moved(self, word: str) -> Grid:
        """Return the grid after a move; unchanged if the move leads into a wall or off the map, or is unknown."""
        down, right = _MOVES.get(word, (0, 0))
        row, column = self.at[0] + down, self.at[1] + right
        inside = 0 <= row < len(self.rows) and 0 <= column < len(self.rows[row])
        return Grid(self.rows, (row, column)) if inside and self.rows[row][column] != "#" else self

    def text(self) -> str:
        """Return the map with a P at the current position; the start is a free cell."""
        lines = [row.replace("S", ".") for row in self.rows]
        row, column = self.at
        lines[row] = f"{lines[row][:column]}P{lines[row][column + 1 :]}"
        return "\n".join(lines)


@workflow("grid_workflow")
async def grid_workflow(task: Task, model: PolicyModel) -> Reward:
    """Walk until the goal or the last turn. Reaching the goal earns 1; a step that does not move costs bump_penalty.

    `workflow_args`: max_turns (8); bump_penalty (0.1).
    """
    options = {"max_turns": 8, "bump_penalty": 0.1, **task.workflow_args}
    grid = Grid.of(task.prompt)
    steps: list[Step] = []
    system = [message for message in task.messages if message["role"] == "system"]
    while len(steps) < options["max_turns"] and not grid.is_won:
        question = QUESTION.format(map=grid.text())
        chat = [*system, {"role": "user", "content": question}]
        move = _WORD.search((await (model.chat(chat) if task.messages else model.generate(question))).text)
        after = grid.moved(move[1].lower() if move else "")
        earned = 1.0 if after.is_won else 0.0 if after != grid else -float(options["bump_penalty"])
        # The position before the move, by which algorithms compare moves.
        steps.append(Step(f"at {grid.at[0]},{grid.at[1]}", earned))
        grid = after
    metrics = {"accuracy": float(grid.is_won), "num_turns": float(len(steps))}
    return Reward(sum(step.reward or 0.0 for step in steps), metrics, tuple(steps))
