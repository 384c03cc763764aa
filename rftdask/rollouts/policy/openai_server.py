"""Chat endpoint: a workflow's model as `POST /v1/chat/completions` on this machine, for programs that speak only HTTP.

Every request is a call of the model's own OpenAI client, so it is recorded with the tokens that were sampled. One
endpoint lives as long as one attempt at a rollout, on a port of its own, and answers only who knows the key of this
process. `failure`: the first exception of a request, which its asker is told only as text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from rftdask.rollouts.policy.openai_client import CompletionStream
from rftdask.rollouts.workflows.base import PolicyModel

if TYPE_CHECKING:
    from aiohttp.web import Request, Response, StreamResponse

KEY_VARIABLE = "RFTDASK_POLICY_API_KEY"
"""Environment variable of the key, for clients that take it from there."""
_CLOSE_S = 1.0


class ChatEndpoint:
    """Example:
    async with open_endpoint(model) as endpoint:
        ...  # ask at endpoint.url with the key in $RFTDASK_POLICY_API_KEY
    """

    def __init__(self, model: PolicyModel) -> None:
        self.url = ""
        self.failure: Exception | None = None
        self._client = model.openai_client()

    async def answer(self, request: Request) -> StreamResponse:
        """Answer one request."""
        from aiohttp import web  # late: see open_endpoint

        def refused(status: int, text: str) -> Response:
            error = {"message": text, "type": "invalid_request_error", "code": None}
            return web.json_response({"error": error}, status=status)

        # Before the body is looked at: every user of this machine reaches the port.
        if request.headers.get("Authorization") != f"Bearer {os.environ[KEY_VARIABLE]}":
            return refused(401, "wrong key")
        try:
            body = await request.json()
            body["messages"] = [plain_message(message) for message in body["messages"]]
            answer = await self._client.chat.completions.create(**body)
        except Exception as error:
            self.failure = self.failure or error
            # Of these three it is what a program asked for and cannot have; others are the engine's, which the runner
            # sees by itself.
            status = 400 if isinstance(error, ValueError | TypeError | KeyError) else 500
            return refused(status, f"{type(error).__name__}: {error}")
        if not isinstance(answer, CompletionStream):
            return web.json_response(answer.model_dump(exclude_none=True))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for chunk in answer:
            await response.write(f"data: {chunk.model_dump_json(exclude_none=True)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


@contextlib.asynccontextmanager
async def open_endpoint(model: PolicyModel) -> AsyncIterator[ChatEndpoint]:
    """Serve the model on a free port of this machine while inside. Needs the package aiohttp."""
    from aiohttp import web  # late: only workflows that need an endpoint need aiohttp

    # One key for the process: programs that the workflow starts inherit it.
    os.environ.setdefault(KEY_VARIABLE, secrets.token_hex(16))
    endpoint = ChatEndpoint(model)
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", endpoint.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_S)
    await runner.setup()
    try:
        # This machine alone, on a port that the kernel picks: attempts side by side do not collide.
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        yield endpoint
    finally:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(runner.cleanup(), 5 * _CLOSE_S)


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is text. Raises: ValueError: a part of it is none, such as an image."""
    plain = dict(message)
    if isinstance(plain.get("content"), list):
        strange = [part for part in plain["content"] if part.get("type") != "text"]
        if strange:
            raise ValueError(f"a message holds {json.dumps(strange[0])[:100]}, and this model reads text only")
        plain["content"] = "".join(part["text"] for part in plain["content"])
    if plain["role"] == "developer":  # newer for system; chat templates do not know it
        plain["role"] = "system"
    return plain
