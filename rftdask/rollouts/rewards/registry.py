"""The reward functions by name, and how to add one.

A reward function is pure; it gets the text of the response, the true answer, the task, and `reward_fn_args`:

    @reward("length_reward")
    def length_reward(response: str, truth: str, task: Task, target: int = 100) -> float:
        return -abs(len(response) - target) / target

It runs in a sandbox of its rollout (sandbox.py), unless it says in_process=True: then it must be fast, or say
in_thread=True, with which it runs beside the event loop and may be called by several threads at once.
What a response says is hostile input: reward functions never evaluate it as code and bound their work on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rftdask.config.plugins import check_call, find_part, register
from rftdask.config.schema.buffer import registered_rewards
from rftdask.data.task import Task
from rftdask.errors import UserError
from rftdask.rollouts.workflows.base import Response, Reward

RewardFn = Callable[..., float | Reward]
"""(response, truth, task, **reward_fn_args) -> float | Reward."""
_Reward = TypeVar("_Reward", bound=RewardFn)


def reward(
    name: str,
    *,
    in_process: bool | None = None,
    in_thread: bool = False,
    requires: Mapping[str, str] | None = None,
) -> Callable[[_Reward], _Reward]:
    """Decorator that gives a reward function a name; in_process, requires: as for workflows; in_thread: as above.

    Raises: ValueError: the name is taken by another function.
    """

    def decorate(function: _Reward) -> _Reward:
        register("reward function", registered_rewards(), name, function, in_process=in_process, requires=requires)
        if in_thread:
            function.in_thread = True  # type: ignore[attr-defined]
        return function

    return decorate


def get_reward(name: str) -> RewardFn:
    """The reward function called `name`, or at the dotted path `name`. Raises: UserError: there is none, or it does not
    take (response, truth, task).
    """
    function = _find_reward(name)
    if not callable(function):
        raise UserError(f"reward function {name!r} is a {type(function).__name__}, not a function")
    check_call("reward function", name, function, "response", "truth", "task")
    return function


def compute_reward(
    task: Task, response: Response | str, default: str, defaults: Mapping[str, Any] | None = None
) -> Reward:
    """The reward of `response` by the task's reward function, or by the one called `default` if the task names none.
    `defaults` are arguments for that one, where `reward_fn_args` does not give them.

    Raises: ValueError: the function wants the number of tokens, and `response` is text alone; what it raises itself.
    """
    return _compute(_find_reward(task.reward_fn or default), task, response, default, defaults)


def _find_reward(name: str) -> RewardFn:
    # Not checked again for each of thousands of rollouts, whose run has checked it.
    function: RewardFn = find_part("reward function", name, registered_rewards())
    return function


def _compute(
    function: RewardFn, task: Task, response: Response | str, default: str, defaults: Mapping[str, Any] | None
) -> Reward:
    name = task.reward_fn or default
    # Defaults are the workflow's for its own reward function; another function need not take them.
    arguments = {**(defaults or {}), **task.reward_fn_args} if name == default else dict(task.reward_fn_args)
    # Asked of the function: the length in tokens is known to the workflow alone, and few rewards want it.
    if getattr(function, "needs_num_tokens", False):
        if isinstance(response, str):
            raise ValueError(f"reward function {name} needs the response's tokens; give it the Response, not its text")
        arguments["num_tokens"] = len(response.tokens)
    text = response if isinstance(response, str) else response.text
    value = function(text, task.truth, task, **arguments)
    return value if isinstance(value, Reward) else Reward(value)


async def wait_for_reward(
    task: Task, response: Response | str, default: str, defaults: Mapping[str, Any] | None = None
) -> Reward:
    """`compute_reward`, in a thread where the function says `in_thread`."""
    function = _find_reward(task.reward_fn or default)
    if getattr(function, "in_thread", False):
        return await asyncio.to_thread(_compute, function, task, response, default, defaults)
    return _compute(function, task, response, default, defaults)
