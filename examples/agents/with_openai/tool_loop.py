"""An agent written as for any service: the package openai, a tool and a loop. ../learn.py trains it.

The policy is asked for the number behind a letter. The number differs in each task, so the policy must look it up.
"""

from rftdask.rollouts.workflows.base import PolicyModel, Reward, Task
from rftdask.rollouts.workflows.registry import workflow

LOOK = {"name": "look", "parameters": {"type": "object", "properties": {}}}
MAX_TURNS = 3


@workflow("tool_loop", in_process=True)
async def tool_loop(task: Task, model: PolicyModel) -> Reward:
    """Ask the policy and run its tool calls until it answers. Reward 1 if the number is right."""
    client, messages = model.openai_client(), [{"role": "user", "content": task.prompt}]
    num_calls = 0
    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=[{"type": "function", "function": LOOK}]
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            num_calls += 1
            result = task.truth if call.function.name == "look" else "?"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return Reward(float(message.content == task.truth), {"num_tool_calls": float(num_calls)})
