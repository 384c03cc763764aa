"""Workflow: the plug-in point users write most. One rollout of one task with the policy, ending in a reward.

A workflow is an async function, or an object with an async `run`:

    @workflow("my_workflow")
    async def my_workflow(task: Task, model: PolicyModel) -> float:
        answer = await model.chat(task.messages)
        return 1.0 if task.truth in answer.text else 0.0

Every call of `model.chat` or `model.generate` is recorded with its exact tokens. Calls of which each goes on where the
one before ended become one experience, another begins where one does not, and all get the workflow's reward. A workflow
with an environment tells what each call saw and earned, too: see `Reward.steps` and, for a whole one, `grid.py`. A
workflow knows nothing of engines, storage, groups or retries. Workflows from elsewhere run in processes of their own
(see sandbox.py), where they may block, and may be plain functions; a workflow that is declared `in_process` shares the
event loop with all others, so it must not block.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rftdask.data.task import Task
from rftdask.engines.base import SamplingParams


@dataclass(frozen=True)
class Response:
    """An answer of a model, with the tokens it is made of."""

    text: str
    """Decoded response, special tokens left out."""
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    """"stop" or "length" (the token limit was met)."""


@dataclass(frozen=True)
class Step:
    """One call of the policy as a workflow with an environment describes it."""

    state: str | None = None
    """The environment's state before the call, by any name under which equal states are equal; None: not told."""
    reward: float | None = None
    """Reward of the call itself; None: not told."""


@dataclass(frozen=True)
class Reward:
    """The reward of a rollout. `metrics` are reported beside the reward (for example {"accuracy": 1.0}).

    Example, of an environment: Reward(1.0, steps=(Step("at 0,0", 0.0), Step("at 0,1", 1.0)))
    """

    value: float
    """Reward of the whole rollout. Whatever it has beyond the sum of the steps' rewards counts for the last one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    steps: Sequence[Step] = ()
    """Steps, one for each call of the policy, in the order of the calls, or none: algorithms that compare steps need
    them."""


class AuxiliaryModel(Protocol):
    """A frozen model beside the policy: a judge, a reward model, an opponent. What it says is never trained."""

    async def chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Response:
        """Render `messages` by this model's chat template and let it answer."""

    async def generate(self, prompt: str, **sampling: Any) -> Response:
        """Let this model continue the plain text `prompt`."""

    async def logprobs(self, prompt: str, response: str) -> tuple[float, ...]:
        """Natural-log probability of each token of `response` after `prompt`, at temperature 1."""

    def openai_client(self) -> Any:
        """An `openai.AsyncOpenAI` that asks this model; its base_url and api_key are for other programs."""


class PolicyModel(AuxiliaryModel, Protocol):
    """The policy as a workflow sees it; one handle per attempt at a rollout. `chat` and `generate` are recorded."""

    @property
    def state(self) -> Mapping[str, Any]:
        """Values that `set_state` was given in this attempt."""

    def set_state(self, **values: Any) -> None:
        """Say where the rollout stands (plain values); a failure or timeout reports it: set_state(turn=3)."""

    def timer(self, name: str) -> AbstractContextManager[None]:
        """Count the time inside as that of `name`, "tool" or "reward": with model.timer("tool"): ..."""

    def auxiliary(self, name: str = "") -> AuxiliaryModel:
        """The auxiliary model of that name; without a name the only one. Raises: ValueError: there is none."""

    def blocking(self) -> Any:
        """This handle for code that blocks, in a thread other than the event loop's: chat, generate, logprobs and
        openai_client (an `openai.OpenAI`) without await."""


class PromptTooLongError(ValueError):
    """A prompt has more tokens than `model.max_prompt_tokens`, and prompts are not to be truncated."""


WorkflowFn = Callable[[Task, PolicyModel], Awaitable["float | Reward | Sequence[Step]"]]
"""A list of steps is what each call of the policy earned; their sum is the rollout's reward."""


GroupReward = Callable[[Task, Sequence[str], PolicyModel], Awaitable[Sequence[Reward]]]
"""(task, text of each rollout that ended well, models) -> the reward of each, in their order, in place of its own; its
metrics are added to the rollout's. The policy cannot be asked: a call of it would be nobody's rollout. What it raises
fails all of them. Runs on the event loop, so it must not block."""


def as_reward(result: Any) -> Reward:
    """Turn what a workflow returned into a Reward; whether it holds numbers is not looked at here."""
    if isinstance(result, Reward):
        return result
    if isinstance(result, list | tuple) and result and all(isinstance(step, Step) for step in result):
        # A step without a reward of its own adds nothing.
        return Reward(sum(step.reward or 0.0 for step in result), steps=tuple(result))
    return Reward(result)


__all__ = [
    "AuxiliaryModel",
    "GroupReward",
    "PolicyModel",
    "PromptTooLongError",
    "Response",
    "Reward",
    "SamplingParams",
    "Step",
    "Task",
    "WorkflowFn",
    "as_reward",
]
