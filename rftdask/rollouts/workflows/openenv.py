"""Environments of OpenEnv, by the address of their server: an episode is a session of its WebSocket, which has an
environment of its own there. Their HTTP routes have none: each request makes another.

It speaks the messages of openenv-core 0.3 (`reset` and `step` out, `observation` and `error` in) and not through its
client, whose package wants a web server and a browser's widgets beside it. Every message has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from rftdask.data.task import Task
from rftdask.errors import RoleError, UserError, WaitTimeout
from rftdask.rollouts.workflows.base import PolicyModel, Reward, Step
from rftdask.rollouts.workflows.games import find_action
from rftdask.rollouts.workflows.registry import workflow
from rftdask.storage.safe_text import mask

_MAX_MESSAGE_BYTES = 16 * 2**20
"""Of a server's message; an observation becomes a prompt, and no prompt is as long."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
"""Between two tries of a server that is full, at first and later."""
_CLOSE_S = 2.0
"""Seconds that a server has to take leave."""
_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)


class OpenEnvError(RoleError):
    """An OpenEnv server refuses, fails or is gone. code: as it says, such as EXECUTION_ERROR; "": it says none."""

    def __init__(self, text: str, code: str = "") -> None:
        super().__init__(text, code)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class _Options:
    """`workflow_args`, see openenv_workflow."""

    base_url: str = ""
    action: str = "text"
    action_field: str = "message"
    action_args: Mapping[str, Any] | None = None
    actions: Sequence[str] = ()
    observation_field: str = ""
    reset_args: Mapping[str, Any] | None = None
    rules: str = ""
    max_turns: int = 16
    invalid_reward: float = -0.1
    timeout_s: float = 60.0
    wait_s: float = 600.0

    @classmethod
    def of(cls, task: Task) -> _Options:
        known = {each.name for each in fields(cls)}
        unknown = sorted(task.workflow_args.keys() - known)
        if unknown:
            raise UserError(f"openenv_workflow knows no workflow_args {', '.join(unknown)}; there are {sorted(known)}")
        options = cls(**task.workflow_args)
        if urlsplit(options.base_url).scheme not in ("http", "https", "ws", "wss"):
            raise UserError(
                f"openenv_workflow: workflow_args.base_url is {options.base_url!r}; give the address of the server, "
                "such as http://localhost:8000"
            )
        if options.action not in ("text", "json", "number") or (options.action == "number") != bool(options.actions):
            raise UserError(
                f"openenv_workflow: workflow_args.action is {options.action!r} with {len(options.actions)} actions; "
                "give text, json, or number with the words of the actions"
            )
        return options

    @property
    def socket_url(self) -> str:
        """Address of the WebSocket."""
        scheme, _, rest = self.base_url.partition("://")
        return f"{ {'http': 'ws', 'https': 'wss'}.get(scheme, scheme) }://{rest.rstrip('/')}/ws"


@workflow("openenv_workflow", in_process=True, requires={"websockets": "openenv"})
async def openenv_workflow(task: Task, model: PolicyModel) -> Reward:
    """Play one episode on an OpenEnv server, as one chat. Each step's reward is the environment's; the rollout's is
    their sum. Metrics: num_turns, num_invalid, env_done.

    `workflow_args`: base_url: of the server. action: what a reply becomes: "text" (itself, or what is last within
    <action> </action>), "json" (the last object in it, the whole action) or "number" (that of the last of `actions` in
    it); text and number are given as action_field (message), beside action_args. observation_field: the one to show;
    none: all, as JSON. reset_args: given beside the seed, which is the row's or the task's number. rules: a system
    prompt; max_turns (16); invalid_reward (-0.1), for a reply that is no action, which changes nothing; timeout_s (60):
    for the answer to each message; wait_s (600): for room, on a server that has as many sessions as it allows.

    Raises: OpenEnvError: the server refuses, fails or is gone; WaitTimeout: it does not answer in time; UserError.
    """
    options = _Options.of(task)
    reset = {"seed": int(task.row.get("seed", task.index)), **(options.reset_args or {})}
    session = await _begin(options, reset, model)
    messages = [{"role": "system", "content": options.rules}] if options.rules else []
    steps: list[Step] = []
    num_invalid = 0
    try:
        seen, is_over = _shown(session.first, options), bool(session.first.get("done"))
        while not is_over and len(steps) < options.max_turns:
            model.set_state(turn=len(steps))
            messages.append({"role": "user", "content": seen})
            reply = (await model.chat(messages)).text
            messages.append({"role": "assistant", "content": reply})
            state = hashlib.sha256(seen.encode()).hexdigest()[:16]
            action = _action_in(reply, options)
            if action is None:
                num_invalid += 1
                steps.append(Step(state, float(options.invalid_reward)))
                continue
            with model.timer("tool"):
                told = await session.ask("step", action)
            seen, is_over = _shown(told, options), bool(told.get("done"))
            # None: an environment that rewards other steps.
            steps.append(Step(state, float(told.get("reward") or 0.0)))
    finally:
        await session.close()
    metrics = {"num_turns": float(len(steps)), "num_invalid": float(num_invalid), "env_done": float(is_over)}
    return Reward(sum(step.reward or 0.0 for step in steps), metrics, tuple(steps))


