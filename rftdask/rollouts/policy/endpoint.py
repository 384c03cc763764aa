"""Endpoint: models as OpenAI's and Anthropic's APIs over HTTP on this machine, and clients of openai that ask them.

There is one for each event loop that needs one, on a port of its own and on loopback alone. A client's key says which
model it asks: every attempt at a rollout has keys of its own, which end with it. A stream begins with the first text
that is certain, and with the answer where none is before. A request whose asker goes away is called off. What it needs
of openai, starlette and uvicorn is imported late: they are optional, and take most of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload
from weakref import WeakKeyDictionary

from rftdask.errors import UserError
from rftdask.rollouts.policy.answer_stream import EventStream
from rftdask.rollouts.policy.openai_api import MODELS, WRONG_KEY, OpenAIAnswer, refusal

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from uvicorn import Server

    from rftdask.rollouts.policy.blocking_client import BlockingClient

MAX_BODY_BYTES = 64 << 20
"""Longest request."""
_IDLE_S = 3600
"""Seconds that a connection stays open unused: one that closes as a request comes would lose it."""
_CLOSE_S = 1
"""Seconds that requests under way have when the event loop ends."""
_GONE = 499
"""Nobody reads it."""
_endpoints: WeakKeyDictionary[asyncio.AbstractEventLoop, _Endpoint] = WeakKeyDictionary()


class Answering(Protocol):
    """A model that answers requests of OpenAI's API."""

    async def openai(self, path: str, body: Any, stream: EventStream | None = None) -> OpenAIAnswer:
        """The answer to the body of a POST to `path`. stream: is told its text while it is sampled, as far as the model
        can say; None: nobody wants to know."""


