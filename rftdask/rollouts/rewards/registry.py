"""Reward function registry.

A reward function is pure. It receives the response text, the true answer, the task, and `reward_fn_args`:

    @reward("length_reward")
    def length_reward(response: str, truth: str, task: Task, target: int = 100) -> float:
        return -abs(len(response) - target) / target

It may be `async def`. It runs in the sandbox of its rollout unless it is declared in_process=True; then it must be
fast, or declared in_thread=True, which runs it in a thread, possibly several at once. A response is untrusted input:
reward functions never evaluate it as code, and bound their work on it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rftdask.config.plugins import check_call, find_part, register
from rftdask.config.schema.buffer import registered_rewards
from rftdask.data.task import Task
from rftdask.errors import UserError
from rftdask.rollouts.workflows.base import Response, Reward

RewardFn = Callable[..., float | Reward | Awaitable[float | Reward]]
"""(response, truth, task, **reward_fn_args) -> float | Reward, or a coroutine that returns one."""
_Reward = TypeVar("_Reward", bound=RewardFn)


def reward(
    name: str, *, in_process: bool | None = None, in_thread: bool = False, requires: Mapping[str, str] | None = None
) -> Callable[[_Reward], _Reward]:
    """Decorator that registers a reward function. in_process, requires: see workflows; in_thread: see above.

    Raises: ValueError: another function has this name.
    """

    def decorate(function: _Reward) -> _Reward:
        register("reward function", registered_rewards(), name, function, in_process=in_process, requires=requires)
        if in_thread:
            function.in_thread = True  # type: ignore[attr-defined]
        return function

    return decorate


def get_reward(name: str) -> RewardFn:
    """Find a reward function by registered name or dotted path. Raises: UserError: it does not exist or fit."""
    function = _find_reward(name)
    if not callable(function):
        raise UserError(f"reward function {name!r} is a {type(function).__name__}, not a function")
    check_call("reward function", name, function, "response", "truth", "task")
    return function


def compute_reward(
    task: Task, response: Response | str, default: str, defaults: Mapping[str, Any] | None = None
) -> Reward:
    """Score `response` with the task's reward function, and block until the reward is known.

    Args: default: reward function of tasks that name none; defaults: default arguments of that function.
    Raises: ValueError: the function needs the number of tokens, but `response` is only text; its own errors.
    """
    value = _call_reward(task, response, default, defaults)
    if inspect.isawaitable(value):
        # On a loop of its own, because this thread may run one already.
        with ThreadPoolExecutor(1) as pool:
            value = pool.submit(asyncio.run, _wait_for(value)).result()
    return value if isinstance(value, Reward) else Reward(value)


async def wait_for_reward(
    task: Task, response: Response | str, default: str, defaults: Mapping[str, Any] | None = None
) -> Reward:
    """`compute_reward` without blocking: awaits an async function, and uses a thread if it is declared `in_thread`."""
    if getattr(_find_reward(task.reward_fn or default), "in_thread", False):
        value = await asyncio.to_thread(_call_reward, task, response, default, defaults)
    else:
        value = _call_reward(task, response, default, defaults)
    if inspect.isawaitable(value):
        value = await value
    return value if isinstance(value, Reward) else Reward(value)


async def _wait_for(value: Awaitable[Any]) -> Any:
    return await value


def _call_reward(task: Task, response: Response | str, default: str, defaults: Mapping[str, Any] | None) -> Any:
    # The value of the reward function, or its coroutine.
    name = task.reward_fn or default
    function = _find_reward(name)
    # `defaults` belong to the workflow's default function; another function may not accept them.
    arguments = {**(defaults or {}), **task.reward_fn_args} if name == default else dict(task.reward_fn_args)
    # Only the workflow knows the length in tokens, and few functions need it.
    if getattr(function, "needs_num_tokens", False):
        if isinstance(response, str):
            raise ValueError(f"reward function {name} needs the response's tokens; pass the Response, not its text")
        arguments["num_tokens"] = len(response.tokens)
    text = response if isinstance(response, str) else response.text
    return function(text, task.truth, task, **arguments)


def _find_reward(name: str) -> RewardFn:
    # Without get_reward()'s checks, which the run has made once.
    function: RewardFn = find_part("reward function", name, registered_rewards())
    return function
