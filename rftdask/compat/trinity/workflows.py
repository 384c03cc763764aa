"""Workflows: base classes of user code, and their adapter.

In Trinity-RFT a workflow may make all rollouts of a task. Here it is called once for each rollout (`set_repeat_times(1,
0)`, n = 1). Training uses the recorded calls of the policy; the returned experiences carry the reward.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from rftdask.compat.trinity.experience import Experience
from rftdask.compat.trinity.model import ModelWrapper
from rftdask.compat.trinity.registry import Registry
from rftdask.compat.trinity.rewards import MathRewardFn, RewardFn, reward_class
from rftdask.compat.trinity.task import Task, read_task
from rftdask.config.schema.buffer import registered_workflows
from rftdask.data.task import Task as OurTask
from rftdask.rollouts.workflows.base import PolicyModel, Reward, Step

WORKFLOWS = Registry("workflows", registered_workflows)

MATH_SYSTEM_PROMPT = (
    "You are a helpful assistant that solves math problems. Think step by step within <think> </think>, then give the "
    "final answer within <answer> </answer>."
)


class Workflow:
    """Base of workflows."""

    can_reset: ClassVar[bool] = False
    can_repeat: ClassVar[bool] = False
    is_async: ClassVar[bool] = False

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        self.task = task
        self.model = model
        self.auxiliary_model_wrappers = auxiliary_models
        self.auxiliary_models: list[Any] | None = None
        if auxiliary_models:
            is_async = type(self).is_async
            self.auxiliary_models = [
                other.get_openai_async_client() if is_async else other.get_openai_client() for other in auxiliary_models
            ]
        self.repeat_times = 1
        self.run_id_base = 0
        self.logger = logging.getLogger(type(self).__module__)

    @property
    def resettable(self) -> bool:
        """See can_reset."""
        return type(self).can_reset

    @property
    def repeatable(self) -> bool:
        """See can_repeat."""
        return type(self).can_repeat

    @property
    def asynchronous(self) -> bool:
        """See is_async."""
        return type(self).is_async

    def reset(self, task: Task) -> None:
        """Take another task. Not called: each rollout has a new instance."""
        raise NotImplementedError

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Set the number of rollouts."""
        self.repeat_times = repeat_times
        self.run_id_base = run_id_base

    def run(self) -> list[Experience]:
        """Run the rollouts."""
        raise NotImplementedError

    async def run_async(self) -> list[Experience]:
        """Run the rollouts."""
        raise NotImplementedError

    @classmethod
    def __rftdask_part__(cls) -> Callable[[OurTask, PolicyModel], Awaitable[Reward]]:
        async def run(task: OurTask, model: PolicyModel) -> Reward:
            return await run_workflow(cls, task, model)

        run.__module__, run.__qualname__ = cls.__module__, cls.__qualname__
        return run


async def run_workflow(cls: type[Workflow], task: OurTask, model: PolicyModel) -> Reward:
    """Run one rollout of `task` by a workflow of Trinity-RFT. Raises: its exceptions; ValueError: see `reward_of`."""
    wait = model.blocking().wait
    policy = ModelWrapper(model, wait, "policy")
    names: Sequence[str] = getattr(model, "auxiliary_names", ())
    auxiliary = [ModelWrapper(model.auxiliary(name), wait, name) for name in names]

    def make() -> Workflow:
        read = read_task(task, cls, reward_class(task))
        workflow: Workflow = read.to_workflow(policy, auxiliary)
        if workflow.repeatable:
            workflow.set_repeat_times(1, 0)
        return workflow

    if cls.is_async:
        rows = await make().run_async()
    else:
        # Created in the thread as well, because a constructor may call the model.
        rows = await asyncio.to_thread(lambda: make().run())
    return reward_of(rows, policy.answers, cls.__qualname__)


