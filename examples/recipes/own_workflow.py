"""A workflow of two turns: the policy answers, sees its answer, and answers again. Only the second answer counts."""

from rftdask.rollouts.workflows.base import PolicyModel, Reward, Task


async def second_thought(task: Task, model: PolicyModel) -> Reward:
    """Return 1 if the second answer is right, and 0.5 if only the first one was."""
    first = (await model.generate(task.prompt)).text
    second = (await model.generate(f"{task.prompt}{first}? {task.prompt}")).text
    if second == task.truth:
        return Reward(1.0, {"changed": float(first != second)})
    return Reward(0.5 * (first == task.truth), {"changed": float(first != second)})
