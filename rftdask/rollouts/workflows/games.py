"""Games of gymnasium and TextArena: one call of the policy per move.

Every rollout of a task plays the same game, seeded by the row's `seed` or the task's index. They run in sandboxes,
because games are third-party code.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

from rftdask.data.task import Task
from rftdask.rollouts.workflows.base import PolicyModel, Reward
from rftdask.rollouts.workflows.episode import Observation, find_action, play, seed_of
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
        return Observation(f"{board}\n\nAnswer with one of: {', '.join(actions)}.", str(state), reward, is_over)

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
