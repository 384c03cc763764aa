"""The math reward of DAPO: +1 or -1, and a penalty that grows as a response nears its longest length.

Source: DAPO, arXiv:2503.14476, equation 13 (soft overlong punishment) and section 2.4.
"""

from __future__ import annotations

from rftdask.data.task import Task
from rftdask.rollouts.rewards.math_answer import extract_answer, same_answer
from rftdask.rollouts.rewards.registry import reward
from rftdask.rollouts.workflows.base import Reward


@reward("math_dapo_reward")
def math_dapo_reward(
    response: str,
    truth: str,
    task: Task,
    *,
    num_tokens: int,
    enable_overlong_penalty: bool = False,
    penalty_factor: float = 1.0,
    max_response_length: int = 0,
    cache_length: int = 0,
    **_of_the_workflow: object,
) -> Reward:
    """1 if the final answer equals the truth, else -1; with `enable_overlong_penalty` plus `overlong_penalty`.
    Metrics: accuracy, 1 or 0; format_score, the penalty.

    Args: num_tokens: of the response, given by the workflow; the others are `reward_fn_args`.
    Raises: ValueError: lengths that do not go together.
    """
    correct = same_answer(extract_answer(response), truth)
    penalty = 0.0
    if enable_overlong_penalty:
        penalty = overlong_penalty(num_tokens, max_response_length, cache_length, penalty_factor)
    return Reward((1.0 if correct else -1.0) + penalty, {"accuracy": float(correct), "format_score": penalty})


def overlong_penalty(num_tokens: int, max_length: int, cache_length: int, factor: float) -> float:
    """0 up to max_length - cache_length tokens, then falling in a line to -factor at max_length, and -factor beyond."""
    if not 0 < cache_length < max_length:
        raise ValueError(
            f"math_dapo_reward: 0 < cache_length {cache_length} < max_response_length {max_length} must hold "
            "(reward_fn_args, with enable_overlong_penalty)"
        )
    over = num_tokens - (max_length - cache_length)
    return -factor * min(max(over / cache_length, 0.0), 1.0)


math_dapo_reward.needs_num_tokens = True  # type: ignore[attr-defined]