class _Session:
    """One environment on a server, from its reset on."""

    first: Mapping[str, Any]
    """What it said at its reset."""

    def __init__(self, socket: Any, options: _Options) -> None:
        self._socket, self._url, self._timeout_s = socket, mask(options.socket_url), options.timeout_s

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """{"observation", "reward", "done"} after `reset` or `step`. Raises: OpenEnvError, WaitTimeout."""
        closed = importlib.import_module("websockets.exceptions").ConnectionClosed
        try:
            async with asyncio.timeout(self._timeout_s):
                with contextlib.suppress(closed):  # what it said before it closed is there to be read
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                answer = json.loads(await self._socket.recv())
        except TimeoutError as error:
            raise WaitTimeout(f"{self._url} did not answer a {kind} within timeout_s {self._timeout_s:g} s") from error
        except (closed, OSError, ValueError) as error:
            raise OpenEnvError(f"{self._url} failed on a {kind}: {type(error).__name__}: {error}") from error
        told = answer.get("data") if isinstance(answer, Mapping) else None
        if not isinstance(told, Mapping) or answer.get("type") not in ("observation", "error"):
            raise OpenEnvError(f"{self._url} answered a {kind} with {answer!r:.200}, which is no message of OpenEnv")
        if answer["type"] == "error":
            more = f" {told['errors']!r:.300}" if told.get("errors") else ""
            code = str(told.get("code", ""))
            raise OpenEnvError(f"{self._url} refused a {kind} ({code}): {told.get('message')}{more}", code)
        return told

    async def close(self) -> None:
        """End the session, whose environment goes; a server that does not answer is left alone."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._socket.close()
        except (TimeoutError, OSError):
            self._socket.transport.abort()


async def _begin(options: _Options, reset: Mapping[str, Any], model: PolicyModel) -> _Session:
    """A session whose environment is reset, once the server has room for it."""
    client = importlib.import_module("websockets.asyncio.client")  # by name: it is optional
    refused = importlib.import_module("websockets.exceptions").WebSocketException
    until, pause_s = time.monotonic() + options.wait_s, _PAUSE_S
    # One on this machine is behind no proxy, whatever the environment variables say.
    here = {"proxy": None} if urlsplit(options.base_url).hostname in ("localhost", "127.0.0.1", "::1") else {}
    while True:
        try:
            socket = await client.connect(
                options.socket_url, open_timeout=options.timeout_s, max_size=_MAX_MESSAGE_BYTES, **here
            )
        except TimeoutError as error:
            raise WaitTimeout(f"{mask(options.socket_url)} was not reached within {options.timeout_s:g} s") from error
        except (OSError, refused) as error:
            address = mask(options.socket_url)
            raise OpenEnvError(f"{address} cannot be reached: {type(error).__name__}: {error}") from error
        session = _Session(socket, options)
        try:
            with model.timer("tool"):
                session.first = await session.ask("reset", reset)
            return session
        except BaseException as error:
            await session.close()
            if getattr(error, "code", "") != "CAPACITY_REACHED":
                raise
            if time.monotonic() + pause_s > until:
                raise WaitTimeout(f"{error}; no session became free within wait_s {options.wait_s:g} s") from error
        # Servers allow one session unless they say otherwise; others of this run may have it.
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _shown(told: Mapping[str, Any], options: _Options) -> str:
    """What the policy is shown of an observation."""
    observation, name = told.get("observation"), options.observation_field
    if name:
        if not isinstance(observation, Mapping) or name not in observation:
            raise UserError(f"openenv_workflow: no observation_field {name!r} in {observation!r:.200}")
        observation = observation[name]
    return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False, sort_keys=True)


def _action_in(reply: str, options: _Options) -> dict[str, Any] | None:
    """The action that a reply names; None: it names none."""
    given: Any = None
    if options.action == "json":
        given = _last_object(reply)
        return None if given is None else {**(options.action_args or {}), **given}
    if options.action == "number":
        given = find_action(reply, options.actions)
    else:
        marked = _ACTION.findall(reply)
        given = (marked[-1] if marked else reply).strip() or None
    return None if given is None else {**(options.action_args or {}), options.action_field: given}


def _last_object(reply: str) -> dict[str, Any] | None:
    """The last JSON object in a text that is in no other."""
    decoder, found, begin = json.JSONDecoder(), None, reply.find("{")
    while begin >= 0:
        try:
            value, end = decoder.raw_decode(reply, begin)
            found = value
        except (ValueError, RecursionError):  # the second of a reply that opens hundreds of them
            end = begin + 1
        begin = reply.find("{", end)
    return found
