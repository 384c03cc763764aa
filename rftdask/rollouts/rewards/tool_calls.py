"""The reward of calls of tools that are compared with the right ones: nothing is called.

Source: Tool-N1, arXiv:2505.00024: one thought, then the calls, and 1 only where all of them are right.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from rftdask.data.task import Task
from rftdask.rollouts.rewards.registry import reward
from rftdask.rollouts.workflows.base import Reward

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@reward("tool_call_reward")
def tool_call_reward(response: str, truth: str, task: Task) -> Reward:
    """1 if the response is one <think>...</think> and then, in its last <tool_call>...</tool_call>, a JSON list of the
    calls {"name", "arguments"} that the truth lists, in any order; else 0. No call at all is `[]`. Metrics: accuracy,
    format_score (it has the form), names_score (the right tools, whatever their arguments).

    Raises: ValueError: the truth is no list of calls: a fault of the dataset.
    """
    right = _calls(truth)
    if right is None:
        raise ValueError(f"task {task.group_id}: the answer is no JSON list of {{name, arguments}}: {truth!r:.200}")
    said = _said(response)
    same_names = said is not None and Counter(name for name, _ in said) == Counter(name for name, _ in right)
    correct = float(said is not None and Counter(said) == Counter(right))
    scores = {"accuracy": correct, "format_score": float(said is not None), "names_score": float(same_names)}
    return Reward(correct, scores)


def _said(response: str) -> list[tuple[str, str]] | None:
    """The calls of a response; None: it has not the form."""
    if response.count("<think>") != 1 or response.count("</think>") != 1:
        return None
    calls, thought = response.find(_OPEN), response.find("</think>")
    if response.find("<think>") > thought or thought > calls:
        return None
    text, closed, _ = response[response.rfind(_OPEN) + len(_OPEN) :].partition(_CLOSE)
    return _calls(text) if closed else None


def _calls(text: str) -> list[tuple[str, str]] | None:
    """(name, arguments as canonical JSON) of each call; None: it is something else."""
    try:
        read: Any = json.loads(text)
        read = json.loads(read) if isinstance(read, str) else read
    except (ValueError, RecursionError):
        return None
    calls = [read] if isinstance(read, dict) else read
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        return None
    if not all(isinstance(call.get("name"), str) and "arguments" in call for call in calls):
        return None
    return [(call["name"], json.dumps(call["arguments"], sort_keys=True)) for call in calls]
