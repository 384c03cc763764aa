"""A workflow that uses every call of an auxiliary model."""

from rftdask.rollouts.workflows.base import PolicyModel, Reward, Task


async def judged(task: Task, model: PolicyModel) -> Reward:
    """Call the judge twice per answer: for a text, and for the logprobs of a text."""
    answer = await model.generate(task.prompt)
    judge = model.auxiliary("judge")
    verdict = await judge.generate(answer.text or "?")
    scores = await judge.logprobs(task.prompt, "2")
    return Reward(float(task.index % 2), {"judged": float(sum(verdict.tokens)), "score": scores[0]})
