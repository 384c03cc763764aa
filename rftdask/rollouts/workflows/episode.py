"""Episode: the loop of environments that answer each reply of the policy with an observation."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rftdask.data.task import Task
from rftdask.rollouts.workflows.base import PolicyModel, Reward, Step

ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)


@dataclass(frozen=True)
class Observation:
    text: str
    reward: float = 0.0
    """Reward of the action that led here."""
    is_over: bool = False
    state: str = ""
    """Name of the environment's state; equal states have equal names. "": known only by its text."""


@dataclass(frozen=True)
class Episode:
    steps: tuple[Step, ...]
    is_over: bool
    """False: it was cut after the last turn."""
    num_invalid: int
    """Replies without a valid action."""

    @property
    def total(self) -> float:
        return sum(step.reward or 0.0 for step in self.steps)

    def as_reward(self, value: float, **metrics: float) -> Reward:
        return Reward(value, {"num_turns": float(len(self.steps)), **metrics}, self.steps)


async def play(
    model: PolicyModel,
    first: Observation,
    act: Callable[[str], Awaitable[Observation | None]],
    *,
    rules: str = "",
    max_turns: int,
    invalid_reward: float = 0.0,
    history: bool = True,
) -> Episode:
    """Play an episode from its first observation.

    Args:
        act: plays a reply and returns the next observation; None: the reply names no action, so nothing changes.
        history: True: the episode is one chat; False: each turn shows only the current observation.
    """
    system = [{"role": "system", "content": rules}] if rules else []
    chat: list[dict[str, str]] = []
    steps: list[Step] = []
    current, num_invalid = first, 0
    while not current.is_over and len(steps) < max_turns:
        model.set_state(turn=len(steps))
        chat.append({"role": "user", "content": current.text})
        reply = (await model.chat([*system, *(chat if history else chat[-1:])])).text
        chat.append({"role": "assistant", "content": reply})
        with model.timer("tool"):
            following = await act(reply)
        num_invalid += following is None
        # A step is described by the state before its action, by which algorithms compare steps.
        state = current.state or hashlib.sha256(current.text.encode()).hexdigest()[:16]
        steps.append(Step(state, float(invalid_reward) if following is None else following.reward))
        current = following or current
    return Episode(tuple(steps), current.is_over, num_invalid)


def last_action(reply: str) -> str:
    """Return the contents of the last <action>...</action>; "": none."""
    actions = ACTION.findall(reply)
    return actions[-1].strip() if actions else ""


def find_action(reply: str, actions: Sequence[str]) -> int | None:
    """Return the index of the action that the reply names last, as a whole word; None: it names none."""
    words = "|".join(re.escape(action) for action in actions)
    named = re.findall(rf"\b({words})\b", reply, re.IGNORECASE)
    return None if not named else [action.lower() for action in actions].index(named[-1].lower())


def seed_of(task: Task) -> int:
    """Return the row's `seed`, or else the task's index: equal for all rollouts of a task."""
    return int(task.row.get("seed", task.index))


def question_of(task: Task) -> str:
    """Return the text of the task's last message, or else its prompt."""
    return str(task.messages[-1]["content"]) if task.messages else task.prompt
