"""Promises of the served API, tested with the package openai: calls are recorded by session, however it is named; a key
opens only its session; a reward ends a session; requests over the limit get 429; a retry after a lost reply returns the
same answer.
"""

import asyncio
import io
import json
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from rftdask.buffer.log import open_log
from rftdask.config import replace as replace_keys
from rftdask.config.schema.model import ModelConfig
from rftdask.data.images import ImageFolder, ImageProcessor, can_be_given_images, data_url, name_of
from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.models.toy import build_toy_image_model, build_toy_model
from rftdask.rollouts.policy.recording import ServedModel
from rftdask.rollouts.policy.request_queues import RequestQueue, RolloutKey
from rftdask.serve.load_balancer import LoadBalancer
from rftdask.serve.server import PolicyServer, ServeOptions
from rftdask.serve.sessions import SessionStore
from rftdask.storage import open_storage
from rftdask.synchronizer.published import Published
from tests.unit.rollouts.rollout_cases import MODEL, CharTokenizer, generation
from tests.unit.serve.test_load_balancer import TalkingEngine
from tests.unit.serve.test_sessions import CONFIG
from tests.versions import needs_newer_transformers

ASKED: Any = [{"role": "user", "content": "hi"}]
BASE = "http://served"


class Queue(RequestQueue):
    """Answers with the number of the call; waits while `goes_on` is cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def generate(self, key: RolloutKey, turn: int, request: GenerateRequest) -> Generation:
        self.num_asked += 1
        said = str(self.num_asked)
        if request.on_tokens is not None:
            request.on_tokens((ord(said),))
        await self.goes_on.wait()
        return generation(said, request)

    async def close(self) -> None:
        """See RequestQueue."""


class Case:
    """A server in this process, without a socket."""

    def __init__(self, images: ImageProcessor | None = None, limits: ModelConfig = MODEL, **options: Any) -> None:
        self.storage = open_storage(f"memory://server-{uuid.uuid4().hex}")
        self.bank = SessionStore(self.storage, open_log(self.storage, CONFIG), CONFIG, group_age_s=1e9)
        self.queue = Queue()
        tokenizer: Any = CharTokenizer()
        if images is not None:
            images.run, tokenizer = self.storage, images.hf_processor.tokenizer
        guided = images is not None  # else the placeholder of an image could be sampled
        sampling = SamplingParams(max_tokens=20)
        served = ServedModel(self.queue, tokenizer, sampling, limits, is_guided=guided, images=images)
        self.server = PolicyServer(CONFIG, served, self.bank, "token", ServeOptions(**options))
        self.server.weights = Published(7, "", "hash7")
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.server.app()), base_url=BASE)

    def client(self, path: str = "/v1", key: str = "token", **options: Any) -> Any:
        return openai.AsyncOpenAI(base_url=BASE + path, api_key=key, http_client=self.http, **options)

    async def ask(self, client: Any, messages: Any = ASKED, **options: Any) -> Any:
        return (await client.chat.completions.create(model="policy", messages=messages, **options)).choices[0].message

    async def feedback(self, key: str = "token", **body: Any) -> tuple[int, Any]:
        # Not json=body: httpx refuses text invalid in UTF-8, other clients do not.
        return await self.post("/feedback", json.dumps(body), key)

    async def post(self, path: str, content: str | bytes, key: str = "token") -> tuple[int, Any]:
        answer = await self.http.post(path, content=content, headers={"Authorization": f"Bearer {key}"})
        return answer.status_code, answer.json()

    async def rows(self) -> list[dict[str, Any]]:
        await self.server.commit_groups()
        log = open_log(self.storage, CONFIG)
        return [row for name in log.shards() for row in log.read(name).to_pylist()]


def served(**options: Any) -> Callable[[Callable[[Case], Awaitable[None]]], Callable[[], None]]:
    """Decorate a test that gets a server with these options, and run it in an event loop."""

    def decorate(check: Callable[[Case], Awaitable[None]]) -> Callable[[], None]:
        async def with_server() -> None:
            case = Case(**options)
            async with case.http:
                await check(case)

        return lambda: asyncio.run(with_server())

    return decorate


@served()
async def test_session_is_one_conversation_however_it_is_named(case: Case) -> None:
    opened = (await case.http.post("/sessions", json={}, headers={"Authorization": "Bearer token"})).json()
    named = {
        "header": case.client(default_headers={"X-Session-ID": "header"}),
        "path": case.client("/sessions/path/v1"),
        opened["session_id"]: case.client(key=opened["api_key"]),
    }
    for client in named.values():
        message = await case.ask(client)
        more = [*ASKED, message, {"role": "user", "content": "and?"}]
        await case.ask(client, more)
    await case.ask(case.client(), ASKED, extra_body={"session_id": "body"})
    assert (await case.feedback(session_id="body", reward=0))[0] == 200
    for session, reward in zip(named, (0.5, 1, -1), strict=True):
        status, reply = await case.feedback(session_id=session, reward=reward)
        assert (status, reply["num_rows"], reply["policy_versions"]) == (200, 1, [7, 7])
    rows = await case.rows()
    assert [row["reward"] for row in rows] == [0.0, 0.5, 1.0, -1.0]
    assert [row["session"] for row in rows] == ["body", *named]
    assert [len(row["turns"] or [1]) for row in rows] == [1, 2, 2, 2]
    assert rows[1]["response_text"] == "1<user>and?<assistant>2" and rows[1]["weights_hash"] == "hash7"


@served()
async def test_stream_names_its_session_and_is_recorded_once(case: Case) -> None:
    case.queue.goes_on.clear()
    body = {"model": "policy", "messages": ASKED, "stream": True}
    headers = {"Authorization": "Bearer token"}
    asking = asyncio.create_task(case.http.post("/v1/chat/completions", json=body, headers=headers))
    while not case.server._sessions:
        await asyncio.sleep(0)
    [session] = case.server._sessions
    assert (await case.feedback(session_id=session, reward=1))[0] == 409, "it is being answered"
    case.queue.goes_on.set()
    answer = await asking
    assert answer.headers["X-Session-ID"] == session and answer.text.endswith("data: [DONE]\n\n")
    reply = [json.loads(line[6:])["choices"][0] for line in answer.text.split("\n\n")[:-2]]
    assert "".join(each["delta"].get("content") or "" for each in reply) == "1"
    assert (await case.feedback(session_id=session, reward=1))[0] == 200
    assert [row["response_text"] for row in await case.rows()] == ["1"]


@served()
async def test_sessions_of_a_task_are_siblings(case: Case) -> None:
    for number in range(4):
        task = {"X-Task-ID": f"task {number % 2}"} if number < 2 else {}
        await case.ask(case.client(f"/sessions/s{number}/v1", default_headers=task))
        later = {} if number < 2 else {"task_id": f"task {number % 2}"}
        assert (await case.feedback(session_id=f"s{number}", reward=number, **later))[0] == 200
    rows = await case.rows()
    assert [(row["task_index"], row["rollout"], row["reward"]) for row in rows] == [
        (0, 0, 0.0),
        (0, 1, 2.0),
        (1, 0, 1.0),
        (1, 1, 3.0),
    ]


@served()
async def test_key_opens_only_its_session(case: Case) -> None:
    own = case.server.key_of("mine")
    for path, key in (
        ("/v1", "wrong"),
        ("/v1", ""),
        ("/v1", "mine.wrong"),
        ("/sessions/yours/v1", own),
        ("/v1", own.replace("mine", "yours")),
    ):
        status = (await case.http.post(f"{path}/chat/completions", headers={"X-Api-Key": key}, json={})).status_code
        assert status == 401, (path, key)
    assert (await case.feedback("wrong", session_id="mine", reward=1))[0] == 401
    assert (await case.feedback(own, session_id="yours", reward=1))[0] == 403
    assert (await case.http.post("/sessions", headers={"X-Api-Key": own}, json={})).status_code == 401
    await case.ask(case.client(key=own))
    assert (await case.feedback(own, reward=1))[0] == 200
    assert case.queue.num_asked == 1


@served()
async def test_reward_ends_a_session(case: Case) -> None:
    client = case.client("/sessions/s/v1", max_retries=0)
    assert (await case.feedback(session_id="s", reward=1))[0] == 404
    await case.ask(client)
    for wrong in ("1", None, True):
        assert (await case.feedback(session_id="s", reward=wrong))[0] == 400
    for metrics in ({"a": "b"}, {"a\ud800": 1}, {"a": 10**400}):
        assert (await case.feedback(session_id="s", reward=1, metrics=metrics))[0] == 400
    assert (await case.feedback(session_id="s", reward=1, metrics={"steps": 3}))[0] == 200
    # A repeated reward is accepted, a changed one is not.
    assert (await case.feedback(session_id="s", reward=1))[0] == 200
    assert (await case.feedback(session_id="s", reward=2))[0] == 409
    with pytest.raises(openai.ConflictError, match="already has its reward"):
        await case.ask(client)
    [row] = await case.rows()
    assert row["reward"] == 1.0 and dict(row["metrics"])["steps"] == 3.0
    assert (await case.feedback(session_id="s", reward=1))[0] == 200


@served()
async def test_reward_by_answer_ids_joins_sessions(case: Case) -> None:
    """The form of Trinity-RFT's client: rewards by answer ids, without session names."""
    create = case.client().chat.completions.create
    first = await create(model="policy", messages=ASKED)
    # A session of two calls, and sessions of one call.
    named = case.client(default_headers={"X-Session-ID": "named"}).chat.completions.create
    one = await named(model="policy", messages=ASKED)
    more = [*ASKED, one.choices[0].message, {"role": "user", "content": "and?"}]
    two = await named(model="policy", messages=more)
    alone = await create(model="policy", messages=ASKED)
    names = [two.id, first.id, one.id]
    status, reply = await case.feedback(msg_ids=names, reward=0.5, task_id="t", run_id=3)
    assert (status, reply["status"], reply["session_id"], reply["num_rows"]) == (200, "success", "named", 2)
    assert (await case.feedback(msg_ids=names, reward=0.5, task_id="t"))[0] == 200, "the answer was lost"
    assert (await case.feedback(msg_ids=names, reward=1.0))[0] == 409
    for wrong in ([], "a", [alone.id, "nobody"], [3]):
        status, reply = await case.feedback(msg_ids=wrong, reward=1)
        assert (status, reply["error"]["param"]) == (404 if "nobody" in wrong else 400, "msg_ids")
    key = case.server.key_of("named")
    assert (await case.feedback(key=key, msg_ids=[alone.id], reward=1))[0] == 403
    assert await case.rows() == [], "it waits for others of its task"
    for token, code in (("no", 401), (key, 401), ("token", 200)):
        answer = await case.http.post("/commit", headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code == code
    assert answer.json() == {"status": "success", "num_groups": 1}
    rows = await case.rows()
    assert [(row["uid"], row["reward"]) for row in rows] == [("served/0/0/0/0", 0.5), ("served/0/0/0/1", 0.5)]
    assert [[turn["number"] for turn in row["turns"]] for row in rows] == [[0, 1], [2]]
    assert [row["session"] == "named" for row in rows] == [True, False] and rows[1]["session"]


@served()
async def test_stop_text_invalid_in_utf8_is_refused(case: Case) -> None:
    for name in ("stop", "bad_words"):
        body = {"messages": ASKED, name: ["a\ud800"]}
        status, reply = await case.post("/v1/chat/completions", json.dumps(body))
        assert (status, reply["error"]["type"]) == (400, "invalid_request_error"), reply
        assert "not text in UTF-8" in reply["error"]["message"]
    assert case.queue.num_asked == 0


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_reward_names_a_streamed_answer_by_its_id(path: str) -> None:
    async def check(case: Case) -> None:
        asked = {"input": ASKED} if path == "responses" else {"messages": ASKED, "max_tokens": 4}
        headers = {"Authorization": "Bearer token"}
        answer = await case.http.post(f"/v1/{path}", json={**asked, "stream": True}, headers=headers)
        first = json.loads(answer.text.partition("data: ")[2].partition("\n")[0])
        name = (first.get("response") or first.get("message") or first)["id"]
        status, reply = await case.feedback(msg_ids=[name], reward=1)
        assert (status, reply["session_id"]) == (200, answer.headers["X-Session-ID"])

    served()(check)()


@served()
async def test_token_count_has_no_answer_id(case: Case) -> None:
    body = {"model": "policy", "max_tokens": 5, "messages": ASKED}
    headers = {"Authorization": "Bearer token"}
    answer = await case.http.post("/v1/messages/count_tokens", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json().keys() == {"input_tokens"}


@served(max_concurrent=1)
async def test_requests_over_the_limit_get_429(case: Case) -> None:
    case.queue.goes_on.clear()
    first = asyncio.create_task(case.ask(case.client("/sessions/a/v1")))
    while not case.queue.num_asked:
        await asyncio.sleep(0)
    with pytest.raises(openai.RateLimitError) as error:
        await case.ask(case.client("/sessions/b/v1", max_retries=0))
    assert error.value.response.headers["retry-after"] == "1"
    assert (await case.feedback(session_id="a", reward=1))[0] == 409, "it is still being answered"
    # openai's client retries.
    second = asyncio.create_task(case.ask(case.client("/sessions/b/v1", max_retries=5)))
    await asyncio.sleep(0.05)
    case.queue.goes_on.set()
    assert [(await first).content, (await second).content] == ["1", "2"]


@served()
async def test_retry_after_a_lost_reply_returns_the_same_answer(case: Case) -> None:
    client = case.client("/sessions/s/v1")
    again = {"x-stainless-retry-count": "1"}
    said = [(await case.ask(client, extra_headers=headers)).content for headers in ({}, again, {}, again)]
    # Without the retry header it is a new call.
    assert said == ["1", "1", "2", "2"] and case.queue.num_asked == 2


@served(session_idle_s=-1)
async def test_idle_session_is_forgotten(case: Case) -> None:
    await case.ask(case.client("/sessions/s/v1"))
    await case.server.commit_groups()
    assert (await case.feedback(session_id="s", reward=1))[0] == 404


@served()
async def test_lack_of_engine_memory_is_429_and_records_nothing(case: Case) -> None:
    served = case.server._served
    engine = TalkingEngine(60)
    balancer = LoadBalancer()
    balancer.add(engine)
    case.server._served = replace(served, queue=balancer)
    one, two = (case.client(f"/sessions/{name}/v1", max_retries=0) for name in ("one", "two"))
    engine.is_held = True
    first = asyncio.create_task(case.ask(one))
    await engine.until_asked(1)
    with pytest.raises(openai.RateLimitError, match="try again later") as raised:
        await case.ask(two, n=2)
    assert raised.value.response.headers["Retry-After"] == "1"
    engine.let_go()
    await first
    # The second of two choices finds no memory, so neither is recorded.
    engine.is_held = True
    with pytest.raises(openai.RateLimitError):
        await case.ask(two, n=2)
    engine.let_go()
    await case.ask(two)
    status, reply = await case.feedback(session_id="two", reward=1)
    assert (status, reply["num_rows"]) == (200, 1)
    # A server without engines also asks clients to retry.
    engine.is_lost = True
    with pytest.raises(openai.InternalServerError, match="no engine is available") as down:
        await case.ask(one)
    assert (down.value.status_code, down.value.response.headers["Retry-After"]) == (503, "1")


@needs_newer_transformers
def test_image_of_a_request_is_stored_by_its_hash(tmp_path: Path) -> None:
    build_toy_image_model(tmp_path / "model")
    images = ImageProcessor(str(tmp_path / "model"), folder=ImageFolder(tmp_path))
    buffer = io.BytesIO()
    Image.new("RGB", (56, 28), (9, 9, 200)).save(buffer, format="PNG")
    file = buffer.getvalue()

    def asked(url: str) -> Any:
        parts = [{"type": "text", "text": "what? "}, {"type": "image_url", "image_url": {"url": url}}]
        return [{"role": "user", "content": parts}]

    async def check(case: Case) -> None:
        client = case.client("/sessions/s/v1")
        await case.ask(client, asked(data_url(file)))
        for reply in ("https://example.org/a.png", "/etc/passwd"):
            with pytest.raises(openai.BadRequestError, match="nothing is fetched"):
                await case.ask(client, asked(reply))
        assert case.storage.get(f"media/{name_of(file)}") == file, "it is kept before the session has its reward"
        assert (await case.feedback(session_id="s", reward=1))[0] == 200
        [row] = await case.rows()
        assert row["images"] == [name_of(file)]
        assert row["tokens"][: row["prompt_length"]].count(images.placeholder_id) == 2

    served(images=images)(check)()


def test_text_model_refuses_images(tmp_path: Path) -> None:
    build_toy_model(tmp_path, hidden_size=16, num_heads=2)
    assert not can_be_given_images(str(tmp_path)) and not can_be_given_images(str(tmp_path / "none"))

    async def check(case: Case) -> None:
        part: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        with pytest.raises(openai.BadRequestError, match="image"):
            await case.ask(case.client(), [{"role": "user", "content": [part]}])

    served()(check)()


def test_config_keys_set_the_listen_address() -> None:
    config = replace_keys(CONFIG, {"explorer.listen_address": "0.0.0.0", "explorer.proxy_port": 9001})
    options = ServeOptions.of(config)
    assert (options.host, options.port) == ("0.0.0.0", 9001)
