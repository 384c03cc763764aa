"""Countdown: reach a target from given numbers, each used exactly once, with + - * / and parentheses."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rftdask.data.task import Task
from rftdask.rollouts.rewards.arithmetic import ExpressionError, evaluate
from rftdask.rollouts.rewards.registry import reward
from rftdask.rollouts.rewards.text import FORMAT_REWARD, last_answer
from rftdask.rollouts.workflows.base import Reward


@reward("countdown_reward")
def countdown_reward(response: str, truth: str, task: Task) -> Reward:
    """1 if the last <answer> holds an expression that reaches the target with every number once; 0.1 for a wrong
    answer; 0 without an answer. Metric: accuracy.

    The puzzle is JSON in the truth, {"target": 24, "numbers": [1, 2, 3, 4]}, or the same keys in the task's row or its
    column "metadata"; "nums" is accepted for "numbers".

    Raises: ValueError: the task has no puzzle.
    """
    target, numbers = _puzzle(truth, task)
    answer = last_answer(response)
    if answer is None:
        return Reward(0.0, {"accuracy": 0.0})
    try:
        value, used = evaluate(answer)
        correct = value == target and sorted(used) == sorted(numbers)
    except ExpressionError:
        correct = False
    return Reward(1.0 if correct else FORMAT_REWARD, {"accuracy": float(correct)})


def _puzzle(truth: str, task: Task) -> tuple[int, list[int]]:
    try:
        parsed = json.loads(truth)
    except ValueError:
        parsed = None
    # Datasets put it in the answer, in columns, or in a column of metadata.
    for source in (parsed, task.row, task.row.get("metadata")):
        if isinstance(source, Mapping) and "target" in source and ("numbers" in source or "nums" in source):
            numbers = source["numbers"] if "numbers" in source else source["nums"]
            return int(source["target"]), [int(number) for number in numbers]
    raise ValueError(
        f"task {task.group_id} is not a countdown puzzle: neither its truth nor its row has target and numbers "
        f"(columns: {', '.join(task.row) or 'none'})"
    )
