"""A workflow of two turns: the policy answers, sees its answer, and answers again; the second answer counts."""

from rftdask.rollouts.workflows.base import PolicyModel, Reward, Task


async def second_thought(task: Task, model: PolicyModel) -> Reward:
    """1 for a second answer that is right, and a half for a first one that was thrown away."""
    first = (await model.generate(task.prompt)).text
    second = (await model.generate(f"{task.prompt}{first}? {task.prompt}")).text
    if second == task.truth:
        return Reward(1.0, {"changed": float(first != second)})
    return Reward(0.5 * (first == task.truth), {"changed": float(first != second)})
