"""Environments on OpenEnv servers. An episode is one WebSocket session, which has its own environment on the server;
the HTTP routes create a new one per request.

It implements the messages of openenv-core 0.3 (sends `reset` and `step`, receives `observation` and `error`), because
the package's client requires a web server and browser widgets. Every message has a timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from rftdask.data.task import Task
from rftdask.errors import RoleError, UserError, WaitTimeout
from rftdask.rollouts.workflows.base import PolicyModel, Reward
from rftdask.rollouts.workflows.episode import ACTION, Observation, find_action, play, seed_of
from rftdask.rollouts.workflows.registry import workflow
from rftdask.storage.safe_text import mask

_MAX_MESSAGE_BYTES = 16 * 2**20
"""Largest message of a server; observations become prompts, which are much shorter."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
"""First and longest pause between tries of a full server."""
_CLOSE_S = 2.0
"""Seconds that a server has to close a session."""


class OpenEnvError(RoleError):
    """An OpenEnv server refused, failed or disconnected. code: the server's, such as EXECUTION_ERROR; "": none."""

    def __init__(self, text: str, code: str = "") -> None:
        super().__init__(text)
        self.code = code


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
        known = {option.name for option in fields(cls)}
        unknown = sorted(task.workflow_args.keys() - known)
        if unknown:
            raise UserError(f"openenv_workflow: unknown workflow_args {', '.join(unknown)}; use {sorted(known)}")
        options = cls(**task.workflow_args)
        if urlsplit(options.base_url).scheme not in ("http", "https", "ws", "wss"):
            advice = "give the address of the server, such as http://localhost:8000"
            raise UserError(f"openenv_workflow: workflow_args.base_url is {options.base_url!r}; {advice}")
        if options.action not in ("text", "json", "number") or (options.action == "number") != bool(options.actions):
            value = f"{options.action!r} with {len(options.actions)} actions"
            advice = "use text, json, or number with the words of the actions"
            raise UserError(f"openenv_workflow: workflow_args.action is {value}; {advice}")
        return options

    @property
    def socket_url(self) -> str:
        scheme, _, rest = self.base_url.partition("://")
        return f"{ {'http': 'ws', 'https': 'wss'}.get(scheme, scheme) }://{rest.rstrip('/')}/ws"


@workflow("openenv_workflow", in_process=True, requires={"websockets": "openenv"})
async def openenv_workflow(task: Task, model: PolicyModel) -> Reward:
    """Play one episode on an OpenEnv server, as one chat. Each step's reward is the environment's; the rollout's is
    their sum. Metrics: num_turns, num_invalid, env_done.

    `workflow_args`:
        base_url: address of the server.
        action: how a reply becomes an action. "text": the reply, or the contents of its last <action> </action>;
            "json": its last JSON object, which is the whole action; "number": index of the last of `actions` in it.
        action_field (message): field for a text or number; action_args: further fields of the action.
        observation_field: the field to show; default: all, as JSON.
        reset_args: arguments of the reset in addition to the seed, which is the row's or the task's index.
        rules: system prompt; max_turns (16); invalid_reward (-0.1): for a reply without an action, which changes
            nothing.
        timeout_s (60): timeout of each message; wait_s (600): longest wait for a free session on a full server.

    Raises: OpenEnvError: the server refused, failed or disconnected; WaitTimeout: no answer in time; UserError.
    """
    options = _Options.of(task)
    session = await _begin(options, {"seed": seed_of(task), **(options.reset_args or {})}, model)

    async def act(reply: str) -> Observation | None:
        action = _action_in(reply, options)
        return None if action is None else _observation(await session.ask("step", action), options)

    try:
        episode = await play(
            model,
            _observation(session.first, options),
            act,
            rules=options.rules,
            max_turns=options.max_turns,
            invalid_reward=options.invalid_reward,
        )
    finally:
        await session.close()
    metrics = {"num_invalid": float(episode.num_invalid), "env_done": float(episode.is_over)}
    return episode.as_reward(episode.total, **metrics)


