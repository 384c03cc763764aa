"""Server of `rftdask serve`: the engines of a run behind OpenAI's API, for remote agents.

    POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages    recorded by session
    POST /sessions  {"task_id"?}                  opens a session with its own key and address
    POST /feedback  {"session_id"?, "reward", "task_id"?}    ends a session: 200 once the reward is durable
    POST /feedback  {"msg_ids", "reward", "task_id"?}        ends the sessions of these answers as one rollout
    POST /commit                                  commits sessions that still wait for others of their task
    GET  /health                                  served version and current load

A request names its session by its key, its address (/sessions/ID/v1), the header X-Session-ID or `session_id` in the
body. Sessions without a reward exist only in memory; rewarded ones belong to the SessionStore. Newer weights are served
as they are published: each answer has one version, a session may span several, and each turn records its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import importlib
import json
import logging
import os
import re
import secrets
import signal
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rftdask.buffer.log import open_log
from rftdask.buffer.log.schema import Experience
from rftdask.config import Config, replace
from rftdask.data.images import ImageProcessor, can_be_given_images
from rftdask.data.task import Task
from rftdask.data.tokenizer import load_tokenizer
from rftdask.engines.spec import model_sampling
from rftdask.errors import StorageError, UserError
from rftdask.rollouts.policy.answer_parsers import AnswerParser
from rftdask.rollouts.policy.answer_stream import OnText
from rftdask.rollouts.policy.endpoint import (
    API_PATHS,
    ERRORS,
    TOO_LONG,
    answer_http,
    as_response,
    key_in,
    read_body,
    web_server,
)
from rftdask.rollouts.policy.openai_api import MODELS, WRONG_KEY, OpenAIAnswer, model_of, refusal
from rftdask.rollouts.policy.recording import NoMoreCallsError, RecordingModel, ServedModel
from rftdask.rollouts.policy.request_queues import RolloutKey
from rftdask.rollouts.rollout import Rollout
from rftdask.rollouts.workflows.base import Reward
from rftdask.run.lease import Lease
from rftdask.run.run_folder import open_run, private_files
from rftdask.serve.engines import EnginePool, LocalEngines
from rftdask.serve.load_balancer import MAX_UNSIZED, FullError, LoadBalancer, NoEngineError
from rftdask.serve.openapi import SESSION_ID, document
from rftdask.serve.sessions import TASKSET, RewardedSession, SessionStore, one_rollout
from rftdask.storage import Storage, open_storage
from rftdask.storage.checked_json import parse_portable
from rftdask.synchronizer.published import Published

log = logging.getLogger(__name__)

TOKEN_VARIABLE = "RFTDASK_SERVE_TOKEN"
"""Environment variable that holds the access token. Unset: each start generates a new one."""
_SESSION_ID = re.compile(SESSION_ID)
_WRONG_ID = refusal(
    "session_id must be 1 to 100 letters, digits, dots, hyphens or underscores, the first not a dot", "session_id"
)
_OTHER_SESSION = refusal("the key, the address or a header names another session", "session_id", status=403)
_RETRY_AFTER_S = 1
_POLL_INTERVAL_S = 0.2
"""Seconds between polls for complete groups, new weights, and engines that come and go."""
_KEPT_ANSWERS = 4
"""Answers kept per session, for clients that lost a reply and retry."""
_KEPT_IDS = 100_000
"""Newest answer ids kept, for rewards that name answers."""
_CLOSE_S = 5
"""Seconds that running requests have to finish at shutdown."""


@dataclass(frozen=True)
class ServeOptions:
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    max_concurrent: int | None = None
    """Concurrent requests; further ones get status 429. None: limited by the engines' memory."""
    group_age_s: float = 600.0
    """Seconds that a session waits for others of its task before it is committed without them."""
    session_idle_s: float = 3600.0
    """Seconds without a request or reward after which a session is forgotten."""
    tls_cert: str = ""
    """Certificate chain of the server, a PEM file; "": plain HTTP."""
    tls_key: str = ""
    """Private key of the certificate, a PEM file."""

    @classmethod
    def of(cls, config: Config) -> ServeOptions:
        return cls(config.explorer.listen_address, config.explorer.proxy_port)

    @property
    def tls(self) -> dict[str, str]:
        """TLS options for uvicorn. Raises: UserError: the files are not a certificate and its key."""
        if not self.tls_cert and not self.tls_key:
            return {}
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_cert, self.tls_key, password="")
        except OSError as error:  # includes ssl.SSLError
            raise UserError(
                f"--tls-cert {self.tls_cert!r} and --tls-key {self.tls_key!r} are not a certificate and its key; give "
                f"PEM files without a password: {error}"
            ) from error
        return {"ssl_certfile": self.tls_cert, "ssl_keyfile": self.tls_key}


