"""Workflows with tool calls: a calculator (the arithmetic parser, not Python), and calls that are compared with the
correct ones but not executed.

Calls are text, <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Qwen and Hermes models write them, so any
chat template works. Tool results, including errors, are messages to the policy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rftdask.data.task import Task
from rftdask.rollouts.policy.answer_parsers import ToolCall, parse_tool_calls
from rftdask.rollouts.rewards.arithmetic import ExpressionError, evaluate
from rftdask.rollouts.rewards.registry import wait_for_reward
from rftdask.rollouts.workflows.base import PolicyModel, Reward
from rftdask.rollouts.workflows.registry import workflow

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "The exact value of an expression over integers, + - * / and parentheses.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
TOOLS_SYSTEM_PROMPT = (
    "You may call a tool, one call at a time, by writing\n"
    '<tool_call>{"name": "calculator", "arguments": {"expression": "(1+2)*3"}}</tool_call>\n'
    "and will be told its result. Answer without a call when you know the answer, and put it within \\boxed{}."
)
TOOL_CALLS_PROMPT = (
    "# Tool\n\n<tools>\n{tools}\n</tools>\n\nFirst think, within <think> </think>. Then write the calls that the "
    "question needs, as one JSON list within <tool_call> </tool_call>, such as\n"
    '<think>Bob must know.</think> <tool_call>[{{"name": "email", "arguments": {{"receiver": "Bob"}}}}]</tool_call>\n'
    "Both stand in one reply. Arguments have the types that the tools say."
)
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}
"""Chat roles of ShareGPT's speakers."""


@workflow("toolcall_workflow")
@workflow("tool_call_workflow")
async def tool_call_workflow(task: Task, model: PolicyModel) -> Reward:
    """Ask once for tool calls, with a row in ToolACE's form. Default reward: tool_call_reward.

    Columns: `tools`: list of functions or its JSON; `conversations`: messages {from, value} or {role, content}, by
    default the task's chat; `raw_system`: system prompt before the tools; the answer's column or `answer`: the correct
    calls, a JSON list of {name, arguments}.

    Raises: ValueError: the row has no tools.
    """
    row = task.row
    tools = json.loads(row["tools"]) if isinstance(row.get("tools"), str) else list(task.tools) or row.get("tools")
    if not isinstance(tools, list) or not tools:
        raise ValueError(f"task {task.group_id}: column tools is not a list of functions: {row.get('tools')!r:.200}")
    functions = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    listed = "\n".join(map(json.dumps, functions))
    chat = row.get("conversations") or task.messages or [{"role": "user", "content": task.prompt}]
    messages = [_message(message) for message in chat]
    system = str(row.get("raw_system") or "")
    if messages[0]["role"] == "system":
        system = system or str(messages[0]["content"])
        messages = messages[1:]
    messages.insert(0, {"role": "system", "content": system + TOOL_CALLS_PROMPT.format(tools=listed)})
    truth = task.truth or row.get("answer") or ""
    task = replace(task, truth=truth if isinstance(truth, str) else json.dumps(truth))
    return await wait_for_reward(task, await model.chat(messages), default="tool_call_reward")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    if "from" not in message:
        return dict(message)
    value, speaker = message["value"], message["from"]
    content = value if isinstance(value, str) else json.dumps(value)
    return {"role": _ROLES.get(speaker, speaker), "content": content}


@workflow("calculator_workflow")
async def calculator_workflow(task: Task, model: PolicyModel) -> Reward:
    """Ask and run the called tools until the policy answers without a call or the turns are used up. The last answer is
    scored, by default with math_reward. Metrics: num_tool_calls, num_turns.

    `workflow_args`: max_turns (4).
    """
    max_turns = int(task.workflow_args.get("max_turns", 4))
    messages: list[dict[str, Any]] = [dict(m) for m in task.messages] or [{"role": "user", "content": task.prompt}]
    if messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": TOOLS_SYSTEM_PROMPT})
    num_calls = num_turns = 0
    answer = ""
    while num_turns < max_turns:
        model.set_state(turn=num_turns, num_tool_calls=num_calls)
        answer = (await model.chat(messages)).text
        num_turns += 1
        # Malformed calls are not recognized, so such an answer is the last one.
        calls = parse_tool_calls(answer)
        if not calls:
            break
        with model.timer("tool"):
            results = [call_tool(call) for call in calls]
        num_calls += len(calls)
        # The answer keeps its calls, so that it stays as sampled.
        messages.append({"role": "assistant", "content": answer})
        text = "\n".join(f"<tool_response>{result}</tool_response>" for result in results)
        messages.append({"role": "user", "content": text})
    reward = await wait_for_reward(task, answer, default="math_reward")
    metrics = {**reward.metrics, "num_tool_calls": float(num_calls), "num_turns": float(num_turns)}
    return Reward(reward.value, metrics)


def call_tool(call: ToolCall) -> str:
    if call.name != "calculator":
        return f"error: there is no tool {call.name!r:.40}; there is calculator"
    # The policy may write any JSON.
    expression = call.arguments.get("expression") if isinstance(call.arguments, dict) else None
    if not isinstance(expression, str):
        return 'error: calculator needs {"expression": text}'
    try:
        return str(evaluate(expression)[0])
    except ExpressionError as error:
        return f"error: {error}"
