"""Endpoint: OpenAI's and Anthropic's APIs over HTTP on this machine, and openai clients that use them.

Each event loop that needs an endpoint has one, on its own port and only on loopback. A client's key selects the model:
every attempt at a rollout has its own keys, which end with it. A stream begins with the first text that can no longer
change, or else with the complete answer. When a client disconnects, its request is cancelled. openai, starlette and
uvicorn are imported late: they are optional, and their import takes most of a second.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

from rftdask.errors import UserError
from rftdask.rollouts.loop_watchdog import BlockedLoopError
from rftdask.rollouts.policy.answer_stream import TRANSLATED, EventStream, OnText
from rftdask.rollouts.policy.openai_api import CHAT, COMPLETIONS, MODELS, WRONG_KEY, OpenAIAnswer, model_of, refusal
from rftdask.storage.checked_json import parse_portable

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from uvicorn import Server

API_PATHS = (CHAT, COMPLETIONS, *TRANSLATED)
"""Paths below /v1 that answer a POST."""
MAX_BODY_BYTES = 64 << 20
"""Largest request body."""
_KEEP_ALIVE_S = 3600
"""Seconds that an unused connection stays open: a request would fail on a connection that closes as it arrives."""
_CLOSE_S = 1
"""Seconds that running requests have to finish when the event loop ends."""
_CLIENT_CLOSED = 499
"""Status of a request whose client has disconnected; nobody reads it."""
TOO_LONG = refusal(f"the request is longer than {MAX_BODY_BYTES} bytes", status=413)
BLOCKED = "a blocking call on the event loop would wait for itself; await the async method instead"
AnswerFn: TypeAlias = Callable[[str, Any, OnText | None], Awaitable[OpenAIAnswer]]
"""(path, body, on_text) -> answer to a POST of `body` to `path`. on_text: receives the text while it is sampled."""
_endpoints: WeakKeyDictionary[asyncio.AbstractEventLoop, _Endpoint] = WeakKeyDictionary()


def open_client(answer: AnswerFn, *, blocking: bool) -> AsyncOpenAI | OpenAI:
    """Open a client whose requests are answered by `answer` on the running event loop. Its address and key also work
    for other programs. blocking: an OpenAI for other threads; it raises BlockedLoopError on the loop.

    Raises: UserError: a required package is not installed.
    """
    try:
        import openai
    except ImportError as error:
        raise UserError(f"openai_client() needs the extra openai; pip install 'rftdask[openai]' ({error})") from error
    loop = asyncio.get_running_loop()
    if (endpoint := _endpoints.get(loop)) is None:
        endpoint = _endpoints[loop] = _Endpoint(loop)
    key = secrets.token_hex(16)
    endpoint.models[key] = answer
    # No timeout: the attempt has one. No proxy and no CA certificates, whose loading takes longer than an answer.
    options: Any = {"base_url": endpoint.url, "api_key": key, "timeout": None}
    http: Any = {"trust_env": False, "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), "timeout": None}
    if not blocking:
        http_client = openai.DefaultAsyncHttpxClient(**http)
        client = endpoint.clients[key] = openai.AsyncOpenAI(**options, http_client=http_client)
        return client

    class BlockingClient(openai.OpenAI):
        def request(self, *args: Any, **options: Any) -> Any:
            with contextlib.suppress(RuntimeError):  # no loop runs in this thread, as intended
                if asyncio.get_running_loop() is loop:
                    raise BlockedLoopError(BLOCKED)
            return super().request(*args, **options)

    return BlockingClient(**options, http_client=openai.DefaultHttpxClient(**http))


def close_client(client: AsyncOpenAI | OpenAI) -> None:
    """Close a client and invalidate its key. Called on the loop where it was opened. Idempotent."""
    from openai import OpenAI  # late: see above

    with contextlib.suppress(RuntimeError):  # the event loop has ended, and the endpoint with it
        endpoint = _endpoints.get(asyncio.get_running_loop())
        if endpoint is not None:
            endpoint.forget(client.api_key)
    if isinstance(client, OpenAI):
        client.close()


class _Endpoint:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.models: dict[str, AnswerFn] = {}
        """Models by key."""
        self.clients: dict[str, AsyncOpenAI] = {}
        self._to_close: list[AsyncOpenAI] = []
        self._closing: asyncio.Task[None] | None = None
        # Bound at once, so that the address is known: the kernel queues connections until the server accepts them.
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        # These log every successful request at level INFO.
        for name in ("httpx", "httpx2"):
            logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger(name).level))
        self._task = loop.create_task(self._serve())

    def forget(self, key: str) -> None:
        """Invalidate a key. Idempotent."""
        self.models.pop(key, None)
        client = self.clients.pop(key, None)
        if client is not None:
            self._to_close.append(client)
            if self._closing is None or self._closing.done():
                self._closing = asyncio.create_task(self._close_clients())

    async def _close_clients(self) -> None:
        while self._to_close:
            # Removed only once it is closed, because the loop may end in between.
            await self._to_close[0].close()
            del self._to_close[0]

    async def _serve(self) -> None:
        from starlette.applications import Starlette
        from starlette.routing import Route

        # Access is checked before the body is read: every user of this machine can reach the port.
        async def answer(request: Request) -> Response:
            model = self._model(request)
            return as_response(WRONG_KEY) if model is None else await answer_http(model, request)

        async def models(request: Request) -> Response:
            name = request.path_params.get("name")
            known = MODELS if name is None else model_of(name)
            return as_response(WRONG_KEY if self._model(request) is None else known)

        routes = [
            *(Route(path, models) for path in ("/v1/models", "/v1/models/{name:path}")),
            *(Route(f"/v1/{path}", answer, methods=["POST"]) for path in API_PATHS),
        ]
        app = Starlette(routes=routes, exception_handlers=ERRORS)
        server = web_server(app, timeout_graceful_shutdown=_CLOSE_S)
        try:
            await server.serve(sockets=[self._socket])
        finally:
            self._to_close += self.clients.values()
            await self._close_clients()
            if server.started:
                await server.shutdown(sockets=[self._socket])
            self._socket.close()

    def _model(self, request: Request) -> AnswerFn | None:
        key = key_in(request).encode()
        # Comparisons take the same time for every wrong key.
        return next((model for k, model in self.models.items() if hmac.compare_digest(k.encode(), key)), None)


def web_server(app: Starlette, **options: Any) -> Server:
    """Make a uvicorn server that does not touch the signals and the logging of the process."""
    from uvicorn import Config, Server
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        def send_400_response(self, msg: str) -> None:  # in OpenAI's form
            body = json.dumps(refusal(msg).body).encode()
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
            cycle = self.cycle
            if cycle is None or cycle.response_complete or not cycle.response_started:  # else it would be part of that
                self.transport.write(f"HTTP/1.1 400 Bad Request\r\n{head}\r\n\r\n".encode() + body)
                if cycle is not None:
                    cycle.disconnected = True  # it sends no second response
            self.transport.close()

    class QuietServer(Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    quiet: dict[str, Any] = {"log_config": None, "log_level": "warning", "access_log": False, "lifespan": "off"}
    return QuietServer(Config(app, http=Protocol, ws="none", timeout_keep_alive=_KEEP_ALIVE_S, **quiet, **options))


async def answer_http(
    answer: AnswerFn,
    request: Request,
    stream_headers: Mapping[str, str] | None = None,
    on_renamed: Callable[[str, str], None] = lambda old, new: None,
) -> Response:
    """Respond to a request of OpenAI's API. stream_headers: `answer` may add to them before its first text."""
    path = request.scope["path"].rpartition("/v1/")[2]
    data = await read_body(request)
    if data is None:
        return as_response(TOO_LONG)
    try:
        body = parse_portable(data)
    except ValueError as error:
        return as_response(refusal(f"the body is not valid JSON: {error}"))
    is_stream = isinstance(body, Mapping) and body.get("stream") is True
    stream = EventStream(path, body, on_renamed) if is_stream else None
    answering = asyncio.ensure_future(answer(path, body, None if stream is None else stream.add_text))
    disconnected = asyncio.ensure_future(request.receive())
    has_text = asyncio.ensure_future(asyncio.Event().wait() if stream is None else stream.has_text.wait())
    is_streaming = False
    try:
        await asyncio.wait({answering, disconnected, has_text}, return_when=asyncio.FIRST_COMPLETED)
        if disconnected.done() and not answering.done():
            return as_response(refusal("the client has disconnected", status=_CLIENT_CLOSED))
        if stream is not None and (not answering.done() or answering.result().status == 200):
            is_streaming = True
            return _streamed_response(stream, answering, disconnected, stream_headers or {})
        return as_response(answering.result())
    except Exception as error:  # the model's error, reported to the client; the runner sees engine failures itself
        return as_response(refusal(f"{type(error).__name__}: {error}", status=500))
    finally:
        has_text.cancel()
        if not is_streaming:
            answering.cancel()
            disconnected.cancel()


