"""Games of gymnasium that show themselves as text, such as FrozenLake: one call of the policy for each move.

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
    rules: what the policy is told of the game; invalid_reward (-0.1).
    """
    return await _play(task.workflow_args, task, model)


async def _play(arguments: Mapping[str, Any], task: Task, model: PolicyModel) -> Reward:
    options = {"env_args": {}, "max_turns": 16, "rules": "", "invalid_reward": -0.1, **arguments}
    for key in ("env_id", "actions"):
        if not options.get(key):
            raise ValueError(f"gymnasium_workflow, task {task.group_id}: workflow_args.{key} is missing")
    # By name: whether it is installed must not change the type check.
    gymnasium = importlib.import_module("gymnasium")
    game = gymnasium.make(options["env_id"], render_mode="ansi", **options["env_args"])
    rules = [{"role": "system", "content": options["rules"]}] if options["rules"] else []
    steps: list[Step] = []
    is_over, num_invalid = False, 0
    try:
        state, _ = game.reset(seed=int(task.row.get("seed", task.index)))
        while not is_over and len(steps) < options["max_turns"]:
            model.set_state(turn=len(steps))
            # Each turn shows the board anew and no history: a turn is an experience of its own, and its state is all
            # there is to know.
            question = f"{board_text(game.render())}\n\nAnswer with one of: {', '.join(options['actions'])}."
            reply = (await model.chat([*rules, {"role": "user", "content": question}])).text
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