@dataclass
class _Session:
    id: str
    task: str
    model: RecordingModel
    used_s: float
    """Monotonic time of its last request."""
    num_running: int = 0
    is_ending: bool = False
    """True while its reward is being stored."""
    answers: OrderedDict[bytes, OpenAIAnswer] = field(default_factory=OrderedDict)
    """Most recent answers by request hash."""


class PolicyServer:
    """The sessions and the ASGI application of a server, without sockets and processes."""

    def __init__(
        self, config: Config, served: ServedModel, store: SessionStore, token: str, options: ServeOptions
    ) -> None:
        self.weights = Published(0, "", "")
        """Oldest weights that an engine serves."""
        self.num_engines = 0
        # Clients of an API expect an error, after which they shorten the conversation themselves.
        limits = served.limits.model_copy(update={"enable_prompt_truncation": False})
        self._config, self._served = config, dataclasses.replace(served, limits=limits)
        self._store, self._token, self._options = store, token, options
        self._sessions: dict[str, _Session] = {}
        self._session_of_answer: OrderedDict[str, str] = OrderedDict()
        """Answer id -> its session, or the session under which it was rewarded."""
        self._num_running = 0

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/openapi.json", self._document),
                Route("/sessions", self._open, methods=["POST"]),
                Route("/feedback", self._feedback, methods=["POST"]),
                Route("/commit", self._commit, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._models),
                Route("/sessions/{session}/v1/models", self._models),
                Route("/sessions/{session}/v1/models/{name:path}", self._models),
                *(
                    Route(f"{prefix}/v1/{path}", self._answer, methods=["POST"])
                    for prefix in ("", "/sessions/{session}")
                    for path in API_PATHS
                ),
            ],
            exception_handlers={
                **ERRORS,
                _Refused: lambda request, refused: as_response(refused.args[0]),
                StorageError: _storage_failed,
            },
        )

    def key_of(self, session: str) -> str:
        """API key that is valid only for this session."""
        return f"{session}.{hmac.new(self._token.encode(), session.encode(), hashlib.sha256).hexdigest()[:32]}"

    async def commit_groups(self) -> None:
        """Commit complete groups and forget idle sessions. Raises: StorageError."""
        await asyncio.to_thread(self._store.commit_groups)
        oldest_s = time.monotonic() - self._options.session_idle_s
        for session in list(self._sessions.values()):
            if session.used_s < oldest_s and not (session.num_running or session.is_ending):
                session.model.close()
                del self._sessions[session.id]

    def _authorize(self, request: Request) -> str:
        """The session that a request names, "" if it names none. Raises: _Refused: its key is not valid."""
        key = key_in(request)
        named = str(request.path_params.get("session") or request.headers.get("x-session-id") or "")
        if hmac.compare_digest(key.encode(), self._token.encode()):
            if named and not _SESSION_ID.fullmatch(named):
                raise _Refused(_WRONG_ID)
            return named
        session = key.rpartition(".")[0]
        # A session's key is valid only for that session, whatever else the request names.
        is_valid = named in ("", session) and hmac.compare_digest(self.key_of(session).encode(), key.encode())
        if not session or not is_valid:
            raise _Refused(WRONG_KEY)
        return session

    def _session(self, session_id: str, task: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            model = RecordingModel(
                self._served,
                key=RolloutKey(0, 0),
                group_id=f"session/{session_id}",
                run_seed=self._config.explorer.rollout_model.seed,
            )
            session = self._sessions[session_id] = _Session(session_id, task, model, 0.0)
        session.task = task or session.task
        session.used_s = time.monotonic()
        return session

    async def _ask(
        self,
        session_id: str,
        task: str,
        is_retry: bool,
        headers: dict[str, str],
        path: str,
        body: Any,
        on_text: OnText | None,
    ) -> OpenAIAnswer:
        """Answer a request of a session; the session's id is added to `headers` before any text is streamed."""
        named = body.get("session_id") if isinstance(body, Mapping) else None
        if named is not None and not (isinstance(named, str) and _SESSION_ID.fullmatch(named)):
            return _WRONG_ID
        if session_id and named not in (None, session_id):
            return _OTHER_SESSION
        session_id = session_id or named or secrets.token_hex(8)
        limit = self._options.max_concurrent
        if limit is not None and self._num_running >= limit:
            return _busy(f"the server has its limit of {limit} concurrent requests; try again later")
        if session_id not in self._sessions:
            has_ended = await asyncio.to_thread(self._store.find, session_id) is not None
        else:
            has_ended = self._sessions[session_id].is_ending
        if has_ended:
            return refusal(f"session {session_id} already has its reward; open another", "session_id", status=409)
        session = self._session(session_id, task)
        headers["X-Session-ID"] = session_id
        request_hash = hashlib.sha256(json.dumps([path, body], sort_keys=True).encode()).digest()
        if is_retry and request_hash in session.answers:
            return session.answers[request_hash]  # the client lost the reply
        self._num_running += 1
        session.num_running += 1
        try:
            answer = await session.model.openai(path, body, on_text)
        except FullError as error:
            return _busy(str(error), error.retry_after_s)
        except NoMoreCallsError as error:
            return refusal(f"session {session_id}: {error}; reward it and open another", "session_id", status=409)
        except NoEngineError as error:
            return _busy(str(error), code="service_unavailable", status=503)
        finally:
            self._num_running -= 1
            session.num_running -= 1
            session.used_s = time.monotonic()
        answer = OpenAIAnswer(answer.status, answer.body, headers={"X-Session-ID": session_id})
        if answer.status == 200:
            session.answers[request_hash] = answer
            if answer_id := answer.body.get("id"):  # token counts have none
                self._session_of_answer[answer_id] = session_id
            while len(self._session_of_answer) > _KEPT_IDS:
                self._session_of_answer.popitem(last=False)
            while len(session.answers) > _KEPT_ANSWERS:
                session.answers.popitem(last=False)
        return answer

    async def _health(self, request: Request) -> Response:
        return _success(
            policy_version=self.weights.version,
            engines=self.num_engines,
            under_way=self._num_running,
            open_sessions=len(self._sessions),
            waiting_sessions=self._store.num_waiting,
        )

    async def _document(self, request: Request) -> Response:
        return _success(**document())

    async def _models(self, request: Request) -> Response:
        self._authorize(request)
        name = request.path_params.get("name")
        return as_response(MODELS if name is None else model_of(name))

    async def _answer(self, request: Request) -> Response:
        session_id = self._authorize(request)
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        headers: dict[str, str] = {}
        answer = partial(self._ask, session_id, request.headers.get("x-task-id", ""), is_retry, headers)
        return await answer_http(answer, request, headers, self._rename_answer)

    def _rename_answer(self, old: str, new: str) -> None:
        """Let a reward name an answer by the id under which it was streamed."""
        if session := self._session_of_answer.get(old):
            self._session_of_answer[new] = session

    async def _open(self, request: Request) -> Response:
        if self._authorize(request):
            raise _Refused(WRONG_KEY)
        body = await _body(request)
        if body is None or not isinstance(body.get("task_id", ""), str):
            raise _refused('the body must be an object: {"task_id": TEXT} or {}')
        name = self._session(secrets.token_hex(8), body.get("task_id", "")).id
        return _success(session_id=name, api_key=self.key_of(name), base_path=f"/sessions/{name}/v1")

    async def _feedback(self, request: Request) -> Response:
        named, body = self._authorize(request), await _body(request)
        reward = None if body is None else body.get("reward")
        if body is None or isinstance(reward, bool) or not isinstance(reward, int | float):
            raise _refused('the body must be an object: {"reward": NUMBER, "session_id": ..., ...}', "reward")
        names = self._rewarded_sessions(named, body)
        session_id, sessions = names[0], [self._sessions[name] for name in names if name in self._sessions]
        task, metrics = body.get("task_id", ""), body.get("metrics", {})
        if not isinstance(task, str) or not isinstance(metrics, Mapping):
            raise _refused("task_id must be text, and metrics an object of numbers", "metrics")
        if len(sessions) < len(names):
            # Possibly a repeated request of a client that lost the first reply.
            stored = await asyncio.to_thread(self._store.find, session_id)
            if stored is None:
                missing = next(name for name in names if name not in self._sessions)
                raise _refused(f"session {missing} does not exist", "session_id", 404)
            if stored["reward"] != float(reward):
                raise _refused(f"session {session_id} already has the reward {stored['reward']}", "reward", 409)
            return _success(session_id=session_id, status="success")
        if any(session.num_running or session.is_ending for session in sessions):
            raise _refused("the session is being answered or rewarded; try again later", "session_id", 409)
        try:
            outcome = Reward(float(reward), dict(metrics))
            rows = one_rollout([self._rewarded(session, outcome) for session in sessions])
        except (TypeError, ValueError) as error:
            raise _refused(str(error)) from error
        for session in sessions:
            session.is_ending = True  # refuses further requests
        try:
            task = task or next((session.task for session in sessions if session.task), "")
            await asyncio.to_thread(self._store.put, RewardedSession(session_id, task, float(reward), tuple(rows)))
        except (ValueError, OverflowError) as error:
            raise _refused(str(error)) from error
        finally:
            for session in sessions:
                session.is_ending = False  # if the write failed, the client may try again
        for session in sessions:
            session.model.close()
            del self._sessions[session.id]
        for answer_id in body.get("msg_ids") or ():
            self._session_of_answer[answer_id] = session_id
        versions = {row.min_policy_version for row in rows} | {row.max_policy_version for row in rows}
        return _success(
            session_id=session_id, num_rows=len(rows), policy_versions=[min(versions), max(versions)], status="success"
        )

    def _rewarded_sessions(self, named: str, body: Mapping[str, Any]) -> list[str]:
        """Sessions that a feedback body names, directly or by the ids of answers."""
        answer_ids = body.get("msg_ids")
        if answer_ids is None:
            session_id = named or body.get("session_id")
            if not isinstance(session_id, str) or not _SESSION_ID.fullmatch(session_id):
                raise _refused("session_id is missing; name the session of this reward", "session_id")
            if body.get("session_id", session_id) != session_id:
                raise _Refused(_OTHER_SESSION)
            return [session_id]
        if not isinstance(answer_ids, list) or not answer_ids or not all(isinstance(name, str) for name in answer_ids):
            raise _refused("msg_ids must be a list of answer ids", "msg_ids")
        unknown = [name for name in answer_ids if name not in self._session_of_answer]
        if unknown:
            why = f"answer {unknown[0]} is unknown: it is too old, or the server was restarted"
            raise _refused(why, "msg_ids", 404)
        names = list(dict.fromkeys(self._session_of_answer[name] for name in answer_ids))
        if named and names != [named]:
            raise _refused("this key belongs to another session", "msg_ids", 403)
        return names

    async def _commit(self, request: Request) -> Response:
        if self._authorize(request):
            raise _Refused(WRONG_KEY)
        num_groups = await asyncio.to_thread(self._store.commit_groups, include_incomplete=True)
        return _success(status="success", num_groups=num_groups)

    def _rewarded(self, session: _Session, reward: Reward) -> list[Experience]:
        rollout = Rollout(
            task=Task(TASKSET, 0, 0, workflow=TASKSET),
            key=RolloutKey(0, 0),
            explore_step=1,
            workflow=_never,
            engine_failure=lambda: None,
            new_model=lambda rollout: session.model,
            explorer=self._config.explorer,
            sampling=self._served.sampling,
            weights=self.weights,
        )
        return [dataclasses.replace(row, session=session.id) for row in rollout.rewarded(session.model, reward)]


class _Refused(Exception):
    """A request is not served; the argument is its OpenAIAnswer."""


def _refused(why: str, param: str | None = None, status: int = 400) -> _Refused:
    return _Refused(refusal(why, param, status=status))


def _success(**body: Any) -> Response:
    return as_response(OpenAIAnswer(200, body))


def _busy(
    why: str, retry_after_s: int = _RETRY_AFTER_S, code: str = "rate_limit_exceeded", status: int = 429
) -> OpenAIAnswer:
    return refusal(why, code=code, status=status, headers={"Retry-After": str(retry_after_s)})


def _storage_failed(request: Request, error: Exception) -> Response:
    """Ask the client to repeat a request whose session could not be read or written."""
    log.warning("%s %s: %s", request.method, request.scope["path"], error)
    return as_response(_busy(str(error), code="service_unavailable", status=503))


async def _never(task: Task, model: Any) -> float:
    raise AssertionError("a served session runs no workflow")


async def _body(request: Request) -> Mapping[str, Any] | None:
    """The object in the body of a request; None: it is something else. Raises: _Refused."""
    data = await read_body(request)
    if data is None:
        raise _Refused(TOO_LONG)
    try:
        body = parse_portable(data or b"{}")
    except ValueError as error:
        raise _refused(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, Mapping):
        return None
    return {name: value for name, value in body.items() if value is not None}  # as in the other requests


def serve_policy(
    config: Config, options: ServeOptions, say: Callable[[str], None], storage: Storage | None = None
) -> None:
    """Serve the policy of a run until SIGINT or SIGTERM, recording into its experience log. At the end the log is
    sealed at its last complete step, so that a trainer that has consumed all of it ends.

    Args: config: in any mode. storage: the run folder, if it is not where the config has it.
    Raises: UserError: the run cannot be served; FencedError: another process explores for the run; RoleError: a local
        engine died, or no worker can start one; WaitTimeout.
    """
    if config.stages or config.is_external or config.algorithm.schema_type != "experience":
        raise UserError("rftdask serve does not support stages, external runs, or algorithms that learn from a dataset")
    config = replace(config, {"mode": "serve"})
    options.tls  # noqa: B018 -- report a wrong certificate before anything starts
    storage = storage or open_storage(config.checkpoint_job_dir)
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        stack.enter_context(private_files(storage, config))
        config = open_run(storage, config)
        stack.enter_context(Lease(storage, "explorer"))
        experiences = open_log(storage, config)
        experiences.unseal()
        store = SessionStore(storage, experiences, config, group_age_s=options.group_age_s)
        section, queue = config.explorer.rollout_model, LoadBalancer(None if options.max_concurrent else MAX_UNSIZED)
        start: Callable[[Storage, LoadBalancer], EnginePool] = partial(LocalEngines, config)
        if not config.cluster.is_one_machine:
            from rftdask.serve import worker_pool  # late: local engines need no Dask

            start = stack.enter_context(worker_pool.on_workers(config, storage))
        tokenizer = load_tokenizer(config)
        parser = AnswerParser(tokenizer, section.tool_call_parser, section.reasoning_parser)

        async def run() -> None:
            ended = asyncio.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, ended.set)
            engines = start(storage, queue)
            try:
                # Late: takes most of a second, while the engines start. Only the Responses API needs it.
                importlib.import_module("openai.types.responses")
                if not config.cluster.is_one_machine:
                    say(f"waiting for the first explorer worker of cluster.type {config.cluster.type}")
                if not await _wait_for_engine(engines, ended):
                    return
                sampling, guided, images = model_sampling(config.model), section.traits.guides_sampling, None
                # Only now: local engines have downloaded the model by then. Any request may hold images, unlike tasks.
                traits = section.traits
                if traits.reads_images and can_be_given_images(config.model.model_path, traits.image_models):
                    images = ImageProcessor(config.model.model_path, trust_remote_code=config.model.trust_remote_code)
                    images.run = storage
                    _ = images.placeholder_id  # loads torch, so before the first request
                served = ServedModel(queue, tokenizer, sampling, config.model, None, parser, guided, images)
                server = PolicyServer(config, served, store, token, options)
                text = f"with the key {token}; its sessions go to {storage.url}"
                await _run(server, options, engines, ended, lambda address: say(f"serving {address} {text}"))
            finally:
                await engines.close()

        asyncio.run(run())
        experiences.seal(store.num_whole_steps)
        say(f"{store.num_groups} groups are in the log, {store.num_waiting} sessions wait for others of their task")


