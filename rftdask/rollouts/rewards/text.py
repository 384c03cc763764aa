"""Rewards computed from the text of a response."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

from rftdask.data.task import Task
from rftdask.rollouts.rewards.arithmetic import ExpressionError, evaluate
from rftdask.rollouts.rewards.registry import reward
from rftdask.rollouts.workflows.base import Reward

FORMAT_REWARD = 0.1
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@reward("exact_reward")
def exact_reward(response: str, truth: str, task: Task) -> Reward:
    """Return 1 if the response equals the truth, ignoring surrounding space, else 0. Metric: accuracy."""
    correct = float(response.strip() == truth.strip())
    return Reward(correct, {"accuracy": correct})


@reward("format_reward")
def format_reward(response: str, truth: str, task: Task) -> Reward:
    """+0.1 for "<think>...</think> <answer>...</answer>" with nothing after it, else -0.1. Metric: format_score."""
    score = FORMAT_REWARD if follows_format(response) else -FORMAT_REWARD
    return Reward(score, {"format_score": score})


def follows_format(response: str) -> bool:
    _, opened, rest = response.partition("<think>")
    _, closed, rest = rest.partition("</think>")
    rest = rest.strip() if opened and closed else ""
    return rest.startswith("<answer>") and rest.endswith("</answer>") and rest.count("</answer>") == 1


def starts_with_thought(response: str) -> bool:
    """Return True if the response is one <think>...</think> with something after it."""
    head, closed, rest = response.partition("</think>")
    return bool(closed and rest.strip()) and head.lstrip().startswith("<think>") and "<think>" not in rest


def last_answer(response: str) -> str | None:
    """The text inside the last <answer>...</answer>, stripped; None if there is none."""
    head, closed, _ = response.rpartition("</answer>")
    _, opened, answer = head.rpartition("<answer>")
    return answer.strip() if closed and opened else None


@reward("countdown_reward")
def countdown_reward(response: str, truth: str, task: Task) -> Reward:
    """Return 1 if the last <answer> holds an expression with + - * / and parentheses that reaches the target with every
    number once; 0.1 for a wrong answer; 0 without an answer. Metric: accuracy.

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
    columns, text = ", ".join(task.row) or "none", "neither its truth nor its row has target and numbers"
    raise ValueError(f"task {task.group_id} is not a countdown puzzle: {text} (columns: {columns})")


@reward(
    "reasoning_gym_reward",
    in_process=False,  # some of its many generators search for a long time
    requires={"reasoning_gym": "reasoning-gym"},
)
def reasoning_gym_reward(response: str, truth: str, task: Task) -> Reward:
    """Score, 0 to 1, by the generator of the task (reasoning-gym), for the last <answer>, or the whole response if it
    has none. Metric: accuracy, 1 for a full score.

    Raises: ValueError: the task's row is not from reasoning-gym.
    """
    metadata = task.row.get("metadata")
    if not isinstance(metadata, dict) or "source_dataset" not in metadata:
        text = "its row has no metadata with a source_dataset"
        raise ValueError(f"task {task.group_id} is not from reasoning-gym: {text}")
    answer = last_answer(response)
    scorer = _scorer(metadata["source_dataset"])
    score = float(scorer.score_answer(answer=response.strip() if answer is None else answer, entry=dict(task.row)))
    return Reward(score, {"accuracy": float(score >= 1.0)})


@cache  # about a hundred generators exist
def _scorer(name: str) -> Any:
    # Late: optional, and its import takes 2 s. By name, so that type checks do not depend on it.
    return importlib.import_module("reasoning_gym").create_dataset(name, size=1, seed=0)


@reward("tool_call_reward")
def tool_call_reward(response: str, truth: str, task: Task) -> Reward:
    """Return 1 if the response is one <think>...</think> followed by a JSON list of exactly the truth's calls {"name",
    "arguments"}, in any order, in its last <tool_call>...</tool_call>; else 0. `[]` means no call. Metrics: accuracy,
    format_score (valid form), names_score (correct tools, with any arguments).

    Raises: ValueError: the truth is not a list of calls.
    Source: Tool-N1, arXiv:2505.00024: one thought, then the calls; 1 only if all of them are correct.
    """
    expected = _parse_calls(truth)
    if expected is None:
        raise ValueError(f"task {task.group_id}: the answer is not a JSON list of {{name, arguments}}: {truth!r:.200}")
    calls = _response_calls(response)
    same_names = calls is not None and Counter(name for name, _ in calls) == Counter(name for name, _ in expected)
    correct = float(calls is not None and Counter(calls) == Counter(expected))
    scores = {"accuracy": correct, "format_score": float(calls is not None), "names_score": float(same_names)}
    return Reward(correct, scores)


def _response_calls(response: str) -> list[tuple[str, str]] | None:
    # None: the response does not have the required form.
    if response.count("<think>") != 1 or response.count("</think>") != 1:
        return None
    calls, thought = response.find(_OPEN), response.find("</think>")
    if response.find("<think>") > thought or thought > calls:
        return None
    text, closed, _ = response[response.rfind(_OPEN) + len(_OPEN) :].partition(_CLOSE)
    return _parse_calls(text) if closed else None


def _parse_calls(text: str) -> list[tuple[str, str]] | None:
    """Return (name, arguments as canonical JSON) of each call; None: not a list of calls."""
    try:
        value: Any = json.loads(text)
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None
    calls = [value] if isinstance(value, dict) else value
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        return None
    if not all(isinstance(call.get("name"), str) and "arguments" in call for call in calls):
        return None
    return [(call["name"], json.dumps(call["arguments"], sort_keys=True)) for call in calls]
