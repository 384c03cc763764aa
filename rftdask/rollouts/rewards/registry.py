"""The reward functions by name, and how to add one.

A reward function is pure; it gets the text of the response, the true answer, the task, and `reward_fn_args`:

    @reward("length_reward")
    def length_reward(response: str, truth: str, task: Task, target: int = 100) -> float:
        return -abs(len(response) - target) / target

It runs in a sandbox of its rollout (sandbox.py), unless it says in_process=True: then it must be fast.
What a response says is hostile input: reward functions never evaluate it as code and bound their work on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rftdask.config.plugins import find_part
from rftdask.data.task import Task
from rftdask.errors import UserError
from rftdask.rollouts.rewards.countdown import countdown_reward
from rftdask.rollouts.rewards.dapo import math_dapo_reward
from rftdask.rollouts.rewards.math_answer import math_boxed_reward, math_reward
from rftdask.rollouts.rewards.procedural import reasoning_gym_reward
from rftdask.rollouts.rewards.text import exact_reward, format_reward
from rftdask.rollouts.rewards.verified import accuracy_reward
from rftdask.rollouts.workflows.base import Response, Reward

RewardFn = Callable[..., float | Reward]
"""(response, truth, task, **reward_fn_args) -> float | Reward."""

_REWARDS: dict[str, RewardFn] = {
    "accuracy_reward": accuracy_reward,
    "countdown_reward": countdown_reward,
    "exact_reward": exact_reward,
    "format_reward": format_reward,
    "math_boxed_reward": math_boxed_reward,
    "math_dapo_reward": math_dapo_reward,
    "math_reward": math_reward,
    "reasoning_gym_reward": reasoning_gym_reward,
}


def reward(name: str, *, in_process: bool | None = None) -> Callable[[RewardFn], RewardFn]:
    """Decorator that gives a reward function a name; in_process: as for workflows.

    Raises: ValueError: the name is taken by another function.
    """

    def register(function: RewardFn) -> RewardFn:
        if _REWARDS.setdefault(name, function) is not function:
            raise ValueError(f"reward function {name!r} exists already; choose another name")
        if in_process is not None:
            function.in_process = in_process  # type: ignore[attr-defined]
        return function

    return register


def get_reward(name: str) -> RewardFn:
    """The reward function called `name`, or at the dotted path `name`. Raises: UserError: there is none."""
    function: RewardFn = find_part("reward function", name, _REWARDS)
    if not callable(function):
        raise UserError(f"reward function {name!r} is a {type(function).__name__}, not a function")
    return function


def compute_reward(
    task: Task, response: Response | str, default: str, defaults: Mapping[str, Any] | None = None
) -> Reward:
    """The reward of `response` by the task's reward function, or by the one called `default` if the task names none.
    `defaults` are arguments for that one, where `reward_fn_args` does not give them.

    Raises: ValueError: the function wants the number of tokens, and `response` is text alone; what it raises itself.
    """
    name = task.reward_fn or default
    arguments = {**(defaults or {}), **task.reward_fn_args} if name == default else dict(task.reward_fn_args)
    function = get_reward(name)
    if getattr(function, "needs_num_tokens", False):
        if isinstance(response, str):
            raise ValueError(f"reward function {name} needs the response's tokens; give it the Response, not its text")
        arguments["num_tokens"] = len(response.tokens)
    text = response if isinstance(response, str) else response.text
    value = function(text, task.truth, task, **arguments)
    return value if isinstance(value, Reward) else Reward(value)