def reward_of(rows: Sequence[Experience] | None, answers: Sequence[Experience], name: str) -> Reward:
    """Return the reward of a rollout whose workflow returned `rows`, and whose policy gave `answers`.

    A row is one of the answers, or the whole conversation. If rows differ, the last one's reward counts. `info` of rows
    that are answers may have an env_state_hash and a step_reward.
    Raises: ValueError: there are no rows; a row has no reward; or answers are missing, although every call is trained.
    """
    if not rows:
        raise ValueError(f"{name} returned no experiences")
    if any(row.reward is None for row in rows):
        raise ValueError(f"{name} returned an experience without a reward")
    left = list(range(len(answers)))
    of_row: list[int | None] = []
    for row in rows:
        same = (i for i in left if answers[i] is row or answers[i].tokens.tolist() == row.tokens.tolist())
        found = None if row.is_conversation else next(same, None)
        of_row.append(found)
        if found is not None:
            left.remove(found)
    is_whole = None in of_row
    if left and not is_whole:
        raise ValueError(
            f"{name} returned {len(rows)} of {len(answers)} answers of the policy; here every call is trained, so "
            "return all of them, or the conversation as one experience (process_messages_to_experience)"
        )
    metrics: dict[str, list[float]] = {}
    for row in rows:
        for key, value in (row.metrics or {}).items():
            metrics.setdefault(key, []).append(float(value))
    info_of = {i: row.info or {} for i, row in zip(of_row, rows, strict=True) if i is not None}
    steps: tuple[Step, ...] = ()
    if not is_whole and any("env_state_hash" in info or "step_reward" in info for info in info_of.values()):
        states = [info_of[i].get("env_state_hash") for i in range(len(answers))]
        steps = tuple(
            Step(None if state is None else str(state), info_of[i].get("step_reward")) for i, state in enumerate(states)
        )
    means = {key: sum(values) / len(values) for key, values in metrics.items()}
    return Reward(float(rows[-1].reward or 0.0), means, steps)


class MultiTurnWorkflow(Workflow):
    """Base of workflows whose conversation is one experience."""

    def process_messages_to_experience(
        self, messages: Any, reward: float, info: dict[str, Any] | None = None, truncate_status: str | None = None
    ) -> Experience:
        """Return the conversation so far with its reward; 0 if its last answer was truncated."""
        converted = self.model.convert_messages_to_experience(messages)
        return self._with_reward(converted, reward, info or {}, truncate_status)

    async def process_messages_to_experience_async(
        self, messages: Any, reward: float, info: dict[str, Any] | None = None, truncate_status: str | None = None
    ) -> Experience:
        """See process_messages_to_experience."""
        converted = await self.model.convert_messages_to_experience_async(messages)
        return self._with_reward(converted, reward, info or {}, truncate_status)

    def _with_reward(
        self, converted: Experience, reward: float, info: dict[str, Any], truncate_status: str | None
    ) -> Experience:
        status = converted.truncate_status or truncate_status
        converted.reward = 0.0 if status == "response_truncated" else reward
        converted.truncate_status = status
        converted.info = info
        converted.metrics = {key: float(value) for key, value in info.items() if isinstance(value, int | float)}
        return converted


class BaseSimpleWorkflow(Workflow):
    """Base of workflows with one question."""

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        self.reset(task)
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)

    def reset(self, task: Task) -> None:
        """Take the task's prompts and reward. Raises: ValueError: the taskset has no reward function."""
        self.task = task
        self.format_args = task.format_args
        self.system_prompt = task.format_args.system_prompt
        self.reply_prefix = task.format_args.reply_prefix
        self.reward_fn_args = task.reward_fn_args
        self.raw_task = task.raw_task
        self.task_desc = task.task_desc
        self.truth = task.truth
        if not (isinstance(task.reward_fn, type) and issubclass(task.reward_fn, RewardFn)):
            raise ValueError("`reward_fn` must be a subclass of `RewardFn`; give default_reward_fn_type")
        self.reward_fn = task.reward_fn(**self.reward_fn_args)

    @property
    def rollout_args(self) -> dict[str, Any]:
        """Arguments of `model.chat`."""
        return asdict(self.task.rollout_args)

    def format_messages(self) -> list[dict[str, Any]]:
        """Return the chat to answer."""
        messages = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        messages.append({"role": "user", "content": self.task_desc})
        return messages + ([{"role": "assistant", "content": self.reply_prefix}] if self.reply_prefix else [])

    def _rewarded(self, responses: list[Experience]) -> list[Experience]:
        for number, response in enumerate(responses):
            parts = self.reward_fn(response=response.response_text, truth=self.truth)
            response.metrics.update(parts)
            response.reward = sum(parts.values())
            response.eid.run = number + self.run_id_base
        return responses


class SimpleWorkflow(BaseSimpleWorkflow):
    """One question, one answer."""

    can_reset = True
    can_repeat = True

    def run(self) -> list[Experience]:
        """Return the answer with its reward."""
        return self._rewarded(self.model.chat(self.format_messages(), **self.rollout_args))


