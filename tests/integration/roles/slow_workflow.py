"""A workflow whose tasks take different times, so that the groups of a work unit end one after another."""

import asyncio

from rftdask.rollouts.workflows.base import PolicyModel, Task


async def uneven(task: Task, model: PolicyModel) -> float:
    answer = await model.generate(task.prompt)
    await asyncio.sleep(0.05 * (task.index % 4))
    return float(len(answer.tokens) % 3)


async def slow(task: Task, model: PolicyModel) -> float:
    await model.generate(task.prompt)
    await asyncio.sleep(0.5)
    return 0.0


async def tailed(task: Task, model: PolicyModel) -> float:
    """Quick, except for every fourth task, which takes as long as many of the others together."""
    answer = await model.generate(task.prompt)
    await asyncio.sleep(2.0 if task.index % 4 == 3 else 0.05)
    return float(len(answer.tokens) % 3)


async def one_late(task: Task, model: PolicyModel) -> float:
    """Quick, except for rollouts of every fourth task that first sample an odd token: they take half a minute."""
    answer = await model.generate(task.prompt)
    await asyncio.sleep(30.0 if task.index % 4 == 3 and answer.tokens[0] % 2 else 0.05)
    return float(len(answer.tokens) % 3)


async def examined(task: Task, model: PolicyModel) -> float:
    first = await model.generate(task.prompt)
    await asyncio.sleep(1.0)
    await model.generate(f"{task.prompt}{first.text}?")
    return 0.0


async def two_turns(task: Task, model: PolicyModel) -> float:
    """Call the policy, wait as long as `tailed`, and call it again to continue the conversation."""
    first = await model.generate(task.prompt)
    await asyncio.sleep(2.0 if task.index % 4 == 3 else 0.05)
    second = await model.generate(f"{task.prompt}{first.text}?")
    return float(len(second.tokens) % 3)
