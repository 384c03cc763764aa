"""Agents of AgentScope 1.0: a ReAct agent, and workflow functions written for its tuner.

Agents call the policy through the attempt's OpenAI client, so every call is recorded with its tokens. They run in
sandboxes: an agent may run code that the policy wrote, which a sandbox limits but does not isolate (docs/security.md).
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from rftdask.config.plugins import find_part
from rftdask.data.task import Task
from rftdask.rollouts.rewards.registry import wait_for_reward
from rftdask.rollouts.workflows.base import AuxiliaryModel, PolicyModel, Reward
from rftdask.rollouts.workflows.episode import question_of
from rftdask.rollouts.workflows.registry import workflow

_NEEDS = dict.fromkeys(("greenlet", "mcp", "openai"), "agentscope")
"""Modules that AgentScope imports, for sandboxes to preload. AgentScope itself cannot be, see _module."""
REACT_PROMPT = (
    "You are an agent that solves problems with tools. Work step by step, and put the final answer within \\boxed{}."
)


class FinalResult(BaseModel):
    """Structured result of the agent."""

    result: str = Field(description="The solution, with the final answer in boxed form, such as \\boxed{42}")


@workflow("as_react_workflow", in_process=False, requires=_NEEDS)
@workflow("agentscope_react_workflow", in_process=False, requires=_NEEDS)
async def agentscope_react_workflow(task: Task, model: PolicyModel) -> Reward:
    """A ReAct agent works on the task and ends with a `result`, which is scored by the task's reward function (default:
    math_boxed_reward). Metrics: react_memory_length, number of messages in the agent's memory.

    `workflow_args`: system_prompt, max_iters (10).
    """
    return await _react(task, model, ())


@workflow("agentscope_react_math_workflow", in_process=False, requires=_NEEDS)
async def agentscope_react_math_workflow(task: Task, model: PolicyModel) -> Reward:
    """agentscope_react_workflow with a tool that runs Python code written by the policy."""
    return await _react(task, model, (_module("tool").execute_python_code,))


async def _react(task: Task, model: PolicyModel, tools: tuple[Any, ...]) -> Reward:
    options = {"system_prompt": REACT_PROMPT, "max_iters": 10, **task.workflow_args}
    agents, tool = _module("agent"), _module("tool")
    toolkit = tool.Toolkit()
    for function in tools:
        toolkit.register_tool_function(function)
    agent = agents.ReActAgent(
        name="agent",
        sys_prompt=options["system_prompt"],
        model=chat_model(model, "policy"),
        formatter=_module("formatter").OpenAIChatFormatter(),
        toolkit=toolkit,
        memory=_module("memory").InMemoryMemory(),
        max_iters=options["max_iters"],
    )
    agent.set_console_output_enabled(False)
    message = _module("message").Msg("user", question_of(task), role="user")
    reply = await agent.reply(message, structured_model=FinalResult)
    result = reply.metadata.get("result") if isinstance(reply.metadata, Mapping) else None
    # An agent that reached max_iters has only a text.
    answer = str(result) if result is not None else str(reply.get_text_content() or "")
    reward = await wait_for_reward(task, answer, "math_boxed_reward")
    return Reward(reward.value, {**reward.metrics, "react_memory_length": float(await agent.memory.size())})


@workflow("agentscope_workflow_adapter_v1", in_process=False, requires=_NEEDS)
async def agentscope_workflow_adapter_v1(task: Task, model: PolicyModel) -> Reward:
    """A workflow function of AgentScope's tuner, `async (task, model[, auxiliary_models, logger]) -> WorkflowOutput`.

    `workflow_args`: workflow_func, and optionally judge_func, which gives the reward: dotted paths of functions. They
    receive the row as task, and AgentScope models by their names in explorer.auxiliary_models.

    Raises: ValueError: workflow_func is missing, or neither function gives a reward.
    """
    name, judge_name = _workflow_func(task), task.workflow_args.get("judge_func")
    run, judge = find_part("function", name, {}), find_part("function", judge_name, {}) if judge_name else None
    names = getattr(model, "auxiliary_names", ())
    offered = {
        "auxiliary_models": {name: chat_model(model.auxiliary(name), name) for name in names},
        "logger": logging.getLogger("rftdask.rollouts"),
    }
    row = dict(task.row)
    output = await run(task=row, model=chat_model(model, "policy"), **_taken(run, offered))
    metrics, reward = dict(output.metrics or {}), output.reward
    if judge is not None:
        judged = await judge(task=row, response=output.response, **_taken(judge, offered))
        reward, metrics = judged.reward, {**metrics, **(judged.metrics or {})}
    if reward is None:
        raise ValueError(f"{name} gave no reward, and workflow_args has no judge_func")
    return Reward(reward, metrics)


@workflow("agentscope_workflow_adapter", in_process=False, requires=_NEEDS)
async def agentscope_workflow_adapter(task: Task, model: PolicyModel) -> Reward:
    """The older form, `async (task, model) -> float`; `workflow_args.workflow_func` is its dotted path."""
    run = find_part("function", _workflow_func(task), {})
    return Reward(await run(dict(task.row), chat_model(model, "policy")))


def _workflow_func(task: Task) -> str:
    name: str = task.workflow_args.get("workflow_func", "")
    if not name:
        raise ValueError("set workflow_args.workflow_func to the dotted path of an async function (task, model)")
    return name


def chat_model(model: AuxiliaryModel, name: str) -> Any:
    """AgentScope's chat model for a model of the attempt. A required tool call is relaxed to an optional one, because
    sampling is not guided; AgentScope repeats the request if the answer has no call.
    """
    base: Any = _module("model").OpenAIChatModel

    class Model(base):  # type: ignore[misc]
        async def __call__(self, messages: Any, tools: Any = None, tool_choice: Any = None, **options: Any) -> Any:
            choice = None if tool_choice in ("required", "any") else tool_choice
            return await super().__call__(messages, tools=tools, tool_choice=choice, **options)

    instance = Model(model_name=name, api_key="none", stream=False)
    instance.client = model.openai_client()
    return instance


def _module(name: str) -> Any:
    """Import a module of AgentScope, which uses a function name that mcp 2 has changed."""
    http = importlib.import_module("mcp.client.streamable_http")
    if not hasattr(http, "streamablehttp_client"):
        setattr(http, "streamablehttp_client", http.streamable_http_client)  # noqa: B010 -- unknown to mypy
    return importlib.import_module(f"agentscope.{name}")


def _taken(function: Any, offered: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in offered.items() if name in parameters}
