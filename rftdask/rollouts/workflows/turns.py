"""Base classes of workflows with several turns: say what one turn does, and what it or the whole was worth.

Invariant: the reward of a rollout is a function of its steps' rewards, by one of the rules of `propagate_rewards`, or
of what the class itself says at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from rftdask.data.task import Task
from rftdask.rollouts.workflows.base import PolicyModel, Reward, Step

Propagation = Literal["sum", "mean", "last", "max", "discounted"]


class MultiTurnWorkflow:
    """Turns until `turn` says it is over; then `reward` says what the rollout was worth.

    Example:
        class GuessNumber(MultiTurnWorkflow):
            max_turns = 5

            async def turn(self, task: Task, model: PolicyModel, number: int) -> bool:
                self.guess = (await model.chat(...)).text
                return self.guess != task.truth  # go on?

            async def reward(self, task: Task, model: PolicyModel) -> float:
                return float(self.guess == task.truth)

    Every rollout has an instance of its own, so attributes are its state. A turn may call the policy several times.
    """

    max_turns: int = 8
    """A taskset may say otherwise in its `workflow_args`."""

    async def start(self, task: Task, model: PolicyModel) -> None:
        """Before the first turn."""

    async def turn(self, task: Task, model: PolicyModel, number: int) -> bool:
        """Take one turn, counted from 0. Returns: True to go on."""
        raise NotImplementedError(f"{type(self).__name__} must define turn(task, model, number)")

    async def reward(self, task: Task, model: PolicyModel) -> float | Reward:
        """Of the whole rollout, asked once after the last turn."""
        raise NotImplementedError(f"{type(self).__name__} must define reward(task, model)")

    async def end(self, task: Task) -> None:
        """Always, at last: close what `start` opened."""

    async def run(self, task: Task, model: PolicyModel) -> float | Reward:
        """`start`, turns until one returns False or there were `max_turns`, `reward`; `end` in any case."""
        max_turns = int(task.workflow_args.get("max_turns", self.max_turns))
        try:
            await self.start(task, model)
            for number in range(max_turns):
                # A failure or timeout then says at which turn.
                model.set_state(turn=number)
                if not await self.turn(task, model, number):
                    break
            # Before `end`, which may close the environment that knows how it went.
            return await self.reward(task, model)
        finally:
            await self.end(task)


class StepWiseWorkflow(MultiTurnWorkflow):
    """The same with one call of the policy and one reward for each turn; see `step`. What the rollout is worth follows
    from them by `propagation`, and algorithms that compare steps see each of them.
    """

    propagation: ClassVar[Propagation] = "sum"
    gamma: ClassVar[float] = 1.0
    """Discount factor of reward "discounted"."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    async def step(self, task: Task, model: PolicyModel, number: int) -> tuple[Step, bool]:
        """Make one call of the policy: what it saw and earned, and whether to go on."""
        raise NotImplementedError(f"{type(self).__name__} must define step(task, model, number)")

    async def turn(self, task: Task, model: PolicyModel, number: int) -> bool:
        """One `step`, which is kept."""
        step, goes_on = await self.step(task, model, number)
        self.steps.append(step)
        return goes_on

    async def reward(self, task: Task, model: PolicyModel) -> Reward:
        """By `propagation` from the rewards of the steps; a step without one earned 0."""
        earned = [step.reward or 0.0 for step in self.steps]
        value = propagate_rewards(earned, self.propagation, self.gamma)
        return Reward(value, {"num_turns": float(len(earned))}, tuple(self.steps))


def propagate_rewards(rewards: Sequence[float], propagation: Propagation, gamma: float = 1.0) -> float:
    """Reward of a rollout whose steps earned `rewards`: their sum, mean, maximum, the last one, or
    sum_t gamma^t r_t ("discounted"). Raises: ValueError: no step.
    """
    if not rewards:
        raise ValueError("a rollout without a step has no reward")
    if propagation == "mean":
        return sum(rewards) / len(rewards)
    if propagation == "last":
        return rewards[-1]
    if propagation == "max":
        return max(rewards)
    if propagation == "discounted":
        return sum(gamma**t * reward for t, reward in enumerate(rewards))
    return sum(rewards)
