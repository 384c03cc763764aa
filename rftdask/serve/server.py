"""The server of `rftdask serve`: engines of a run behind OpenAI's API, for agents anywhere.

    POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages    recorded, by session
    POST /sessions  {"task_id"?}                  a new session, with a key and an address of its own
    POST /feedback  {"session_id"?, "reward", "task_id"?}    the end of a session: 200 once it is durable
    POST /feedback  {"msg_ids", "reward", "task_id"?}        the same, of the sessions of these answers, as one rollout
    POST /commit                                  what waits for others of its task waits no longer
    GET  /health                                  the version that is served, and how much is under way

A session is told by its key, its address (/sessions/ID/v1), the header X-Session-ID or `session_id` in the body. What
was asked and not rewarded lives in memory alone; what was rewarded is the bank's. Newer weights are served as they are
published: an answer is of one version, a session may span several, and each of its turns knows its own.
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
import math
import os
import re
import secrets
import signal
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
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
from rftdask.errors import UserError
from rftdask.rollouts.policy.answer_parsers import AnswerParser
from rftdask.rollouts.policy.answer_stream import EventStream
from rftdask.rollouts.policy.endpoint import answer_http, as_response, key_in, web_server
from rftdask.rollouts.policy.lockstep_queue import RolloutKey
from rftdask.rollouts.policy.openai_api import MODELS, WRONG_KEY, OpenAIAnswer, refusal
from rftdask.rollouts.policy.recording import RecordingModel, ServedModel
from rftdask.rollouts.rollout import Rollout
from rftdask.rollouts.workflows.base import Reward
from rftdask.run.lease import Lease
from rftdask.run.run_folder import open_run, private_files, record_config
from rftdask.serve.balance import MAX_UNSIZED, Balanced, FullError, NoEngineError
from rftdask.serve.bank import TASKSET, Rewarded, SessionBank, one_rollout
from rftdask.serve.engines import EnginePool, LocalEngines
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.published import Published

log = logging.getLogger(__name__)

TOKEN_VARIABLE = "RFTDASK_SERVE_TOKEN"
"""Environment variable of the token of access; where it is not set, each start has a new one."""
_SESSION_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_RETRY_AFTER_S = 1
"""Where nothing says how long it takes."""
_LOOK_S = 0.2
"""Between two looks for groups that are complete, weights that are new, and engines that come and go."""
_KEPT_ANSWERS = 4
"""Of a session, for a client that lost the reply and asks again."""
_KEPT_NAMES = 100_000
"""Of answers, for rewards that name them, the newest."""
_CLOSE_S = 5
"""Seconds that requests under way have at the end."""


@dataclass(frozen=True)
class ServeOptions:
    """How a policy is served."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    max_concurrent: int | None = None
    """Requests under way at once; more are told to come again (429). None: as many as the engines have memory for."""
    group_age_s: float = 600.0
    """Seconds that a session waits for others of its task before it is a group without them."""
    session_idle_s: float = 3600.0
    """Seconds after which a session that nobody asks or rewards is forgotten."""
    tls_cert: str = ""
    """Certificate chain of the server, a PEM file; "": it speaks HTTP."""
    tls_key: str = ""
    """Its private key, a PEM file."""

    @classmethod
    def of(cls, config: Config) -> ServeOptions:
        """As a configuration says."""
        return cls(config.explorer.listen_address, config.explorer.proxy_port)

    @property
    def tls(self) -> dict[str, str]:
        """The same as uvicorn takes it. Raises: UserError: the files are no certificate with its key."""
        if not self.tls_cert and not self.tls_key:
            return {}
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_cert, self.tls_key, password="")
        except OSError as error:  # of ssl, too
            raise UserError(
                f"--tls-cert {self.tls_cert!r} and --tls-key {self.tls_key!r} are no certificate with its key, as PEM "
                f"files without a password: {error}"
            ) from error
        return {"ssl_certfile": self.tls_cert, "ssl_keyfile": self.tls_key}


@dataclass
class _Session:
    """A session that has no reward yet."""

    id: str
    task: str
    model: RecordingModel
    used_s: float
    """When it was asked last, by the monotonic clock."""
    under_way: int = 0
    is_ending: bool = False
    """Whether its reward is being written down."""
    answers: OrderedDict[bytes, OpenAIAnswer] = field(default_factory=OrderedDict)
    """The last ones, by what was asked."""


