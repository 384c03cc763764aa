"""Agents of AgentScope 1.0: a ReAct agent, and workflow functions written for its tuner.

The agent asks the policy through OpenAI's client of the attempt, so every call is recorded with its tokens. They run in
sandboxes: an agent may run code that the policy wrote, which a sandbox bounds and does not confine (docs/security.md).
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
from rftdask.rollouts.rewards.registry import compute_reward
from rftdask.rollouts.workflows.base import AuxiliaryModel, PolicyModel, Reward
from rftdask.rollouts.workflows.registry import workflow

_NEEDS = dict.fromkeys(("greenlet", "mcp", "openai"), "agentscope")
"""What AgentScope itself imports, which sandboxes import ahead; it is not: see _part."""
REACT_PROMPT = (
    "You are an agent that solves problems with tools. Work step by step, and put the final answer within \\boxed{}."
)


class FinalResult(BaseModel):
    """What the agent is to end with."""

    result: str = Field(description="The solution, with the final answer in boxed form, such as \\boxed{42}")


@workflow("as_react_workflow", in_process=False, requires=_NEEDS)
@workflow("agentscope_react_workflow", in_process=False, requires=_NEEDS)
async def agentscope_react_workflow(task: Task, model: PolicyModel) -> Reward:
    """A ReAct agent works on the task and ends with a `result`, which the task's reward function scores;
    math_boxed_reward by default. Metrics: react_memory_length, the messages that the agent keeps.

    `workflow_args`: system_prompt, max_iters (10).
    """
    return await _react(task, model, ())


@workflow("agentscope_react_math_workflow", in_process=False, requires=_NEEDS)
async def agentscope_react_math_workflow(task: Task, model: PolicyModel) -> Reward:
    """The same with a tool that runs Python code, which the policy writes."""
    return await _react(task, model, (_part("tool").execute_python_code,))


async def _react(task: Task, model: PolicyModel, tools: tuple[Any, ...]) -> Reward:
    options = {"system_prompt": REACT_PROMPT, "max_iters": 10, **task.workflow_args}
    agents, tool = _part("agent"), _part("tool")
    toolkit = tool.Toolkit()
    for each in tools:
        toolkit.register_tool_function(each)
    agent = agents.ReActAgent(
        name="agent",
        sys_prompt=options["system_prompt"],
        model=chat_model(model, "policy"),
        formatter=_part("formatter").OpenAIChatFormatter(),
        toolkit=toolkit,
        memory=_part("memory").InMemoryMemory(),
        max_iters=options["max_iters"],
    )
    agent.set_console_output_enabled(False)
    message = _part("message").Msg("user", _question(task), role="user")
    reply = await agent.reply(message, structured_model=FinalResult)
    said = reply.metadata.get("result") if isinstance(reply.metadata, Mapping) else None
    # An agent that met max_iters has said something, too.
    answer = str(said) if said is not None else str(reply.get_text_content() or "")
    reward = compute_reward(task, answer, "math_boxed_reward")
    return Reward(reward.value, {**reward.metrics, "react_memory_length": float(await agent.memory.size())})


@workflow("agentscope_workflow_adapter_v1", in_process=False, requires=_NEEDS)
async def agentscope_workflow_adapter_v1(task: Task, model: PolicyModel) -> Reward:
    """A workflow function of AgentScope's tuner, `async (task, model[, auxiliary_models, logger]) -> WorkflowOutput`.

    `workflow_args`: workflow_func, and judge_func where that gives the reward: dotted paths of functions. The task
    that they get is the row; models are AgentScope's, named as in explorer.auxiliary_models.

    Raises: ValueError: no workflow_func, or nobody gives a reward.
    """
    name, judge_name = (task.workflow_args.get(key) for key in ("workflow_func", "judge_func"))
    if not name:
        raise ValueError("workflow_args.workflow_func is missing: the dotted path of an async function (task, model)")
    run, judge = find_part("function", name, {}), find_part("function", judge_name, {}) if judge_name else None
    names = getattr(model, "auxiliary_names", ())
    offered = {
        "auxiliary_models": {each: chat_model(model.auxiliary(each), each) for each in names},
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
    name = task.workflow_args.get("workflow_func")
    if not name:
        raise ValueError("workflow_args.workflow_func is missing: the dotted path of an async function (task, model)")
    return Reward(await find_part("function", name, {})(dict(task.row), chat_model(model, "policy")))


def chat_model(model: AuxiliaryModel, name: str) -> Any:
    """AgentScope's chat model over a model of the attempt. Where the agent insists on a call of a tool it is asked as
    if it did not, since nothing guides what is sampled: AgentScope asks again where there is no call.
    """
    base: Any = _part("model").OpenAIChatModel

    class Model(base):  # type: ignore[misc]
        async def __call__(self, messages: Any, tools: Any = None, tool_choice: Any = None, **options: Any) -> Any:
            choice = None if tool_choice in ("required", "any") else tool_choice
            return await super().__call__(messages, tools=tools, tool_choice=choice, **options)

    made = Model(model_name=name, api_key="none", stream=False)
    made.client = model.openai_client()
    return made


def _part(name: str) -> Any:
    """A module of AgentScope. It imports a name of the package mcp by which that is called no more from mcp 2 on."""
    http = importlib.import_module("mcp.client.streamable_http")
    if not hasattr(http, "streamablehttp_client"):
        setattr(http, "streamablehttp_client", http.streamable_http_client)  # noqa: B010 -- mypy knows no such name
    return importlib.import_module(f"agentscope.{name}")


def _taken(function: Any, offered: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in offered.items() if name in parameters}


def _question(task: Task) -> str:
    return str(task.messages[-1]["content"]) if task.messages else task.prompt