async def _wait_for_engine(engines: EnginePool, ended: asyncio.Event) -> bool:
    """Wait for the first engine. Returns: False if `ended` was set first. Raises: see EnginePool.poll."""
    ending = asyncio.create_task(ended.wait())
    while not engines.queue.engines and not ended.is_set():
        polling = asyncio.create_task(engines.poll())
        await asyncio.wait({polling, ending}, return_when=asyncio.FIRST_COMPLETED)
        if polling.done():
            polling.result()
            await asyncio.wait({ending}, timeout=_POLL_INTERVAL_S)
        else:
            polling.cancel()
    ending.cancel()
    return not ended.is_set()


async def _run(
    server: PolicyServer,
    options: ServeOptions,
    engines: EnginePool,
    ended: asyncio.Event,
    say_address: Callable[[str], None],
) -> None:
    """Listen until `ended` is set, polling the engines and committing groups meanwhile.

    Raises: StorageError; RoleError: no engine is left. The next server of the run continues.
    """
    web = web_server(
        server.app(), host=options.host, port=options.port, timeout_graceful_shutdown=_CLOSE_S, **options.tls
    )
    listening, ending = asyncio.create_task(web.serve()), asyncio.create_task(ended.wait())
    try:
        while not web.started and not listening.done():
            await asyncio.sleep(0.01)
        if web.started:
            host, port = web.servers[0].sockets[0].getsockname()[:2]
            say_address(f"{'https' if options.tls_cert else 'http'}://{host}:{port}/v1")
        while not (listening.done() or ended.is_set()):
            await engines.poll()
            server.weights, server.num_engines = engines.weights, len(engines.queue.engines)
            await server.commit_groups()
            await asyncio.wait({listening, ending}, timeout=_POLL_INTERVAL_S)
    finally:
        ending.cancel()
        web.should_exit = True
        await listening
    await server.commit_groups()
