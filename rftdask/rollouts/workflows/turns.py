"""Base classes of workflows with several turns. Subclasses define one turn, and the reward of a turn or the rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from rftdask.data.task import Task
from rftdask.rollouts.workflows.base import PolicyModel, Reward, Step

Propagation = Literal["sum", "mean", "last", "max", "discounted"]


class MultiTurnWorkflow:
    """Takes turns until `turn` returns False, then calls `reward`.

    Example:
        class GuessNumber(MultiTurnWorkflow):
            max_turns = 5

            async def turn(self, task: Task, model: PolicyModel, number: int) -> bool:
                self.guess = (await model.chat(...)).text
                return self.guess != task.truth  # go on?

            async def reward(self, task: Task, model: PolicyModel) -> float:
                return float(self.guess == task.truth)

    Every rollout has its own instance, so attributes hold its state. A turn may call the policy several times.
    """

    max_turns: int = 8
    """Default; `workflow_args.max_turns` overrides it."""

    async def start(self, task: Task, model: PolicyModel) -> None:
        """Called before the first turn."""

    async def turn(self, task: Task, model: PolicyModel, number: int) -> bool:
        """Take one turn, counted from 0. Returns: True to go on."""
        raise NotImplementedError(f"{type(self).__name__} must define turn(task, model, number)")

    async def reward(self, task: Task, model: PolicyModel) -> float | Reward:
        """Return the reward of the whole rollout; called once after the last turn."""
        raise NotImplementedError(f"{type(self).__name__} must define reward(task, model)")

    async def end(self, task: Task) -> None:
        """Close what `start` opened; always called last."""

    async def run(self, task: Task, model: PolicyModel) -> float | Reward:
        """Call `start`, then `turn` until it returns False or `max_turns` is reached, `reward`, and always `end`."""
        max_turns = int(task.workflow_args.get("max_turns", self.max_turns))
        try:
            await self.start(task, model)
            for number in range(max_turns):
                model.set_state(turn=number)
                if not await self.turn(task, model, number):
                    break
            # Before `end`, which may close the environment.
            return await self.reward(task, model)
        finally:
            await self.end(task)


class StepWiseWorkflow(MultiTurnWorkflow):
    """A MultiTurnWorkflow with one call of the policy and one reward per turn, see `step`.

    The rollout's reward is computed from the turns' rewards by `propagation`. Algorithms that compare steps receive the
    reward of each turn.
    """

    propagation: ClassVar[Propagation] = "sum"
    gamma: ClassVar[float] = 1.0
    """Discount factor of the propagation "discounted"."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    async def step(self, task: Task, model: PolicyModel, number: int) -> tuple[Step, bool]:
        """Make one call of the policy. Returns: the step, and True to continue."""
        raise NotImplementedError(f"{type(self).__name__} must define step(task, model, number)")

    async def turn(self, task: Task, model: PolicyModel, number: int) -> bool:
        """Take one `step` and keep it."""
        step, continues = await self.step(task, model, number)
        self.steps.append(step)
        return continues

    async def reward(self, task: Task, model: PolicyModel) -> Reward:
        """Return the reward by `propagation`; a step without a reward counts as 0."""
        earned = [step.reward or 0.0 for step in self.steps]
        value = propagate_rewards(earned, self.propagation, self.gamma)
        return Reward(value, {"num_turns": float(len(earned))}, tuple(self.steps))


def propagate_rewards(rewards: Sequence[float], propagation: Propagation, gamma: float = 1.0) -> float:
    """Reward of a rollout from its steps' rewards: their sum, mean, max, last, or sum_t gamma^t r_t ("discounted").

    Raises: ValueError: no step.
    """
    if not rewards:
        raise ValueError("a rollout without a step has no reward")
    if propagation == "discounted":
        return sum(gamma**t * reward for t, reward in enumerate(rewards))
    if propagation == "mean":
        return sum(rewards) / len(rewards)
    return {"last": rewards[-1], "max": max(rewards)}.get(propagation, sum(rewards))