class AsyncSimpleWorkflow(BaseSimpleWorkflow):
    """Asynchronous SimpleWorkflow."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        """Return the answer with its reward."""
        return self._rewarded(await self.model.chat_async(self.format_messages(), **self.rollout_args))


class MathWorkflow(SimpleWorkflow):
    """SimpleWorkflow with a system prompt for math, if the task has none."""

    def reset(self, task: Task) -> None:
        """See BaseSimpleWorkflow; the default reward is math_reward."""
        task.reward_fn = task.reward_fn or MathRewardFn
        if task.reward_fn is MathRewardFn and task.format_args.system_prompt is None:
            task.format_args.system_prompt = MATH_SYSTEM_PROMPT
        super().reset(task)


class AsyncMathWorkflow(AsyncSimpleWorkflow, MathWorkflow):
    """Asynchronous MathWorkflow."""


class _StepWorkflow(Workflow):
    """A loop of steps. `step` calls the model and returns whether to continue."""

    def __init__(
        self,
        *,
        task: Task,
        model: ModelWrapper,
        auxiliary_models: list[ModelWrapper] | None = None,
        use_openai_client: bool = True,
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        client = model.get_openai_async_client if type(self).is_async else model.get_openai_client
        self.client = client() if use_openai_client else None

    @property
    def max_step_num(self) -> int:
        """Maximum number of steps."""
        raise NotImplementedError

    def _taken(self, step: int) -> list[Experience]:
        rows = self.model.extract_experience_from_history()
        for row in rows:
            row.eid.step = step
        return rows

    def step(self, step_num: int) -> bool:
        """Call the model. Returns True to continue."""
        raise NotImplementedError

    async def step_async(self, step_num: int) -> bool:
        """Call the model. Returns True to continue."""
        raise NotImplementedError


class StepWiseRewardWorkflow(_StepWorkflow):
    """Base of workflows with a reward for each step."""

    def reward(self, exps: list[Experience], step_num: int) -> float:
        """Return the reward of a step."""
        raise NotImplementedError

    def run(self) -> list[Experience]:
        """Run all steps."""
        rows: list[Experience] = []
        for number in range(self.max_step_num):
            goes_on = self.step(step_num=number)
            taken = self._taken(number)
            reward = self.reward(taken, step_num=number)
            for row in taken:
                row.reward = reward
            rows += taken
            if not goes_on:
                break
        return rows


class AsyncStepWiseRewardWorkflow(StepWiseRewardWorkflow):
    """Asynchronous StepWiseRewardWorkflow."""

    is_async = True

    async def reward_async(self, exps: list[Experience], step_num: int) -> float:
        """Return the reward of a step."""
        raise NotImplementedError

    async def run_async(self) -> list[Experience]:
        """Run all steps."""
        rows: list[Experience] = []
        for number in range(self.max_step_num):
            goes_on = await self.step_async(step_num=number)
            taken = self._taken(number)
            reward = await self.reward_async(taken, step_num=number)
            for row in taken:
                row.reward = reward
            rows += taken
            if not goes_on:
                break
        return rows


class RewardPropagationWorkflow(_StepWorkflow):
    """Base of workflows whose steps share the reward of the whole."""

    def reward(self, exps: list[Experience]) -> float:
        """Return the reward of the whole."""
        raise NotImplementedError

    def run(self) -> list[Experience]:
        """Run all steps."""
        rows: list[Experience] = []
        number = 0
        for number in range(self.max_step_num):
            goes_on = self.step(step_num=number)
            rows += self._taken(number)
            if not goes_on:
                break
        return _propagated(rows, self.reward(rows), number)


class AsyncRewardPropagationWorkflow(RewardPropagationWorkflow):
    """Asynchronous RewardPropagationWorkflow."""

    is_async = True

    async def reward_async(self, exps: list[Experience]) -> float:
        """Return the reward of the whole."""
        raise NotImplementedError

    async def run_async(self) -> list[Experience]:
        """Run all steps."""
        rows: list[Experience] = []
        number = 0
        for number in range(self.max_step_num):
            goes_on = await self.step_async(step_num=number)
            rows += self._taken(number)
            if not goes_on:
                break
        return _propagated(rows, await self.reward_async(rows), number)


def _propagated(rows: list[Experience], reward: float, last_step: int) -> list[Experience]:
    for row in rows:
        row.reward = reward
        row.metrics["actual_env_steps"] = last_step + 1
    return rows


WORKFLOWS.modules |= {
    "simple_workflow": SimpleWorkflow,
    "async_simple_workflow": AsyncSimpleWorkflow,
    "math_workflow": MathWorkflow,
    "async_math_workflow": AsyncMathWorkflow,
}