class PolicyServer:
    """The sessions and the application of a server; it knows neither sockets nor processes."""

    def __init__(
        self, config: Config, served: ServedModel, bank: SessionBank, token: str, options: ServeOptions
    ) -> None:
        self.weights = Published(0, "", "")
        """Version that every engine serves, or a newer one."""
        self.num_engines = 0
        """Engines that are asked."""
        self._config, self._served, self._bank, self._token, self._options = config, served, bank, token, options
        self._sessions: dict[str, _Session] = {}
        self._answered: OrderedDict[str, str] = OrderedDict()
        """Name of an answer -> its session, or the one that it was rewarded with."""
        self._under_way = 0

    def app(self) -> Starlette:
        """The application."""
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/sessions", self._open, methods=["POST"]),
                Route("/feedback", self._feedback, methods=["POST"]),
                Route("/commit", self._commit, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/{path:path}", self._answer, methods=["GET", "POST"]),
                Route("/sessions/{session}/v1/models", self._models),
                Route("/sessions/{session}/v1/{path:path}", self._answer, methods=["GET", "POST"]),
            ]
        )

    def key_of(self, session: str) -> str:
        """The key that opens this session and no other."""
        return f"{session}.{hmac.new(self._token.encode(), session.encode(), hashlib.sha256).hexdigest()[:32]}"

    async def commit_groups(self) -> None:
        """Commit what is complete. Raises: StorageError."""
        await asyncio.to_thread(self._bank.commit_groups)
        old = time.monotonic() - self._options.session_idle_s
        for session in [
            each for each in self._sessions.values() if each.used_s < old and not (each.under_way or each.is_ending)
        ]:
            session.model.close()
            del self._sessions[session.id]

    # ---- who asks

    def _caller(self, request: Request) -> str | None:
        """The session that a request names, "" if it names none; None: it may not ask."""
        key = key_in(request)
        named = str(request.path_params.get("session") or request.headers.get("x-session-id") or "")
        if hmac.compare_digest(key.encode(), self._token.encode()):
            return named
        session = key.rpartition(".")[0]
        # The key of a session opens that one alone, whatever else the request names.
        is_own = named in ("", session) and hmac.compare_digest(self.key_of(session).encode(), key.encode())
        return session if session and is_own else None

    def _session(self, session_id: str, task: str) -> _Session:
        found = self._sessions.get(session_id)
        if found is None:
            model = RecordingModel(
                self._served,
                key=RolloutKey(0, 0),
                group_id=f"session/{session_id}",
                run_seed=self._config.explorer.rollout_model.seed,
            )
            found = self._sessions[session_id] = _Session(session_id, task, model, 0.0)
        found.task = task or found.task
        found.used_s = time.monotonic()
        return found

    async def _ask(
        self, session_id: str, task: str, is_retry: bool, path: str, body: Any, stream: EventStream | None
    ) -> OpenAIAnswer:
        if not session_id and isinstance(body, Mapping) and isinstance(body.get("session_id"), str):
            session_id = body["session_id"]
        session_id = session_id or secrets.token_hex(8)
        if not _SESSION_ID.fullmatch(session_id):
            return refusal("a session's name is up to 100 letters, digits, dots, hyphens, underscores", "session_id")
        most = self._options.max_concurrent
        if most is not None and self._under_way >= most:
            return _come_again(f"{self._under_way} requests are under way, which is all this server takes; come again")
        if session_id not in self._sessions:
            has_ended = await asyncio.to_thread(self._bank.find, session_id) is not None
        else:
            has_ended = self._sessions[session_id].is_ending
        if has_ended:
            return refusal(f"session {session_id} has had its reward; begin another", "session_id", status=409)
        session = self._session(session_id, task)
        asked = hashlib.sha256(json.dumps([path, body], sort_keys=True).encode()).digest()
        if is_retry and asked in session.answers:
            return session.answers[asked]  # the reply was lost, not the call
        if stream is not None:
            stream.headers["X-Session-ID"] = session_id
        self._under_way += 1
        session.under_way += 1
        try:
            answer = await session.model.openai(path, body, stream)
        except FullError as error:
            return _come_again(str(error), error.retry_after_s)
        except NoEngineError as error:
            headers = {"Retry-After": str(_RETRY_AFTER_S)}
            return refusal(str(error), code="service_unavailable", status=503, headers=headers)
        finally:
            self._under_way -= 1
            session.under_way -= 1
            session.used_s = time.monotonic()
        told = OpenAIAnswer(answer.status, answer.body, headers={"X-Session-ID": session_id})
        if answer.status == 200:
            session.answers[asked] = told
            if name := answer.body.get("id"):  # a count of tokens has none
                self._answered[name] = session_id
            while len(self._answered) > _KEPT_NAMES:
                self._answered.popitem(last=False)
            while len(session.answers) > _KEPT_ANSWERS:
                session.answers.popitem(last=False)
        return told

    # ---- the routes

    async def _health(self, request: Request) -> Response:
        told = {
            "policy_version": self.weights.version,
            "engines": self.num_engines,
            "under_way": self._under_way,
            "open_sessions": len(self._sessions),
        }
        return as_response(OpenAIAnswer(200, {**told, "waiting_sessions": self._bank.num_waiting}))

    async def _models(self, request: Request) -> Response:
        if self._caller(request) is None:
            return as_response(WRONG_KEY)
        return as_response(MODELS)

    async def _answer(self, request: Request) -> Response:
        session_id = self._caller(request)
        if session_id is None:
            return as_response(WRONG_KEY)
        named = session_id
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        task = request.headers.get("x-task-id", "")

        class Caller:
            async def openai(_, path: str, body: Any, stream: EventStream | None = None) -> OpenAIAnswer:
                return await self._ask(named, task, is_retry, path, body, stream)

        return await answer_http(Caller(), request)

    async def _open(self, request: Request) -> Response:
        if self._caller(request) != "":
            return as_response(WRONG_KEY)
        body = await _body(request)
        if body is None or not isinstance(body.get("task_id", ""), str):
            return as_response(refusal('the body is an object: {"task_id": TEXT}, or {}'))
        session = self._session(secrets.token_hex(8), body.get("task_id", ""))
        told = {"session_id": session.id, "api_key": self.key_of(session.id), "base_path": f"/sessions/{session.id}/v1"}
        return as_response(OpenAIAnswer(200, told))

    async def _feedback(self, request: Request) -> Response:
        named = self._caller(request)
        if named is None:
            return as_response(WRONG_KEY)
        body = await _body(request)
        reward = None if body is None else body.get("reward")
        if body is None or isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            return as_response(refusal('the body is an object: {"reward": NUMBER, "session_id": ..., ...}', "reward"))
        found = self._sessions_of(named, body)
        if isinstance(found, OpenAIAnswer):
            return as_response(found)
        # One rollout, by the name of the first of its sessions, which most of them have alone.
        session_id, sessions = found[0], [self._sessions[each] for each in found if each in self._sessions]
        task, metrics = body.get("task_id") or "", body.get("metrics", {})
        if not isinstance(task, str) or not isinstance(metrics, Mapping):
            return as_response(refusal("task_id is a text, metrics an object of numbers", "metrics"))
        if len(sessions) < len(found):
            # Told already, perhaps to one who did not hear the answer.
            banked = await asyncio.to_thread(self._bank.find, session_id)
            if banked is None:
                missing = next(each for each in found if each not in self._sessions)
                return as_response(refusal(f"there is no session {missing}", "session_id", status=404))
            if banked["reward"] != float(reward):
                was = f"session {session_id} has the reward {banked['reward']}, which stays"
                return as_response(refusal(was, "reward", status=409))
            return as_response(OpenAIAnswer(200, {"session_id": session_id, "status": "success"}))
        if any(session.under_way or session.is_ending for session in sessions):
            return as_response(refusal("it is being answered or rewarded; come again", "session_id", status=409))
        try:
            given = Reward(float(reward), dict(metrics))
            rows = one_rollout([self._rewarded(session, given) for session in sessions])
        except (TypeError, ValueError) as error:
            return as_response(refusal(str(error)))
        for session in sessions:
            session.is_ending = True  # nobody may go on with it meanwhile
        try:
            of_task = task or next((each.task for each in sessions if each.task), "")
            await asyncio.to_thread(self._bank.put, Rewarded(session_id, of_task, float(reward), tuple(rows)))
        finally:
            for session in sessions:
                session.is_ending = False  # where it could not be written, it may be told again
        for session in sessions:
            session.model.close()
            del self._sessions[session.id]
        for name in body.get("msg_ids", ()):
            self._answered[name] = session_id
        versions = {row.min_policy_version for row in rows} | {row.max_policy_version for row in rows}
        told = {"session_id": session_id, "num_rows": len(rows), "policy_versions": [min(versions), max(versions)]}
        return as_response(OpenAIAnswer(200, {**told, "status": "success"}))

    def _sessions_of(self, named: str, body: Mapping[str, Any]) -> list[str] | OpenAIAnswer:
        """Whose reward it is, by the session that is named or by the names of answers; or what is wrong."""
        names = body.get("msg_ids")
        if names is None:
            session_id = named or body.get("session_id")
            if not isinstance(session_id, str) or not _SESSION_ID.fullmatch(session_id):
                return refusal("whose reward is it? name the session", "session_id")
            if body.get("session_id", session_id) != session_id:
                return refusal("this key is of another session", "session_id", status=403)
            return [session_id]
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            return refusal("msg_ids is a list of the ids of answers", "msg_ids")
        if unknown := next((name for name in names if name not in self._answered), None):
            why = f"there is no answer {unknown}, or it is too old, or the server was started anew"
            return refusal(why, "msg_ids", status=404)
        found = list(dict.fromkeys(self._answered[name] for name in names))
        if named and found != [named]:
            return refusal("this key is of another session", "msg_ids", status=403)
        return found

    async def _commit(self, request: Request) -> Response:
        if self._caller(request) != "":
            return as_response(WRONG_KEY)
        num_groups = await asyncio.to_thread(self._bank.commit_groups, waits=False)
        return as_response(OpenAIAnswer(200, {"status": "success", "num_groups": num_groups}))

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