@overload
def open_client(model: Answering, *, blocking: Literal[False]) -> AsyncOpenAI: ...
@overload
def open_client(model: Answering, *, blocking: Literal[True]) -> OpenAI: ...
def open_client(model: Answering, *, blocking: bool) -> AsyncOpenAI | OpenAI:
    """A client of the model, for the event loop that runs now and any other program of this machine; `blocking`: an
    OpenAI, for other threads.

    Raises: UserError: a package that it needs is not installed.
    """
    try:
        import openai

        from rftdask.rollouts.policy.blocking_client import BlockingClient
    except ImportError as error:
        raise UserError(f"openai_client() needs the extra openai; pip install 'rftdask[openai]' ({error})") from error
    loop = asyncio.get_running_loop()
    endpoint = _endpoints.get(loop)
    if endpoint is None:
        endpoint = _endpoints[loop] = _Endpoint(loop)
    key = secrets.token_hex(16)
    endpoint.models[key] = model
    # No deadline: the attempt has one. No proxy, and no certificates, whose list takes longer to read than an answer to
    # come.
    options: Any = {"base_url": endpoint.url, "api_key": key, "timeout": None}
    http: Any = {"trust_env": False, "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), "timeout": None}
    client: AsyncOpenAI | BlockingClient
    if blocking:
        client = BlockingClient(**options, http_client=openai.DefaultHttpxClient(**http))
        client.answering_loop = loop
    else:
        client = endpoint.clients[key] = openai.AsyncOpenAI(
            **options, http_client=openai.DefaultAsyncHttpxClient(**http)
        )
    return client


def close_client(client: AsyncOpenAI | OpenAI) -> None:
    """Close a client, and forget its key. Called where it was opened. Idempotent."""
    with contextlib.suppress(RuntimeError):  # no event loop runs any more, and the endpoint has ended with it
        endpoint = _endpoints.get(asyncio.get_running_loop())
        if endpoint is not None:
            endpoint.forget(client.api_key)
    if not hasattr(client, "answering_loop"):
        return
    client.close()


class _Endpoint:
    """The endpoint of an event loop; it ends with it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.models: dict[str, Answering] = {}
        """By the key of those that may ask."""
        self.clients: dict[str, AsyncOpenAI] = {}
        self._ended: list[AsyncOpenAI] = []
        """Clients that are to be closed."""
        self._closing: asyncio.Task[None] | None = None
        # Bound at once, so that the address is known: the kernel keeps those waiting that come before it is served.
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        # A request that went well is no news.
        for name in ("httpx", "httpx2"):
            logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger(name).level))
        self._task = loop.create_task(self._serve())

    def forget(self, key: str) -> None:
        """Answer no more to the key. Idempotent."""
        self.models.pop(key, None)
        client = self.clients.pop(key, None)
        if client is not None:
            self._ended.append(client)
            if self._closing is None or self._closing.done():
                self._closing = asyncio.create_task(self._close_ended())

    async def _close_ended(self) -> None:
        while self._ended:
            # Out of the list once it is closed: the loop may end before.
            await self._ended[0].close()
            del self._ended[0]

    async def _serve(self) -> None:
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [
            Route("/v1/models", self._models),
            Route("/v1/{path:path}", self._answer, methods=["GET", "POST"]),
        ]
        server = web_server(Starlette(routes=routes), timeout_graceful_shutdown=_CLOSE_S)
        try:
            await server.serve(sockets=[self._socket])
        finally:
            self._ended += self.clients.values()
            await self._close_ended()
            if server.started:
                await server.shutdown(sockets=[self._socket])
            self._socket.close()

    def _model(self, request: Request) -> Answering | None:
        key = key_in(request)
        # By comparisons that take as long for every wrong key.
        return next(
            (model for own, model in self.models.items() if hmac.compare_digest(own.encode(), key.encode())), None
        )

    async def _models(self, request: Request) -> Response:
        if self._model(request) is None:
            return as_response(WRONG_KEY)
        return as_response(MODELS)

    async def _answer(self, request: Request) -> Response:
        # Before the body is looked at: every user of this machine reaches the port.
        model = self._model(request)
        if model is None:
            return as_response(WRONG_KEY)
        return await answer_http(model, request)


def web_server(app: Starlette, **options: Any) -> Server:
    """A server of uvicorn that leaves the signals and the log of the process alone."""
    from uvicorn import Config, Server

    class OwnServer(Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    quiet: dict[str, Any] = {"log_config": None, "log_level": "warning", "access_log": False, "lifespan": "off"}
    return OwnServer(Config(app, http="h11", ws="none", timeout_keep_alive=_IDLE_S, **quiet, **options))


async def answer_http(model: Answering, request: Request) -> Response:
    """The response to a request of OpenAI's API; called off when its asker goes away."""
    path = request.path_params["path"]
    if request.method != "POST":
        return as_response(refusal(f"{request.method} {path} is not there; POST to it", code="not_found", status=404))
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            return as_response(refusal(f"the request is longer than {MAX_BODY_BYTES} bytes", status=413))
    try:
        asked = json.loads(body)
    except ValueError as error:
        return as_response(refusal(f"the body is no JSON: {error}"))
    stream = EventStream(path, asked) if isinstance(asked, Mapping) and asked.get("stream") is True else None
    answering = asyncio.ensure_future(model.openai(path, asked, stream))
    gone = asyncio.ensure_future(request.receive())
    begun = asyncio.ensure_future(asyncio.Event().wait() if stream is None else stream.news.wait())
    streaming = False
    try:
        await asyncio.wait({answering, gone, begun}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done() and not answering.done():
            return as_response(refusal("the asker has gone away", status=_GONE))
        if not answering.done() and stream is not None:
            streaming = True
            return streamed_response(stream, answering, gone)
        answer = answering.result()
    except (
        Exception
    ) as error:  # the model's; who asked is told, and the runner sees the engine's own failures by itself
        return as_response(refusal(f"{type(error).__name__}: {error}", status=500))
    finally:
        begun.cancel()
        if not streaming:
            answering.cancel()
            gone.cancel()
    if answer.status != 200 or stream is None:
        return as_response(answer)
    return streamed_response(stream, answering, gone, answer.headers)


def streamed_response(
    stream: EventStream,
    answering: asyncio.Future[OpenAIAnswer],
    gone: asyncio.Future[Any],
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The response that tells a stream; when its asker goes away, the answer is called off."""
    from starlette.responses import StreamingResponse

    class Told(StreamingResponse):
        async def __call__(self, *args: Any) -> None:
            try:
                await super().__call__(*args)
            finally:
                answering.cancel()
                gone.cancel()

    async def events() -> AsyncIterator[bytes]:
        gone.add_done_callback(lambda _: answering.cancel())
        is_anthropic = False
        async for event in stream.events(answering):
            # What the Responses and the Messages API stream has names.
            is_anthropic = event.get("type") == "message_stop"
            name = f"event: {event['type']}\n" if "type" in event else ""
            yield f"{name}data: {json.dumps(event)}\n\n".encode()
        if not is_anthropic and not answering.cancelled():
            yield b"data: [DONE]\n\n"

    return Told(events(), headers={**stream.headers, **(headers or {})}, media_type="text/event-stream")


def key_in(request: Request) -> str:
    """The key of a request, as OpenAI's clients or as Anthropic's give it; "": there is none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def as_response(answer: OpenAIAnswer) -> Response:
    """The answer over HTTP. An error is not to be tried again, where it would come again."""
    from starlette.responses import JSONResponse

    retry = {} if answer.status in (200, 429, 503) else {"x-should-retry": "false"}
    return JSONResponse(answer.body, answer.status, {**retry, **answer.headers})
