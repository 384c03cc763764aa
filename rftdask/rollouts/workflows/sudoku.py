"""Sudoku in text: the policy fills a board, several moves per turn, and each turn shows the current board.

A turn is its own experience, because the board is the complete state. Wrong moves earn -1 and end the game, moves that
complete the board earn 1, others 0. Needs no further packages.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from rftdask.data.task import Task
from rftdask.rollouts.workflows.base import PolicyModel, Reward, Step
from rftdask.rollouts.workflows.registry import workflow

Board = list[list[int]]
"""Rows of cells; 0 is empty."""
_HOLES = {"easy": 1 / 3, "medium": 1 / 2, "hard": 2 / 3}
"""Fraction of cells that are initially empty."""
_QUESTION = (
    "This is a Sudoku of {size} rows; 0 is an empty cell. Each of the numbers 1 to {size} stands once in every row, "
    "column and block. Fill one to {max_moves} empty cells, and answer with a line for each and nothing else: row, "
    "column (both from 0) and number, such as\n0 2 4\n\nTurns left: {turns_left}\n\n{board}"
)


@workflow("sudoku_workflow")
async def sudoku_workflow(task: Task, model: PolicyModel) -> Reward:
    """Play one board: column `puzzle` of the row, as a list of rows or as digits; without it, a board generated from
    the task's index. Metrics: num_turns, num_moves, solved.

    Any full board without a clash is a solution, because a puzzle may have several. `workflow_args`: max_steps (20),
    max_moves_per_step (5); size (9) and difficulty (medium; easy, hard) of generated boards.

    Raises: ValueError: the puzzle is not a square board of digits, or has a clash.
    """
    options: dict[str, Any] = {"max_steps": 20, "max_moves_per_step": 5, "size": 9, "difficulty": "medium"}
    options |= task.workflow_args
    max_moves, puzzle = int(options["max_moves_per_step"]), task.row.get("puzzle")
    board = make_board(options["size"], options["difficulty"], task.index) if puzzle is None else read_board(puzzle)
    steps: list[Step] = []
    num_moves, solved = 0, False
    for number in range(int(options["max_steps"])):
        model.set_state(turn=number)
        before = "\n".join(" ".join(map(str, row)) for row in board)
        turns_left = int(options["max_steps"]) - number
        question = _QUESTION.format(board=before, size=len(board), max_moves=max_moves, turns_left=turns_left)
        moves = read_moves((await model.chat([{"role": "user", "content": question}])).text, len(board))
        is_right = 0 < len(moves) <= max_moves and _play(board, moves)
        solved = is_right and all(map(all, board))
        num_moves += len(moves) if is_right else 0
        steps.append(Step(before, 1.0 if solved else 0.0 if is_right else -1.0))
        if solved or not is_right:
            break
    metrics = {"num_turns": float(len(steps)), "num_moves": float(num_moves), "solved": float(solved)}
    return Reward(steps[-1].reward or 0.0, metrics, tuple(steps))


def read_moves(text: str, size: int) -> list[tuple[int, int, int]]:
    """Return (row, column, number) of each line; [] if a line is anything else."""
    moves = []
    for line in filter(None, map(str.strip, text.splitlines())):
        words = line.split()
        if len(words) != 3 or not all(word.isascii() and word.isdigit() and len(word) < 4 for word in words):
            return []
        row, column, number = map(int, words)
        if not (row < size and column < size and 1 <= number <= size):
            return []
        moves.append((row, column, number))
    return moves


def _play(board: Board, moves: Sequence[tuple[int, int, int]]) -> bool:
    """Fill the cells. Returns: False if a cell is not empty or the board then has a clash."""
    for row, column, number in moves:
        if board[row][column]:
            return False
        board[row][column] = number
    return not has_clash(board)


def has_clash(board: Board) -> bool:
    """Return True if a number appears twice in a row, column or block."""
    size = len(board)
    block = math.isqrt(size)
    parts = [*board, *([row[column] for row in board] for column in range(size))]
    for top in range(0, size, block):
        for left in range(0, size, block):
            parts.append([cell for row in board[top : top + block] for cell in row[left : left + block]])
    filled = [[cell for cell in part if cell] for part in parts]
    return any(len(part) != len(set(part)) for part in filled)


def read_board(puzzle: Any) -> Board:
    """Parse a puzzle of a dataset. Raises: ValueError: see sudoku_workflow."""
    if isinstance(puzzle, str):
        digits = [0 if cell == "." else int(cell) for cell in puzzle if cell.isdigit() or cell == "."]
        size = math.isqrt(len(digits))
        rows: Any = [digits[size * row : size * (row + 1)] for row in range(size)]
        rows = rows if size * size == len(digits) else []
    else:
        rows = puzzle
    size = len(rows) if isinstance(rows, list | tuple) else 0
    board = [[int(cell) for cell in row] for row in rows] if size else []
    is_board = size > 0 and math.isqrt(size) ** 2 == size and all(len(row) == size for row in board)
    if not is_board or not all(0 <= cell <= size for row in board for cell in row) or has_clash(board):
        raise ValueError(f"puzzle {puzzle!r:.200} is not a square board of 4, 9 or 16 rows without a clash (0: empty)")
    return board


def make_board(size: int, difficulty: str, seed: int) -> Board:
    """Generate a solvable board, deterministic in its arguments. Raises: ValueError: unknown size or difficulty."""
    block = math.isqrt(size)
    if block < 2 or block * block != size or difficulty not in _HOLES:
        raise ValueError(f"size {size} must be 4, 9 or 16, and difficulty {difficulty!r} one of {', '.join(_HOLES)}")
    dice = random.Random(seed)

    def shuffled() -> list[int]:
        # Exchanging lines within a band of blocks, or whole bands, keeps the board valid.
        bands = dice.sample(range(block), block)
        return [band * block + line for band in bands for line in dice.sample(range(block), block)]

    numbers = dice.sample(range(1, size + 1), size)
    rows, columns = shuffled(), shuffled()
    board = [[numbers[(block * (row % block) + row // block + column) % size] for column in columns] for row in rows]
    for cell in dice.sample(range(size * size), int(size * size * _HOLES[difficulty])):
        board[cell // size][cell % size] = 0
    return board
