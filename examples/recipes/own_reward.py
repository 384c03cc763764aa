"""A reward with parts: a close answer earns something, the right answer more."""

from rftdask.rollouts.workflows.base import Reward


def close(response: str, truth: str, task: object) -> Reward:
    """Return 1 for the right sum, minus 0.1 per ten of difference, and 0 if the response is not a number."""
    try:
        away = abs(int(response) - int(truth))
    except ValueError:
        return Reward(0.0, {"is_number": 0.0})
    return Reward(max(0.0, 1.0 - away / 100), {"is_number": 1.0})
