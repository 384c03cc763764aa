"""Reward of tool calls that are compared with the correct ones, without executing them.

Source: Tool-N1, arXiv:2505.00024: one thought, then the calls; 1 only if all of them are correct.
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
    """1 if the response is one <think>...</think> followed by a JSON list of exactly the truth's calls {"name",
    "arguments"}, in any order, in its last <tool_call>...</tool_call>; else 0. `[]` means no call. Metrics: accuracy,
    format_score (valid form), names_score (correct tools, with any arguments).

    Raises: ValueError: the truth is not a list of calls.
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
    """The calls of a response; None: it does not have the required form."""
    if response.count("<think>") != 1 or response.count("</think>") != 1:
        return None
    calls, thought = response.find(_OPEN), response.find("</think>")
    if response.find("<think>") > thought or thought > calls:
        return None
    text, closed, _ = response[response.rfind(_OPEN) + len(_OPEN) :].partition(_CLOSE)
    return _parse_calls(text) if closed else None


def _parse_calls(text: str) -> list[tuple[str, str]] | None:
    """(name, arguments as canonical JSON) of each call; None: not a list of calls."""
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
