"""A reward with parts: near is worth something, right is worth more."""

from rftdask.rollouts.workflows.base import Reward


def close(response: str, truth: str, task: object) -> Reward:
    """1 for the right sum, less a tenth for each ten that it is away, and 0 for what is no number."""
    try:
        away = abs(int(response) - int(truth))
    except ValueError:
        return Reward(0.0, {"is_number": 0.0})
    return Reward(max(0.0, 1.0 - away / 100), {"is_number": 1.0})
