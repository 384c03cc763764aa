"""Games of gymnasium and TextArena, and worlds in text of ScienceWorld and ALFWorld: one call of the policy per move.

They run in sandboxes, because a world is a Java process or a blocking library. Each rollout has its own world.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rftdask.data.task import Task
from rftdask.errors import UserError
from rftdask.rollouts.workflows.base import PolicyModel, Reward, Step
from rftdask.rollouts.workflows.episode import (
    Episode,
    Observation,
    find_action,
    last_action,
    play,
    question_of,
    seed_of,
)
from rftdask.rollouts.workflows.registry import workflow

FROZEN_LAKE = {
    "env_id": "FrozenLake-v1",
    "env_args": {"is_slippery": False, "map_name": "4x4"},
    "actions": ["Left", "Down", "Right", "Up"],
    "max_turns": 16,
    "rules": (
        "You walk over a frozen lake, from S to G, and must not step on H, a hole. F is ice that holds. The place "
        "where you stand is in brackets."
    ),
}
_COLORED = re.compile(r"\x1b\[[0-9;]*m(.)\x1b\[0m")


@workflow("frozen_lake_workflow", in_process=False, requires={"gymnasium": "gymnasium"})
async def frozen_lake_workflow(task: Task, model: PolicyModel) -> Reward:
    """gymnasium_workflow for FrozenLake; 4x4 and not slippery unless `workflow_args.env_args` change it."""
    arguments = dict(task.workflow_args)
    env_args = {**FROZEN_LAKE["env_args"], **arguments.pop("env_args", {})}  # type: ignore[dict-item]
    return await _play({**FROZEN_LAKE, **arguments, "env_args": env_args}, task, model)


@workflow("gymnasium_workflow", in_process=False, requires={"gymnasium": "gymnasium"})
async def gymnasium_workflow(task: Task, model: PolicyModel) -> Reward:
    """Play one episode. Each step's reward is the game's; the rollout's is their sum. A reply that names no action
    changes nothing and earns `invalid_reward`.

    `workflow_args`: env_id, and actions: words for the actions 0, 1, ...; env_args: arguments of gymnasium.make;
    max_turns (16); rules: system prompt; invalid_reward (-0.1); show: "board" for the game's text rendering, or "state"
    for its observation as Python prints it; history (false): show earlier turns as one chat.
    """
    return await _play(task.workflow_args, task, model)


@workflow("textarena_workflow", in_process=False, requires={"textarena": "textarena"})
async def textarena_workflow(task: Task, model: PolicyModel) -> Reward:
    """Play one game of TextArena as a chat, with the game's new texts as messages. The reward is the game's, or 0 if it
    has none or did not end. The policy plays the first seat.

    `workflow_args`: env_id; env_args: arguments of textarena.make; max_turns (32): turns of the policy; num_players
    (1), and opponent: the auxiliary model that plays the other seats.
    """
    options = {"env_args": {}, "max_turns": 32, "num_players": 1, "opponent": None, **task.workflow_args}
    at = f"textarena_workflow, task {task.group_id}: workflow_args"
    if not options.get("env_id"):
        raise ValueError(f"{at}.env_id is required")
    if (options["num_players"] > 1) != bool(options["opponent"]):
        raise ValueError(f"{at}.opponent is required if num_players is more than 1, and not allowed otherwise")
    # By name, as below. The raw variant gives the game's messages instead of the whole history as one text.
    textarena = importlib.import_module("textarena")
    game = textarena.make(f"{options['env_id'].removesuffix('-raw')}-raw", **options["env_args"])
    game.reset(num_players=options["num_players"], seed=seed_of(task))
    chats: dict[int, list[dict[str, str]]] = {}
    num_turns, is_over = 0, False
    while not is_over and num_turns < options["max_turns"]:
        seat, observed = game.get_observation()
        chat = chats.setdefault(seat, [])
        last_move = chat[-1]["content"] if chat else None
        # The game repeats a player's own move, which the chat already has.
        news = [text for _, text, kind in observed if kind.name != "PLAYER_ACTION" or text != last_move]
        chat.append({"role": "user", "content": "\n".join(news)})
        if seat == 0:
            model.set_state(turn=num_turns)
            num_turns += 1
            reply = (await model.chat(chat)).text
        else:
            reply = (await model.auxiliary(options["opponent"]).chat(chat)).text
        chat.append({"role": "assistant", "content": reply})
        with model.timer("tool"):
            is_over, _ = game.step(reply)
    rewards, info = game.close()
    earned = float((rewards or {}).get(0, 0.0))
    invalid = float(bool(info.get(0, {}).get("invalid_move")))
    return Reward(earned, {"num_turns": float(num_turns), "invalid_move": invalid, "success": float(earned > 0)})


async def _play(arguments: Mapping[str, Any], task: Task, model: PolicyModel) -> Reward:
    defaults = {"env_args": {}, "max_turns": 16, "rules": "", "invalid_reward": -0.1, "show": "board", "history": False}
    options = {**defaults, **arguments}
    for key in ("env_id", "actions"):
        if not options.get(key):
            raise ValueError(f"gymnasium_workflow, task {task.group_id}: workflow_args.{key} is missing")
    # By name, so that type checks do not depend on whether it is installed.
    gymnasium = importlib.import_module("gymnasium")
    shows_board, actions = options["show"] == "board", options["actions"]
    game = gymnasium.make(options["env_id"], render_mode="ansi" if shows_board else None, **options["env_args"])

    def observe(state: Any, reward: float = 0.0, is_over: bool = False) -> Observation:
        board = board_text(game.render()) if shows_board else str(state)
        return Observation(f"{board}\n\nAnswer with one of: {', '.join(actions)}.", reward, is_over, str(state))

    async def act(reply: str) -> Observation | None:
        action = find_action(reply, actions)
        if action is None:
            return None
        state, reward, terminated, truncated, _ = game.step(action)
        return observe(state, float(reward), terminated or truncated)

    try:
        first, settings = game.reset(seed=seed_of(task))[0], ("rules", "max_turns", "invalid_reward", "history")
        episode = await play(model, observe(first), act, **{name: options[name] for name in settings})
    finally:
        game.close()
    total = episode.total
    return episode.as_reward(total, num_invalid=float(episode.num_invalid), success=float(total > 0))


def board_text(rendered: str) -> str:
    """Return a rendered board, with the colored place in brackets instead of terminal codes."""
    return _COLORED.sub(r"[\1]", rendered).strip()


# ---- worlds in text

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

    async def act(reply: str) -> Observation:
        text, reward, is_over, _ = world.step(last_action(reply))
        return Observation(f"Observation: {text}", float(reward), bool(is_over))

    try:
        with model.timer("tool"):
            text = str(world.reset()[0])
            if describe_task:
                text = f"{world.get_task_description()}\n{text}"
        return await play(model, Observation(f"Observation: {text}"), act, rules=rules, max_turns=max_steps)
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
    return choices[seed_of(task) % len(choices)]
