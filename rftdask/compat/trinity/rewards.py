"""Reward functions as classes: the user's, and by name those of this package."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from rftdask.compat.trinity.registry import Registry
from rftdask.config.plugins import parameters_of
from rftdask.config.schema.buffer import registered_rewards
from rftdask.data.task import Task
from rftdask.rollouts.rewards.registry import compute_reward, get_reward
from rftdask.rollouts.workflows.base import Reward

REWARD_FUNCTIONS = Registry("reward_functions", registered_rewards)


class RewardFn(ABC):
    """Base of reward functions, created with `reward_fn_args` and called with response and truth."""

    @abstractmethod
    def __init__(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def __call__(self, **kwargs: Any) -> dict[str, float]:
        """Return the parts of the reward by name; the reward is their sum."""

    @classmethod
    def __rftdask_part__(cls) -> Callable[..., Reward]:
        def reward(response: str, truth: str, task: Task, **arguments: Any) -> Reward:
            own = cls(**arguments)
            given = {"response": response, "truth": truth, "prompt": task.prompt, "task": task}
            parameters = inspect.signature(own.__call__).parameters
            if not any(item.kind is item.VAR_KEYWORD for item in parameters.values()):
                given = {name: value for name, value in given.items() if name in parameters}
            parts = own(**given)
            return Reward(float(sum(parts.values())), {name: float(value) for name, value in parts.items()})

        reward.__module__, reward.__qualname__ = cls.__module__, cls.__qualname__
        vars(reward)["reward_class"] = cls
        return reward


def reward_class(task: Task) -> Any:
    """Return the class of the task's reward function; for one of this package, a class that calls it. None: no reward
    function."""
    if not task.reward_fn:
        return None
    return getattr(get_reward(task.reward_fn), "reward_class", None) or _ours(task.reward_fn, task)


def _ours(name: str, task: Task | None = None) -> type[RewardFn]:
    class Ours(RewardFn):
        def __init__(self, **kwargs: Any) -> None:
            self._arguments = kwargs

        def __call__(self, response: str, truth: Any = None, **given: Any) -> dict[str, float]:  # type: ignore[override]
            like = task or Task("", 0, 0)
            asked = Task(like.taskset, like.epoch, like.index, like.prompt, like.messages, str(truth or ""))
            # In Trinity-RFT a call may also pass some of them, and arguments that only other rewards take.
            takes = parameters_of(get_reward(name), supplied=3) or {}
            own = {key: value for key, value in given.items() if key in takes}
            found = compute_reward(asked, response, name, {**self._arguments, **own})
            return {"reward": found.value}

    Ours.__name__ = Ours.__qualname__ = name
    return Ours


MathRewardFn = _ours("math_reward")
MathBoxedRewardFn = _ours("math_boxed_reward")
CountDownRewardFn = _ours("countdown_reward")
AccuracyReward = _ours("accuracy_reward")
FormatReward = _ours("format_reward")
REWARD_FUNCTIONS.modules |= {
    "math_reward": MathRewardFn,
    "math_boxed_reward": MathBoxedRewardFn,
    "countdown_reward": CountDownRewardFn,
    "accuracy_reward": AccuracyReward,
    "format_reward": FormatReward,
}
