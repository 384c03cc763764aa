"""Embodied worlds in text: ScienceWorld and ALFWorld. One chat per rollout, one action per turn.

They run in sandboxes, because a world is a Java process or a blocking library. Each rollout has its own world, which is
always closed.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rftdask.data.task import Task
from rftdask.errors import UserError
from rftdask.rollouts.workflows.base import PolicyModel, Reward, Step
from rftdask.rollouts.workflows.episode import Episode, Observation, last_action, play, question_of, seed_of, state_of
from rftdask.rollouts.workflows.registry import workflow

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


async def walk(world: Any, rules: str, max_steps: int, model: PolicyModel, describe_task: bool = False) -> Episode:
    """Play a world (with gym's `reset` and `step`) and close it. A reply without an action is played as "", to which
    the world responds. describe_task: begin with `world.get_task_description()`.
    """

    def observe(text: str, reward: float = 0.0, is_over: bool = False) -> Observation:
        return Observation(f"Observation: {text}", state_of(text), reward, is_over)

    async def act(reply: str) -> Observation:
        text, reward, is_over, _ = world.step(last_action(reply))
        return observe(str(text), float(reward), bool(is_over))

    try:
        with model.timer("tool"):
            text = str(world.reset()[0])
            if describe_task:
                text = f"{world.get_task_description()}\n{text}"
        return await play(model, observe(text), act, rules=rules, max_turns=max_steps)
    finally:
        world.close()


@workflow("sciworld_workflow", in_process=False, requires={"scienceworld": "sciworld"})
async def sciworld_workflow(task: Task, model: PolicyModel) -> Reward:
    """An experiment of ScienceWorld, which needs Java. The reward is the best score reached, 0 to 1. Metrics:
    num_turns, env_done, golden_rounds (length of one solution).

    The prompt is JSON: {"task_name", "var_num", "jar_path" (default: the package's)}. `workflow_args`: max_env_steps
    (30), simplifications (easy); task_name: ignore the prompt, and let the row's `seed` or the task's index select one
    of the training variations.
    """
    name = task.workflow_args.get("task_name")
    setup = {"task_name": name} if name else json.loads(task.prompt or question_of(task))
    package: Any = importlib.import_module("scienceworld")
    world = package.ScienceWorldEnv("", setup.get("jar_path"), envStepLimit=100)
    try:
        if name:
            world.load(name)  # the variations of a task are known only once it is loaded
            setup["var_num"] = draw(world.get_variations_train(), task)
        simplifications = task.workflow_args.get("simplifications", "easy")
        world.load(setup["task_name"], setup["var_num"], simplifications, generateGoldPath=True)
        golden = len(world.get_gold_action_sequence())
    except BaseException:
        world.close()
        raise
    max_steps = int(task.workflow_args.get("max_env_steps", 30))
    episode = await walk(world, SCIENCE_RULES, max_steps, model, describe_task=True)
    best = score = 0.0
    for step in episode.steps:
        score += step.reward or 0.0
        best = max(best, score)
    metrics = {"num_turns": float(len(episode.steps)), "env_done": float(episode.is_over)}
    # ScienceWorld's scores are percentages.
    steps = tuple(Step(step.state, (step.reward or 0.0) / 100) for step in episode.steps)
    return Reward(best / 100, {**metrics, "golden_rounds": float(golden)}, steps)


@workflow("step_wise_alfworld_workflow", in_process=False, requires={"alfworld": "alfworld", "textworld": "alfworld"})
@workflow("alfworld_workflow", in_process=False, requires={"alfworld": "alfworld", "textworld": "alfworld"})
async def alfworld_workflow(task: Task, model: PolicyModel) -> Reward:
    """A household task of ALFWorld. The reward is the game's at its end, or -0.1 if it does not end. Steps have states
    and rewards for algorithms that compare them (gigpo). Metrics: num_turns, env_done.

    The prompt is the path of a `game.tw-pddl`. `workflow_args`: max_env_steps (30); games: a folder, from which the
    row's `seed` or the task's index selects such a file, and the prompt is ignored.
    """
    folder = task.workflow_args.get("games")
    path = draw(find_games(str(folder)), task) if folder else task.prompt or question_of(task)
    gym: Any = importlib.import_module("textworld.gym")
    textworld: Any = importlib.import_module("textworld")
    alfred: Any = importlib.import_module("alfworld.agents.environment.alfred_tw_env")
    infos = textworld.EnvInfos(description=True, inventory=True, admissible_commands=True)
    world = gym.make(gym.register_game(path, infos, wrappers=[alfred.AlfredDemangler()]))
    episode = await walk(world, ALFRED_RULES, int(task.workflow_args.get("max_env_steps", 30)), model)
    value = float(episode.steps[-1].reward or 0.0) if episode.is_over else -0.1
    return episode.as_reward(value, env_done=float(episode.is_over))


def find_games(folder: str) -> list[str]:
    """Return the paths of the games below a folder, sorted. Raises: UserError: there are none."""
    games = sorted(map(str, Path(folder).expanduser().rglob("game.tw-pddl")))
    if not games:
        advice = "run alfworld-download, or give the folder that it printed"
        raise UserError(f"alfworld_workflow: no game.tw-pddl below workflow_args.games {folder}; {advice}")
    return games


def draw(choices: Sequence[Any], task: Task) -> Any:
    """Return the choice selected by the row's `seed` or the task's index."""
    return choices[seed_of(task) % len(choices)]
