"""Rewards computed only from the text."""

from __future__ import annotations

from rftdask.data.task import Task
from rftdask.rollouts.rewards.registry import reward
from rftdask.rollouts.workflows.base import Reward

FORMAT_REWARD = 0.1


@reward("exact_reward")
def exact_reward(response: str, truth: str, task: Task) -> Reward:
    """1 if the response equals the truth, ignoring surrounding space, else 0. Metric: accuracy."""
    correct = float(response.strip() == truth.strip())
    return Reward(correct, {"accuracy": correct})


@reward("format_reward")
def format_reward(response: str, truth: str, task: Task) -> Reward:
    """+0.1 for "<think>...</think> <answer>...</answer>" with nothing after it, else -0.1. Metric: format_score."""
    score = FORMAT_REWARD if follows_format(response) else -FORMAT_REWARD
    return Reward(score, {"format_score": score})


def follows_format(response: str) -> bool:
    """True if a thought is followed by one answer, which ends the response."""
    _, opened, rest = response.partition("<think>")
    _, closed, rest = rest.partition("</think>")
    if not (opened and closed):
        return False
    rest = rest.strip()
    return rest.startswith("<answer>") and rest.endswith("</answer>") and rest.count("</answer>") == 1


def starts_with_thought(response: str) -> bool:
    """True if the response is one <think>...</think> with something after it."""
    head, closed, rest = response.partition("</think>")
    return bool(closed and rest.strip()) and head.lstrip().startswith("<think>") and "<think>" not in rest


def last_answer(response: str) -> str | None:
    """The text inside the last <answer>...</answer>, stripped; None if there is none."""
    head, closed, _ = response.rpartition("</answer>")
    _, opened, answer = head.rpartition("<answer>")
    return answer.strip() if closed and opened else None
