"""A reward that an untrained model does not always miss, given to runs by its dotted path."""

from rftdask.data.task import Task


def varied_reward(response: str, truth: str, task: Task) -> float:
    """The sum of the response's character codes, folded into 0 to 1: siblings differ, so there is an advantage."""
    return sum(map(ord, response)) % 8 / 7