def _come_again(why: str, retry_after_s: int = _RETRY_AFTER_S) -> OpenAIAnswer:
    headers = {"Retry-After": str(retry_after_s)}
    return refusal(why, code="rate_limit_exceeded", status=429, headers=headers)


async def _never(task: Task, model: Any) -> float:
    raise AssertionError("a served session runs no workflow")


async def _body(request: Request) -> Mapping[str, Any] | None:
    try:
        body = json.loads(await request.body() or b"{}")
    except ValueError:
        return None
    return body if isinstance(body, Mapping) else None


# ---- the process


def serve_policy(
    config: Config, options: ServeOptions, say: Callable[[str], None], storage: Storage | None = None
) -> None:
    """Serve the policy of a run until SIGINT or SIGTERM, recording into its experience log; then say in the log how far
    it is complete, so that a trainer that has all of it ends.

    Args: config: of the run, of whatever mode. say: takes lines for who started it.
        storage: the run's folder, which may not be where its config has it; None: it is there.
    Raises: UserError: it cannot be served; FencedError: another process explores for the run; RoleError: an engine of
        this machine died, or none can be had elsewhere; WaitTimeout.
    """
    if config.stages or config.is_external or config.algorithm.schema_type != "experience":
        raise UserError("what is served is the policy of a run that learns from rollouts, without stages")
    config = replace(config, {"mode": "serve"})
    options.tls  # noqa: B018 -- what is wrong with it is told before anything starts
    storage = storage or open_storage(config.checkpoint_job_dir)
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        stack.enter_context(private_files(storage, config))
        config = open_run(storage, config)
        stack.enter_context(Lease(storage, "explorer"))
        experiences = open_log(storage, config)
        experiences.unseal()
        bank = SessionBank(storage, experiences, config, group_age_s=options.group_age_s)
        section, queue = config.explorer.rollout_model, Balanced(None if options.max_concurrent else MAX_UNSIZED)
        start: Callable[[Storage, Balanced], EnginePool] = partial(LocalEngines, config)
        if not config.cluster.is_one_machine:
            start = stack.enter_context(_on_workers(config, storage))
        tokenizer = load_tokenizer(config)
        parser = AnswerParser(tokenizer, section.tool_call_parser, section.reasoning_parser)

        async def run() -> None:
            engines = start(storage, queue)
            try:
                # What answers are made of takes most of a second, in which engines start.
                importlib.import_module("openai.types.chat")
                if not config.cluster.is_one_machine:
                    say(f"waits for the first explorer worker of cluster.type {config.cluster.type}")
                if not await _until_asked(engines):
                    return
                sampling, guided, images = model_sampling(config.model), section.traits.guides_sampling, None
                # Asked once an engine has its model, which is on this machine by then if its engines are. Tasks say
                # whether they have images; who asks a server does not.
                traits = section.traits
                if traits.reads_images and can_be_given_images(config.model.model_path, traits.image_models):
                    images = ImageProcessor(config.model.model_path, trust_remote_code=config.model.trust_remote_code)
                    images.run = storage
                    _ = images.placeholder_id  # before the first request, since it loads torch
                served = ServedModel(queue, tokenizer, sampling, config.model, None, parser, guided, images)
                server = PolicyServer(config, served, bank, token, options)
                await _run(server, options, engines, storage, f"with the key {token}", say)
            finally:
                await engines.close()

        asyncio.run(run())
        experiences.seal(bank.num_whole_steps)
        say(f"{bank.num_groups} groups are in the log, {bank.num_waiting} sessions wait for others of their task")


