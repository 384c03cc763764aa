"""Promises of openenv_workflow, with a server in its own process."""

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rftdask.errors import UserError, WaitTimeout
from rftdask.rollouts.workflows.base import Reward, as_reward
from rftdask.rollouts.workflows.openenv import OpenEnvError
from rftdask.rollouts.workflows.registry import find_workflow
from tests.unit.rollouts.workflows.test_shipped_workflows import Script, play, task

pytestmark = pytest.mark.extras
pytest.importorskip("websockets")
SHOW = {"observation_field": "text"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Address of a server."""
    program = [sys.executable, str(Path(__file__).with_name("openenv_server.py"))]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
        finally:
            server.terminate()


def episode(url: str, *replies: str, seed: int = 7, **arguments: Any) -> tuple[Reward, Script]:
    model = Script(replies)
    row = {"seed": seed}
    return play("openenv_workflow", model, workflow_args={"base_url": url, **SHOW, **arguments}, row=row), model


def test_episode_is_one_chat_with_environment_rewards(url: str) -> None:
    reward, model = episode(url, "3", "<action>9</action> or <action>7</action>", rules="guess")
    assert [step.reward for step in reward.steps] == [-0.25, 1.0]
    assert (reward.value, reward.metrics["env_done"], reward.metrics["num_turns"]) == (0.75, 1.0, 2.0)
    assert model.asked == ["a digit?", "wrong"] and [len(chat) for chat in model.prompts] == [2, 4]
    assert model.state == {"turn": 1} and "tool" in model.times
    cut, _ = episode(url + "/", "3", "4", "5", max_turns=2)
    assert (cut.value, cut.metrics["env_done"]) == (-0.5, 0.0)


def test_settings_decide_how_replies_become_actions(url: str) -> None:
    outcome, _ = episode(url, 'not {"a": {"b": 1}} but {"message": "7"}', action="json")
    assert outcome.value == 1.0
    words = {"action": "number", "actions": [*"abcdefgh"], "action_field": "choice", "action_args": {"message": "7"}}
    outcome, model = episode(url, "no letter here", "h", **words)
    assert (outcome.value, outcome.metrics["num_invalid"]) == (pytest.approx(0.9), 1.0)
    assert model.asked[0] == model.asked[1], "a reply without an action changes nothing"
    _, model = episode(url, "7", observation_field="", reset_args={"greeting": "hello"})
    assert model.asked == ['{"b": 1, "text": "hello"}']


@pytest.mark.parametrize(
    ("reply", "code", "problem"),
    [
        ("boom", "EXECUTION_ERROR", "refused a step .*the world ended"),
        ('{"message": 7}', "VALIDATION_ERROR", "Input should be a valid string"),
        ("vanish", "", "failed on a step: ConnectionClosed"),
        ("babble", "", "is not a message of OpenEnv"),
    ],
)
def test_server_error_names_its_address(reply: str, code: str, problem: str, url: str) -> None:
    with pytest.raises(OpenEnvError, match=rf"ws://127\.0\.0\.1:\d+/ws .*{problem}") as error:
        episode(url, reply, action="json" if "{" in reply else "text")
    again = pickle.loads(pickle.dumps(error.value))
    assert (again.code, str(again)) == (error.value.code, str(error.value)) and again.code == code


def test_every_wait_has_a_timeout(url: str) -> None:
    with pytest.raises(WaitTimeout, match=r"did not answer a step within timeout_s 2 s"):
        episode(url, "hang", timeout_s=2.0)
    with pytest.raises(OpenEnvError, match=r"ws://127\.0\.0\.1:9/ws cannot be reached: ConnectionRefusedError"):
        episode("http://127.0.0.1:9", "7")


def test_full_server_is_waited_for_up_to_wait_s(url: str) -> None:
    at_once = [task(workflow_args={"base_url": url, **SHOW}, row={"seed": 7}) for _ in range(4)]

    async def all_of_them() -> list[Any]:
        run = find_workflow("openenv_workflow").run
        return await asyncio.gather(*(run(each, Script(["7"])) for each in at_once))  # type: ignore[arg-type]

    assert [as_reward(each).value for each in asyncio.run(all_of_them())] == [1.0] * 4

    async def more_than_there_is_room_for() -> list[Any]:
        num_playing, refused = 0, asyncio.Event()

        class Slow(Script):
            async def ask(self, *given: Any) -> Any:
                nonlocal num_playing
                num_playing += 1
                await refused.wait()
                return await super().ask(*given)

        run = find_workflow("openenv_workflow").run
        patient = [run(each, Slow(["7"])) for each in at_once[:2]]  # type: ignore[arg-type]
        hasty = task(workflow_args={"base_url": url, **SHOW, "wait_s": 0.1}, row={"seed": 7})
        started = [asyncio.ensure_future(each) for each in patient]  # type: ignore[arg-type]
        while num_playing < len(started):
            await asyncio.sleep(0.01)
        with pytest.raises(WaitTimeout, match=r"CAPACITY_REACHED.*no session became free within wait_s 0\.1 s"):
            await run(hasty, Script(["7"]))  # type: ignore[arg-type]
        refused.set()
        return await asyncio.gather(*started)

    assert [as_reward(each).value for each in asyncio.run(more_than_there_is_room_for())] == [1.0] * 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"base_url": "localhost:8000"}, "base_url is 'localhost:8000'; give the address"),
        ({"turns": 3}, "unknown workflow_args turns"),
        ({"action": "number"}, "action is 'number' with 0 actions"),
        ({"observation_field": "picture"}, "no observation_field 'picture' in"),
    ],
)
def test_invalid_settings_are_refused_by_name(arguments: dict[str, Any], problem: str, url: str) -> None:
    with pytest.raises(UserError, match=problem):
        episode(**{"url": url, **{("url" if k == "base_url" else k): v for k, v in arguments.items()}})
