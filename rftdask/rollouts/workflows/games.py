"""Games of gymnasium and of TextArena: one call of the policy for each move.

Every rollout of a task plays the same game: the seed is the row's `seed`, or the task's number. They run in sandboxes,
because a game may be anybody's code.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rftdask.data.task import Task
from rftdask.rollouts.workflows.base import PolicyModel, Reward, Step
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
    """gymnasium_workflow for FrozenLake, 4x4 and not slippery unless `workflow_args.env_args` say otherwise."""
    arguments = dict(task.workflow_args)
    env_args = {**FROZEN_LAKE["env_args"], **arguments.pop("env_args", {})}  # type: ignore[dict-item]
    return await _play({**FROZEN_LAKE, **arguments, "env_args": env_args}, task, model)


@workflow("gymnasium_workflow", in_process=False, requires={"gymnasium": "gymnasium"})
async def gymnasium_workflow(task: Task, model: PolicyModel) -> Reward:
    """Play one episode. Each step's reward is the game's; the rollout's is their sum. A reply that names no action
    changes nothing and earns `invalid_reward`.

    `workflow_args`: env_id, and actions: the words for actions 0, 1, ...; env_args, of gymnasium.make; max_turns (16);
    rules: what the policy is told of the game; invalid_reward (-0.1); show: "board", which the game renders as text, or
    "state", its observation as Python writes it; history (false): whether a turn shows those before, as one chat.
    """
    return await _play(task.workflow_args, task, model)


@workflow("textarena_workflow", in_process=False, requires={"textarena": "textarena"})
async def textarena_workflow(task: Task, model: PolicyModel) -> Reward:
    """Play one game of TextArena as a chat: what the game says since the last move is a message. The reward is the
    game's, 0 for one that has none or did not end. The first seat is the policy's.

    `workflow_args`: env_id; env_args, of textarena.make; max_turns (32), of the policy; num_players (1), and opponent:
    the auxiliary model that plays the other seats.
    """
    options = {"env_args": {}, "max_turns": 32, "num_players": 1, "opponent": None, **task.workflow_args}
    if not options.get("env_id") or (options["num_players"] > 1) != bool(options["opponent"]):
        raise ValueError(
            f"textarena_workflow, task {task.group_id}: workflow_args need env_id, and an opponent where num_players "
            "is more than 1"
        )
    # By name, as below. Raw: the game's own messages, and not the whole history as one text.
    textarena = importlib.import_module("textarena")
    game = textarena.make(f"{options['env_id'].removesuffix('-raw')}-raw", **options["env_args"])
    game.reset(num_players=options["num_players"], seed=int(task.row.get("seed", task.index)))
    chats: dict[int, list[dict[str, str]]] = {}
    num_turns, is_over = 0, False
    while not is_over and num_turns < options["max_turns"]:
        seat, observed = game.get_observation()
        chat = chats.setdefault(seat, [])
        said = chat[-1]["content"] if chat else None
        # Who has moved is told of it, too; it is in the chat already.
        news = [text for _, text, kind in observed if kind.name != "PLAYER_ACTION" or text != said]
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
    rewards, told = game.close()
    earned = float((rewards or {}).get(0, 0.0))
    invalid = float(bool(told.get(0, {}).get("invalid_move")))
    return Reward(earned, {"num_turns": float(num_turns), "invalid_move": invalid, "success": float(earned > 0)})


async def _play(arguments: Mapping[str, Any], task: Task, model: PolicyModel) -> Reward:
    usual = {"env_args": {}, "max_turns": 16, "rules": "", "invalid_reward": -0.1, "show": "board", "history": False}
    options = {**usual, **arguments}
    for key in ("env_id", "actions"):
        if not options.get(key):
            raise ValueError(f"gymnasium_workflow, task {task.group_id}: workflow_args.{key} is missing")
    # By name: whether it is installed must not change the type check.
    gymnasium = importlib.import_module("gymnasium")
    shows_board = options["show"] == "board"
    game = gymnasium.make(options["env_id"], render_mode="ansi" if shows_board else None, **options["env_args"])
    rules = [{"role": "system", "content": options["rules"]}] if options["rules"] else []
    steps: list[Step] = []
    chat: list[dict[str, str]] = []
    is_over, num_invalid = False, 0
    try:
        state, _ = game.reset(seed=int(task.row.get("seed", task.index)))
        while not is_over and len(steps) < options["max_turns"]:
            model.set_state(turn=len(steps))
            # Without history a turn is an experience of its own, and the board is all there is to know.
            board = board_text(game.render()) if shows_board else str(state)
            question = f"{board}\n\nAnswer with one of: {', '.join(options['actions'])}."
            chat.append({"role": "user", "content": question})
            reply = (await model.chat([*rules, *(chat if options["history"] else chat[-1:])])).text
            chat.append({"role": "assistant", "content": reply})
            action = find_action(reply, options["actions"])
            # The state before the move: algorithms compare the moves that were made from one state.
            before, earned = str(state), float(options["invalid_reward"])
            if action is None:
                num_invalid += 1
            else:
                with model.timer("tool"):
                    state, reward, terminated, truncated, _ = game.step(action)
                earned, is_over = float(reward), terminated or truncated
            steps.append(Step(before, earned))
    finally:
        game.close()
    total = sum(step.reward or 0.0 for step in steps)
    metrics = {"num_turns": float(len(steps)), "num_invalid": float(num_invalid), "success": float(total > 0)}
    return Reward(total, metrics, tuple(steps))


def find_action(reply: str, actions: Sequence[str]) -> int | None:
    """The number of the action that the reply names last, as a whole word; None if it names none."""
    words = "|".join(re.escape(action) for action in actions)
    named = re.findall(rf"\b({words})\b", reply, re.IGNORECASE)
    return None if not named else [action.lower() for action in actions].index(named[-1].lower())


def board_text(rendered: str) -> str:
    """Text that the game shows, the colored place in brackets in place of the terminal's codes."""
    return _COLORED.sub(r"[\1]", rendered).strip()
