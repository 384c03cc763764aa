"""Worlds in text, with a body in them: ScienceWorld and ALFWorld. One conversation, one action a turn.

They run in sandboxes: a world is a process of Java or a library that blocks. Each rollout has a world of its own, which
is closed whatever happens.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rftdask.data.task import Task
from rftdask.errors import UserError
from rftdask.rollouts.workflows.base import PolicyModel, Reward, Step
from rftdask.rollouts.workflows.registry import workflow

_Choice = TypeVar("_Choice")
_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_RULES = (
    "You act in a world that is told in text. Each turn, think within <think> </think> and then take one action within "
    "<action> </action>, such as\n<think>It may be in the kitchen.</think><action>{example}</action>\nNobody answers "
    "questions. Actions: {actions}"
)
SCIENCE_RULES = _RULES.format(
    example="open door to kitchen",
    actions="open, close, activate, deactivate, examine, look at, read, pick up, eat or focus on OBJ; use OBJ "
    "[on OBJ]; connect OBJ to OBJ; move OBJ to OBJ; pour OBJ into OBJ; mix OBJ; teleport to LOC; look around; "
    "inventory; wait; wait1. Focus on an object only where the task says so.",
)
ALFRED_RULES = _RULES.format(
    example="go to cabinet 1",
    actions="look; inventory; go to, open, close, examine or use OBJ; take OBJ from OBJ; move OBJ to OBJ; heat, clean "
    "or cool OBJ with OBJ; slice OBJ with OBJ. You carry one thing at most.",
)


class TextWorld(Protocol):
    """A world that is under way."""

    def reset(self) -> str:
        """What is seen at first, with the task."""

    def step(self, action: str) -> tuple[str, float, bool]:
        """(what is seen then, reward of the action, whether it is over)."""

    def close(self) -> None:
        """End it."""


async def walk(world: TextWorld, rules: str, max_steps: int, model: PolicyModel) -> tuple[list[Step], bool]:
    """Play a world to its end or for `max_steps` turns. Returns: its steps, and whether it came to its end. A reply
    without an action does nothing, which the world says.
    """
    steps: list[Step] = []
    is_over = False
    try:
        with model.timer("tool"):
            seen = world.reset()
        messages = [{"role": "system", "content": rules}]
        while not is_over and len(steps) < max_steps:
            model.set_state(turn=len(steps))
            messages.append({"role": "user", "content": f"Observation: {seen}"})
            reply = (await model.chat(messages)).text
            messages.append({"role": "assistant", "content": reply})
            state = hashlib.sha256(seen.encode()).hexdigest()[:16]
            found = _ACTION.findall(reply)
            with model.timer("tool"):
                seen, reward, is_over = world.step(found[-1].strip() if found else "")
            steps.append(Step(state, reward))
    finally:
        world.close()
    return steps, is_over


@workflow("sciworld_workflow", in_process=False, requires={"scienceworld": "sciworld"})
async def sciworld_workflow(task: Task, model: PolicyModel) -> Reward:
    """An experiment of ScienceWorld, which needs Java. The reward is the best score on the way, 0 to 1. Metrics:
    num_turns, env_done, golden_rounds (the length of one solution).

    The prompt is JSON: {"task_name", "var_num", "jar_path" (the package's own)}. `workflow_args`: max_env_steps (30),
    simplifications (easy); task_name: the prompt is not read, and the row's `seed`, or the task's number, draws one of
    the variations that ScienceWorld has for training.
    """
    named = task.workflow_args.get("task_name")
    told = {"task_name": named} if named else json.loads(task.prompt or _last(task))
    package: Any = importlib.import_module("scienceworld")
    most = int(task.workflow_args.get("max_env_steps", 30))
    world = _Science(package.ScienceWorldEnv("", told.get("jar_path"), envStepLimit=100))
    try:
        easier = task.workflow_args.get("simplifications", "easy")
        if named:
            world.env.load(named)  # which variations there are is told of a task that is loaded
            told["var_num"] = draw(world.env.get_variations_train(), task)
        world.env.load(told["task_name"], told["var_num"], easier, generateGoldPath=True)
        golden = len(world.env.get_gold_action_sequence())
    except BaseException:
        world.close()
        raise
    steps, is_over = await walk(world, SCIENCE_RULES, most, model)
    best = score = 0.0
    for step in steps:
        score += step.reward or 0.0
        best = max(best, score)
    metrics = {"num_turns": float(len(steps)), "env_done": float(is_over), "golden_rounds": float(golden)}
    # Steps tell percent of the score, as the reward does.
    parts = tuple(Step(step.state, (step.reward or 0.0) / 100) for step in steps)
    return Reward(best / 100, metrics, parts)


class _Science:
    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self) -> str:
        seen, _ = self.env.reset()
        return f"{self.env.get_task_description()}\n{seen}"

    def step(self, action: str) -> tuple[str, float, bool]:
        seen, reward, is_over, _ = self.env.step(action)
        return str(seen), float(reward), bool(is_over)

    def close(self) -> None:
        self.env.close()


@workflow("step_wise_alfworld_workflow", in_process=False, requires={"alfworld": "alfworld", "textworld": "alfworld"})
@workflow("alfworld_workflow", in_process=False, requires={"alfworld": "alfworld", "textworld": "alfworld"})
async def alfworld_workflow(task: Task, model: PolicyModel) -> Reward:
    """A household task of ALFWorld. The reward is the game's at its end, -0.1 where it does not come. Each turn tells
    its state and reward, so algorithms that compare steps (gigpo) see them. Metrics: num_turns, env_done.

    The prompt is the path of a `game.tw-pddl`. `workflow_args`: max_env_steps (30); games: a folder, in which the row's
    `seed`, or the task's number, draws one of those files, and the prompt is not read.
    """
    folder = task.workflow_args.get("games")
    path = draw(find_games(str(folder)), task) if folder else task.prompt or _last(task)
    gym: Any = importlib.import_module("textworld.gym")
    textworld: Any = importlib.import_module("textworld")
    alfred: Any = importlib.import_module("alfworld.agents.environment.alfred_tw_env")
    infos = textworld.EnvInfos(description=True, inventory=True, admissible_commands=True)
    game = gym.register_game(path, infos, wrappers=[alfred.AlfredDemangler()])
    steps, is_over = await walk(
        _Alfred(gym.make(game)), ALFRED_RULES, int(task.workflow_args.get("max_env_steps", 30)), model
    )
    metrics = {"num_turns": float(len(steps)), "env_done": float(is_over)}
    return Reward(float(steps[-1].reward or 0.0) if is_over else -0.1, metrics, tuple(steps))


class _Alfred:
    def __init__(self, env: Any) -> None:
        self._env = env

    def reset(self) -> str:
        seen, _ = self._env.reset()
        return str(seen)

    def step(self, action: str) -> tuple[str, float, bool]:
        seen, reward, is_over, _ = self._env.step(action)
        return str(seen), float(reward), bool(is_over)

    def close(self) -> None:
        self._env.close()


def find_games(folder: str) -> list[str]:
    """The games below a folder, in one order on every machine. Raises: UserError: there is none."""
    games = sorted(map(str, Path(folder).expanduser().rglob("game.tw-pddl")))
    if not games:
        raise UserError(
            f"alfworld_workflow: workflow_args.games is {folder}, below which there is no game.tw-pddl; run "
            "alfworld-download, or name the folder that it told"
        )
    return games


def draw(choices: Sequence[_Choice], task: Task) -> _Choice:
    """One of `choices`, by the row's `seed` or the task's number."""
    return choices[int(task.row.get("seed", task.index)) % len(choices)]


def _last(task: Task) -> str:
    return str(task.messages[-1]["content"]) if task.messages else ""