@contextlib.contextmanager
def _on_workers(config: Config, storage: Storage) -> Iterator[Callable[[Storage, Balanced], EnginePool]]:
    """The cluster of the configuration, and what makes engines of its explorer workers. Raises: UserError: it cannot be
    had; WaitTimeout.
    """
    # Late: engines of this machine need no Dask.
    from rftdask.cluster.base import plan_cluster, start_cluster
    from rftdask.cluster.layout import EXPLORER_RESOURCE
    from rftdask.rollouts.work_unit_task import WarmUp
    from rftdask.serve.worker_pool import WorkerEngines

    layout = plan_cluster(config, [config])
    run = WarmUp(storage.url, record_config(storage, config), layout.threads_of(EXPLORER_RESOURCE), None)
    with start_cluster(config, layout, storage) as cluster:
        cluster.use((EXPLORER_RESOURCE,))
        yield partial(WorkerEngines, cluster, run)


async def _until_asked(engines: EnginePool) -> bool:
    """Wait for the first engine. False: a signal came first. Raises: as EnginePool.look."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    ending = asyncio.create_task(ended.wait())
    while not engines.queue.engines and not ended.is_set():
        looking = asyncio.create_task(engines.look())
        await asyncio.wait({looking, ending}, return_when=asyncio.FIRST_COMPLETED)
        if looking.done():
            looking.result()
            await asyncio.wait({ending}, timeout=_LOOK_S)
        else:
            looking.cancel()
    ending.cancel()
    return not ended.is_set()


async def _run(
    server: PolicyServer,
    options: ServeOptions,
    engines: EnginePool,
    storage: Storage,
    key: str,
    say: Callable[[str], None],
) -> None:
    """Listen until a signal comes; meanwhile look for what is new, what is complete, and who comes and goes.

    Raises: StorageError; RoleError: there are no engines any more. Who is started next takes over.
    """
    web = web_server(
        server.app(), host=options.host, port=options.port, timeout_graceful_shutdown=_CLOSE_S, **options.tls
    )

    def end() -> None:
        web.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end)
    listening = asyncio.create_task(web.serve())
    try:
        while not web.started and not listening.done():
            await asyncio.sleep(0.01)
        if web.started:
            host, port = web.servers[0].sockets[0].getsockname()[:2]
            scheme = "https" if options.tls_cert else "http"
            say(f"serving {scheme}://{host}:{port}/v1 {key}; its sessions go to {storage.url}")
        while not listening.done():
            await engines.look()
            server.weights, server.num_engines = engines.weights, len(engines.queue.engines)
            await server.commit_groups()
            await asyncio.wait({listening}, timeout=_LOOK_S)
    finally:
        end()
        await listening
    await server.commit_groups()