def _streamed_response(
    stream: EventStream,
    answering: asyncio.Future[OpenAIAnswer],
    disconnected: asyncio.Future[Any],
    headers: Mapping[str, str],
) -> Response:
    from starlette.responses import StreamingResponse

    class CancellingResponse(StreamingResponse):
        async def __call__(self, *args: Any) -> None:
            try:
                await super().__call__(*args)
            finally:
                answering.cancel()
                disconnected.cancel()

    async def events() -> AsyncIterator[bytes]:
        disconnected.add_done_callback(lambda _: answering.cancel())
        is_anthropic = False
        async for event in stream.events(answering):
            # Events of the Responses and the Messages API have names.
            is_anthropic = event.get("type") == "message_stop"
            name = f"event: {event['type']}\n" if "type" in event else ""
            yield f"{name}data: {json.dumps(event)}\n\n".encode()
        if not is_anthropic and not answering.cancelled():
            yield b"data: [DONE]\n\n"

    return CancellingResponse(events(), headers=dict(headers), media_type="text/event-stream")


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes | None:
    """Return the body of a request, whether or not it states its length; None: it is longer than `max_bytes`."""
    from starlette.exceptions import HTTPException  # late: see above
    from starlette.requests import ClientDisconnect

    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > max_bytes:
                return None
    except ClientDisconnect:  # otherwise it would be logged as an error of the server
        raise HTTPException(_CLIENT_CLOSED, "the client has disconnected") from None
    return bytes(data)


def _error(request: Request, error: Exception) -> Response:
    status, path = getattr(error, "status_code", 500), request.scope["path"]
    what = f"{request.method} {path!r:.200}"
    known = {404: f"{what} does not exist", 405: f"{what} is not supported"}
    if "/v1/" in path:
        known[404] += f"; use {', '.join(API_PATHS)} or models"
    text = known.get(status, f"{type(error).__name__}: {error}")
    answer = refusal(text, code="not_found" if status == 404 else None, status=status)
    return as_response(replace(answer, headers=getattr(error, "headers", None) or {}))


ERRORS: Mapping[Any, Any] = {404: _error, 405: _error, 500: _error}
"""Handlers with which an application answers errors in OpenAI's form."""


def key_in(request: Request) -> str:
    """Return the key of a request as OpenAI's or Anthropic's clients send it; "": none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def as_response(answer: OpenAIAnswer) -> Response:
    """Return the answer over HTTP. Permanent errors ask clients not to retry."""
    from starlette.responses import JSONResponse

    retry = {} if answer.status in (200, 429, 503) else {"x-should-retry": "false"}
    return JSONResponse(answer.body, answer.status, {**retry, **answer.headers})
