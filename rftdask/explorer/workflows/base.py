"""Workflow: the plug-in point users write most. One rollout of one task with the policy, ending in a reward.

A workflow is an async function, or an object with an async `run`:

    @workflow("my_workflow")
    async def my_workflow(task: Task, model: PolicyModel) -> float:
        answer = await model.chat(task.messages)
        return 1.0 if task.truth in answer.text else 0.0

Every call of `model.chat` or `model.generate` is recorded with its exact tokens and becomes one experience that gets
the workflow's reward. A workflow with an environment tells what each call saw and earned, too: see `Reward.steps` and,
for a whole one, `grid.py`. A workflow knows nothing of engines, storage, groups or retries; rollouts of a group run
side by side as coroutines, so it must not block.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rftdask.buffer.task import Task
from rftdask.explorer.engines.base import SamplingParams


@dataclass(frozen=True)
class Response:
    """One answer of the policy, with the tokens it is made of."""

    text: str
    """Decoded response, special tokens left out."""
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    """"stop" or "length" (the token limit was met)."""


@dataclass(frozen=True)
class Step:
    """What a workflow with an environment tells of one call of the policy."""

    state: str | None = None
    """The environment's state before the call, by any name under which equal states are equal; None: not told."""
    reward: float | None = None
    """What the call itself earned; None: not told."""


@dataclass(frozen=True)
class Reward:
    """What a rollout earned. `metrics` are reported beside the reward (for example {"accuracy": 1.0}).

    Example, of an environment: Reward(1.0, steps=(Step("at 0,0", 0.0), Step("at 0,1", 1.0)))
    """

    value: float
    """Of the whole rollout. Whatever it has beyond the sum of the steps' rewards counts for the last one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    steps: Sequence[Step] = ()
    """One for each call of the policy, in the order of the calls, or none: algorithms that compare steps need them."""


class PolicyModel(Protocol):
    """The policy as a workflow sees it; one handle per rollout."""

    async def chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Response:
        """Render `messages` by the chat template and let the policy answer. `sampling` overrides SamplingParams."""

    async def generate(self, prompt: str, **sampling: Any) -> Response:
        """Let the policy continue the plain text `prompt`."""


WorkflowFn = Callable[[Task, PolicyModel], Awaitable[float | Reward]]

__all__ = ["PolicyModel", "Response", "Reward", "SamplingParams", "Step", "Task", "WorkflowFn"]