class _Session:
    first: Mapping[str, Any]
    """Answer to the reset of its environment."""

    def __init__(self, socket: Any, options: _Options) -> None:
        self._socket, self._url, self._timeout_s = socket, mask(options.socket_url), options.timeout_s

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """{"observation", "reward", "done"} after `reset` or `step`. Raises: OpenEnvError, WaitTimeout."""
        closed = importlib.import_module("websockets.exceptions").ConnectionClosed
        try:
            async with asyncio.timeout(self._timeout_s):
                with contextlib.suppress(closed):  # messages sent before it closed can still be received
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                answer = json.loads(await self._socket.recv())
        except TimeoutError as error:
            raise WaitTimeout(f"{self._url} did not answer a {kind} within timeout_s {self._timeout_s:g} s") from error
        except (closed, OSError, ValueError) as error:
            raise OpenEnvError(f"{self._url} failed on a {kind}: {type(error).__name__}: {error}") from error
        content = answer.get("data") if isinstance(answer, Mapping) else None
        if not isinstance(content, Mapping) or answer.get("type") not in ("observation", "error"):
            raise OpenEnvError(f"{self._url} answered a {kind} with {answer!r:.200}, which is not a message of OpenEnv")
        if answer["type"] == "error":
            details = f" {content['errors']!r:.300}" if content.get("errors") else ""
            code = str(content.get("code", ""))
            raise OpenEnvError(f"{self._url} refused a {kind} ({code}): {content.get('message')}{details}", code)
        return content

    async def close(self) -> None:
        """End the session and its environment; if the server does not answer, abort the connection."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._socket.close()
        except (TimeoutError, OSError):
            self._socket.transport.abort()


async def _begin(options: _Options, reset: Mapping[str, Any], model: PolicyModel) -> _Session:
    # Wait until the server has a free session, and reset its environment.
    client = importlib.import_module("websockets.asyncio.client")  # by name, because it is optional
    refused = importlib.import_module("websockets.exceptions").WebSocketException
    until, pause_s = time.monotonic() + options.wait_s, _PAUSE_S
    # A server on this machine needs no proxy, even if environment variables set one.
    proxy = {"proxy": None} if urlsplit(options.base_url).hostname in ("localhost", "127.0.0.1", "::1") else {}
    while True:
        try:
            socket = await client.connect(
                options.socket_url, open_timeout=options.timeout_s, max_size=_MAX_MESSAGE_BYTES, **proxy
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
        # By default servers allow one session, which another rollout of this run may have.
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _observation(answer: Mapping[str, Any], options: _Options) -> Observation:
    observation, name = answer.get("observation"), options.observation_field
    if name:
        if not isinstance(observation, Mapping) or name not in observation:
            raise UserError(f"openenv_workflow: no observation_field {name!r} in {observation!r:.200}")
        observation = observation[name]
    text = observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False, sort_keys=True)
    # Environments may send null as the reward of a step.
    return Observation(text, float(answer.get("reward") or 0.0), bool(answer.get("done")))


def _action_in(reply: str, options: _Options) -> dict[str, Any] | None:
    """Return the action that a reply names; None: it names none."""
    value: Any = None
    if options.action == "json":
        value = _last_object(reply)
        return None if value is None else {**(options.action_args or {}), **value}
    if options.action == "number":
        value = find_action(reply, options.actions)
    else:
        marked = ACTION.findall(reply)
        value = (marked[-1] if marked else reply).strip() or None
    return None if value is None else {**(options.action_args or {}), options.action_field: value}


def _last_object(reply: str) -> dict[str, Any] | None:
    """Return the last JSON object of a text that is not inside another one."""
    decoder, last, begin = json.JSONDecoder(), None, reply.find("{")
    while begin >= 0:
        try:
            last, end = decoder.raw_decode(reply, begin)
        except (ValueError, RecursionError):  # RecursionError: hundreds of open braces
            end = begin + 1
        begin = reply.find("{", end)
    return last
