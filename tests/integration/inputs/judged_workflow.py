"""A workflow that asks a judge for everything that an auxiliary model can be asked for."""

from __future__ import annotations

from rftdask.rollouts.workflows.base import PolicyModel, Reward, Task


async def judged(task: Task, model: PolicyModel) -> Reward:
    """Two calls of the judge for each answer: a text, and the logprobs of one."""
    answer = await model.generate(task.prompt)
    judge = model.auxiliary("judge")
    verdict = await judge.generate(answer.text or "?")
    scores = await judge.logprobs(task.prompt, "2")
    return Reward(float(task.index % 2), {"judged": float(sum(verdict.tokens)), "score": scores[0]})
