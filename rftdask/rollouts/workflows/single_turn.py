"""Workflows with one question and one answer."""

from __future__ import annotations

import asyncio
from typing import Any

from rftdask.data.task import Task
from rftdask.rollouts.rewards.math_answer import is_right
from rftdask.rollouts.rewards.registry import wait_for_reward
from rftdask.rollouts.workflows.base import PolicyModel, Response, Reward
from rftdask.rollouts.workflows.registry import workflow

MATH_SYSTEM_PROMPT = (
    "You are a helpful assistant that solves math problems. Think step by step, then give the final answer within "
    "\\boxed{}."
)
BOXED_SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
THINKING_SYSTEM_PROMPT = (
    "You are a helpful assistant that solves math problems. Write your reasoning as <think>...</think> first, then "
    "give the final answer within \\boxed{}."
)


@workflow("async_simple_mm_workflow")
@workflow("simple_mm_workflow")
@workflow("async_simple_workflow")
@workflow("simple_workflow")
async def simple_workflow(task: Task, model: PolicyModel) -> Reward:
    """Ask once, including the task's images. Scored by the task's reward function, by default exact_reward."""
    response = await ask(task, model)
    return await _rewarded(task, model, response, "exact_reward")


@workflow("async_math_workflow")
@workflow("math_workflow")
async def math_workflow(task: Task, model: PolicyModel) -> Reward:
    """Ask once, with a system prompt for math unless the task has one. Default reward: math_reward."""
    response = await ask(task, model, MATH_SYSTEM_PROMPT)
    return await _rewarded(task, model, response, "math_reward")


@workflow("async_math_boxed_workflow")
@workflow("math_boxed_workflow")
async def math_boxed_workflow(task: Task, model: PolicyModel) -> Reward:
    r"""Ask once for an answer in \boxed{}. Default reward: math_boxed_reward.

    `workflow_args`: with_think (False): request <think>...</think>; format_score_coef (0.1): penalty without it.
    """
    options: dict[str, Any] = {"with_think": False, "format_score_coef": 0.1, **task.workflow_args}
    response = await ask(task, model, THINKING_SYSTEM_PROMPT if options["with_think"] else BOXED_SYSTEM_PROMPT)
    return await _rewarded(task, model, response, "math_boxed_reward", options)


@workflow("async_math_eval_workflow")
@workflow("math_eval_workflow")
async def math_eval_workflow(task: Task, model: PolicyModel) -> Reward:
    """Ask once, as math_boxed_workflow without options, for evaluations. The reward is 1 for a correct answer, whatever
    the task's reward function. Metric: accuracy.
    """
    response = await ask(task, model, BOXED_SYSTEM_PROMPT)
    correct = float(await asyncio.to_thread(is_right, response.text, task.truth))
    return Reward(correct, {"accuracy": correct})


@workflow("on_policy_distill_workflow")
async def on_policy_distill_workflow(task: Task, model: PolicyModel) -> Reward:
    """Ask once with reward 0: training uses the teacher's logprobs, which the trainer computes."""
    await ask(task, model)
    return Reward(0.0)


@workflow("on_policy_distill_math_workflow")
async def on_policy_distill_math_workflow(task: Task, model: PolicyModel) -> Reward:
    """Ask once with a system prompt for math and reward 0. Metric: accuracy of the student."""
    response = await ask(task, model, MATH_SYSTEM_PROMPT)
    return Reward(0.0, {"accuracy": float(await asyncio.to_thread(is_right, response.text, task.truth))})


async def ask(task: Task, model: PolicyModel, system_prompt: str = "") -> Response:
    """Ask the task's chat with its tools, and `system_prompt` unless it has one, or else continue its plain text."""
    if not task.messages:
        return await model.generate(task.prompt)
    options = {"tools": list(task.tools)} if task.tools else {}
    if system_prompt and task.messages[0]["role"] != "system":
        return await model.chat([{"role": "system", "content": system_prompt}, *task.messages], **options)
    return await model.chat(task.messages, **options)


async def _rewarded(
    task: Task, model: PolicyModel, response: Response, default: str, defaults: dict[str, Any] | None = None
) -> Reward:
    with model.timer("reward"):
        return await wait_for_reward(task, response, default, defaults)
