"""Rewards that an untrained model sometimes gets, and a conversation, given to runs by their dotted paths."""

from rftdask.data.task import Task
from rftdask.rollouts.workflows.base import PolicyModel


def varied_reward(response: str, truth: str, task: Task) -> float:
    """Return the sum of the response's character codes, folded into 0 to 1: siblings differ, so advantages are
    not 0.
    """
    return sum(map(ord, response)) % 8 / 7


async def two_turns(task: Task, model: PolicyModel) -> float:
    """A conversation: ask the policy, send it a tool's answer, and ask again."""
    messages = [{"role": "user", "content": task.prompt}]
    first = await model.chat(messages)
    messages += [{"role": "assistant", "content": first.text}, {"role": "tool", "content": " so: "}]
    second = await model.chat(messages)
    return varied_reward(first.text + second.text, task.truth, task)


def even_reward(response: str, truth: str, task: Task) -> float:
    """Return 1 for an even first digit, which some answers have whatever the policy has learned."""
    return float(response[:1] in {"0", "2", "4", "6", "8"})


def even_codes(response: str, truth: str, task: Task) -> float:
    """Return the share of even character codes: about a half before training, and soon 1."""
    return sum(ord(letter) % 2 == 0 for letter in response) / max(1, len(response))
