"""Workflow: one rollout of one task with the policy, ending in a reward. The most common plug-in.

A workflow is an async function, or an object with an async `run`:

    @workflow("my_workflow")
    async def my_workflow(task: Task, model: PolicyModel) -> float:
        answer = await model.chat(task.messages)
        return 1.0 if task.truth in answer.text else 0.0

Every call of `model.chat` or `model.generate` is recorded with its exact tokens. Consecutive calls that continue each
other become one experience; all experiences get the workflow's reward. A workflow with an environment also reports the
state and reward of each call: see `Reward.steps` and the example `grid.py`. Plug-in workflows run in their own
processes, where they may block and may be plain functions. A workflow declared `in_process` must not block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rftdask.data.task import Task as Task  # here for plug-ins as well
from rftdask.engines.base import SamplingParams as SamplingParams


@dataclass(frozen=True)
class Response:
    text: str
    """Decoded response without special tokens."""
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    """"stop" or "length" (the token limit was reached)."""


@dataclass(frozen=True)
class Step:
    """Description of one call of the policy by a workflow with an environment."""

    state: str | None = None
    """Name of the environment's state before the call; equal states have equal names. None: unknown."""
    reward: float | None = None
    """Reward of this call; None: unknown."""


@dataclass(frozen=True)
class Reward:
    """Reward of a rollout, such as Reward(1.0, steps=(Step("at 0,0", 0.0), Step("at 0,1", 1.0)))."""

    value: float
    """Reward of the whole rollout. The difference to the sum of the steps' rewards is added to the last step."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Values logged with the reward, such as {"accuracy": 1.0}."""
    steps: Sequence[Step] = ()
    """One step per call of the policy, in order, or none. Algorithms that compare steps need them."""


class AuxiliaryModel(Protocol):
    """A frozen model besides the policy, such as a judge, reward model or opponent. Its answers are never trained."""

    @abstractmethod
    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Response:
        """Answer `messages`, rendered with this model's chat template."""

    @abstractmethod
    async def generate(self, prompt: str, **sampling: Any) -> Response:
        """Continue the plain text `prompt`."""

    @abstractmethod
    async def logprobs(self, prompt: str, response: str) -> tuple[float, ...]:
        """Natural-log probability of each token of `response` after `prompt`, at temperature 1."""

    def openai_client(self) -> Any:
        """Return an `openai.AsyncOpenAI` that calls this model; its base_url and api_key work for other programs."""


class PolicyModel(AuxiliaryModel, Protocol):
    """The policy in one attempt at a rollout. `chat` and `generate` are recorded."""

    @property
    def state(self) -> Mapping[str, Any]:
        """Values passed to `set_state` in this attempt."""

    def set_state(self, **values: Any) -> None:
        """Record the progress of the rollout for error reports, as plain values: set_state(turn=3)."""

    def timer(self, name: str) -> AbstractContextManager[None]:
        """Measure the time of the block as `name`, "tool" or "reward": with model.timer("tool"): ..."""

    def auxiliary(self, name: str = "") -> AuxiliaryModel:
        """Return the auxiliary model `name`; "": the only one. Raises: ValueError: it does not exist."""

    def blocking(self) -> Any:
        """This handle for blocking code in another thread than the event loop's: chat, generate, logprobs and
        openai_client (an `openai.OpenAI`) without await."""


class PromptTooLongError(ValueError):
    """A prompt exceeds `model.max_prompt_tokens`, and truncation is disabled."""


WorkflowFn = Callable[[Task, PolicyModel], Awaitable["float | Reward | Sequence[Step]"]]
"""(task, model) -> reward. A list of steps means one per call of the policy, with their sum as the rollout's reward."""
GroupReward = Callable[[Task, Sequence[str], PolicyModel], Awaitable[Sequence[Reward]]]
"""(task, texts of the successful rollouts, model) -> their rewards in the same order, which replace their own; metrics
are added. The policy cannot be called, because the call would belong to no rollout. An error fails all of the rollouts.
Runs on the event loop, so it must not block."""


def as_reward(result: Any) -> Reward:
    """Convert a workflow's result into a Reward, without checking that its values are numbers."""
    if isinstance(result, Reward):
        return result
    if isinstance(result, list | tuple) and result and all(isinstance(step, Step) for step in result):
        return Reward(sum(step.reward or 0.0 for step in result), steps=tuple(result))
    return Reward(result)
