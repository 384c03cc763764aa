"""Promises of the served API about requests that no client library sends: each gets an answer, none is a 500, every
error has OpenAI's shape, and what is refused is refused before anything is sampled or stored.
"""

import asyncio
import json
import random
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from starlette.routing import Route

from rftdask.rollouts.policy.endpoint import MAX_BODY_BYTES, web_server
from rftdask.serve.openapi import document
from rftdask.storage.checked_json import MAX_DEPTH
from tests.unit.rollouts.rollout_cases import cut_at
from tests.unit.serve.test_server import ASKED, Case, served

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            *ASKED,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "1"},
        ],
        **{"model": "policy", "tools": [TOOL], "tool_choice": "auto", "stop": ["x"], "n": 1, "seed": 3, "stream": True},
        **{"max_tokens": 4, "stream_options": {"include_usage": True}, "metadata": {"a": "b"}, "user": "u"},
        **{"logprobs": True, "response_format": {"type": "text"}, "chat_template_kwargs": {}, "session_id": "s"},
    },
    "/v1/completions": {"prompt": "hi", "model": "policy", "logprobs": 0, "n": 2, "temperature": 1, "stream": False},
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ],
        **{"model": "policy", "instructions": "be brief", "tools": [{"type": "function", "name": "f"}], "stream": True},
        **{"tool_choice": "auto", "text": {"format": {"type": "text"}}, "reasoning": {"effort": "none"}},
        **{"metadata": {"a": "b"}, "temperature": 1, "top_p": 1, "parallel_tool_calls": True, "include": []},
    },
    "/v1/messages": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]},
        ],
        **{"model": "policy", "max_tokens": 4, "system": "be brief", "tools": [{"name": "f", "input_schema": {}}]},
        **{"tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}, "stop_sequences": ["x"], "stream": True},
    },
    "/v1/messages/count_tokens": {"messages": ASKED, "model": "policy", "max_tokens": 4},
    "/feedback": {"session_id": "s", "reward": 1, "task_id": "t", "metrics": {"a": 1}, "msg_ids": None},
    "/sessions": {"task_id": "t"},
    "/commit": {},
}


def nested(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 3.5, 1e308, 2**63, -(2**64), 10**400, "", "x", "a\ud800", "\x00", "\udcff\u202e"),
    *([], {}, [None], [[]], [{}], {"": ""}, {"type": []}, {"type": "function"}, {"role": "user"}, [1, "a"], "x" * 5000),
    *(nested(MAX_DEPTH // 2), nested(MAX_DEPTH - 3), nested(MAX_DEPTH * 2), float("nan"), float("inf")),
    *("[" * 900 + "]" * 900, {"type": "json_schema"}, {"name": {}}, {"function": 3}, ["\ud800"], {"\ud800": 1}),
)


def changed(body: Any, rng: random.Random) -> Any:
    """The body with one value, at any depth, replaced, added or removed."""
    if isinstance(body, dict | list) and body and rng.random() < 0.7:
        keys = list(body) if isinstance(body, dict) else range(len(body))
        key: Any = rng.choice(keys)
        part: Any = dict(body) if isinstance(body, dict) else list(body)
        if rng.random() < 0.1:
            del part[key]
        else:
            part[key] = changed(body[key], rng)
        return part
    return rng.choice(VALUES)


def check_error(status: int, body: Any) -> None:
    assert 400 <= status < 500, (status, body)
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert isinstance(error["message"], str) and error["message"]


@pytest.mark.parametrize("path", BODIES)
def test_no_request_is_a_server_error(path: str) -> None:
    rng = random.Random(path)

    @served()
    async def check(case: Case) -> None:
        headers, num_good = {"Authorization": "Bearer token"}, 0
        for number in range(300):
            body = BODIES[path] if not number else changed(BODIES[path], rng)
            if path != "/feedback" and isinstance(body, dict) and body.get("session_id") == "s":
                body = {**body, "session_id": f"s{number}"}
            elif path == "/feedback":
                name = f"s{number}"
                await case.ask(case.client(f"/sessions/{name}/v1"))
                if isinstance(body, dict) and body.get("session_id") == "s":
                    body = {**body, "session_id": name}
            case.queue.num_asked = 0
            answer = await case.http.post(path, content=json.dumps(body), headers=headers)
            if answer.status_code == 200:
                num_good += 1
                assert '"server_error"' not in answer.text and '"error": {' not in answer.text, (body, answer.text)
                continue
            assert case.queue.num_asked == 0, ("it was sampled, then refused", body, answer.text)
            check_error(answer.status_code, answer.json())
        assert num_good
        assert len(case.storage.list("serve/sessions")) == (num_good if path == "/feedback" else 0)

    check()


@served()
async def test_every_error_has_the_shape_of_the_api(case: Case) -> None:
    headers = {"Authorization": "Bearer token"}
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/sessions/s/nothing", 404),
        ("GET", "/feedback", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/gpt", 404),
        ("GET", "/v1/models/policy", 200),
        ("GET", "/sessions/s/v1/models/policy", 200),
    ):
        answer = await case.http.request(method, path, headers=headers, content=b"{}")
        assert answer.status_code == status, (method, path, answer.text)
        assert ("Allow" in answer.headers) == (status == 405)
        if status == 200:
            assert answer.json()["id"] == "policy"
        else:
            check_error(answer.status_code, answer.json())


@served(limits=cut_at(1000))
async def test_prompt_over_the_limit_is_an_error(case: Case) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 100_000}]})
    status, reply = await case.post("/v1/chat/completions", body)
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert case.queue.num_asked == 0


@served()
async def test_bodies_of_all_routes_are_bounded(case: Case) -> None:
    async def chunks() -> Any:
        for _ in range((MAX_BODY_BYTES >> 20) + 1):
            yield b" " * (1 << 20)

    for path in ("/feedback", "/sessions", "/v1/chat/completions"):
        answer = await case.http.post(path, content=chunks(), headers={"Authorization": "Bearer token"})
        assert answer.status_code == 413, answer.text
        check_error(answer.status_code, answer.json())


@served()
async def test_feedback_with_null_ids_is_answered(case: Case) -> None:
    await case.ask(case.client("/sessions/s/v1"))
    nulls = {"msg_ids": None, "task_id": None, "metrics": None}
    assert (await case.feedback(session_id="s", reward=1, **nulls))[0] == 200
    opened = await case.post("/sessions", json.dumps({"task_id": None}))
    await case.ask(case.client(key=opened[1]["api_key"]))
    assert (await case.feedback(opened[1]["api_key"], session_id=None, reward=1))[0] == 200


def sent_to_a_socket(data: bytes) -> bytes:
    """Send bytes to a server, and the end if they begin a body that is cut. Returns: all that it sends."""

    async def send() -> bytes:
        web = web_server(Case().server.app(), port=0)
        serving = asyncio.create_task(web.serve())
        while not web.started:
            await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection(*web.servers[0].sockets[0].getsockname()[:2])
        writer.write(data)
        if b"Content-Length" in data:
            writer.write_eof()
        received = await reader.read()
        writer.close()
        web.should_exit = True
        await serving
        return received

    return asyncio.run(send())


HEAD = b"POST /feedback HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer token\r\n"


@pytest.mark.parametrize("data", [b"nonsense\r\n\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n"])
def test_what_is_not_http_is_an_error_of_the_api(data: bytes) -> None:
    head, _, body = sent_to_a_socket(data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    check_error(400, json.loads(body))


def test_a_client_that_leaves_is_no_error_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    assert sent_to_a_socket(HEAD + b"Content-Length: 9\r\n\r\n{}") == b""
    assert caplog.records == []


@served()
async def test_a_session_id_of_another_type_is_refused(case: Case) -> None:
    asked = json.dumps({"messages": ASKED})
    for wrong in (0, 5, False, [], {"a": 1}, "", ".a", "a/b", "a" * 101):
        answer = await case.post("/v1/chat/completions", json.dumps({"messages": ASKED, "session_id": wrong}))
        check_error(*answer)
        assert answer[1]["error"]["param"] == "session_id"
    for method, path in (("POST", "/sessions/.a/v1/chat/completions"), ("GET", "/sessions/%C3%91/v1/models")):
        reply = await case.http.request(method, path, content=asked, headers={"Authorization": "Bearer token"})
        check_error(reply.status_code, reply.json())
    reply = await case.http.post(
        "/sessions/a/v1/messages", json={"session_id": "b"}, headers={"Authorization": "Bearer token"}
    )
    assert reply.status_code == 403
    assert case.queue.num_asked == 0


@served()
async def test_an_answer_id_of_no_characters_is_unknown(case: Case) -> None:
    status, body = await case.feedback(reward=1, msg_ids=[""])
    assert status == 404 and "is unknown" in body["error"]["message"]


def test_a_session_with_too_many_calls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rftdask.rollouts.policy.recording.MAX_CALLS", 2)

    @served()
    async def check(case: Case) -> None:
        asked = json.dumps({"messages": ASKED})
        answers = [await case.post("/sessions/s/v1/chat/completions", asked) for _ in range(3)]
        assert [status for status, _ in answers] == [200, 200, 409]
        check_error(*answers[-1])
        assert (await case.feedback(session_id="s", reward=1))[0] == 200, "what it did can be rewarded"

    check()


def least(schema: Mapping[str, Any]) -> Any:
    """The smallest value that a schema of the document accepts."""
    if "enum" in schema or "anyOf" in schema:
        return schema["enum"][0] if "enum" in schema else least(schema["anyOf"][0])
    if schema["type"] == "object":
        return {name: least(schema["properties"][name]) for name in schema.get("required", ())}
    if schema["type"] == "array":
        return [least(schema["items"])]
    return {"string": "x", "number": schema.get("minimum", 1), "integer": schema.get("minimum", 1), "boolean": True}[
        schema["type"]
    ]


@served()
async def test_the_openapi_document_lists_routes_and_fields(case: Case) -> None:
    headers = {"Authorization": "Bearer token"}
    document = (await case.http.get("/openapi.json")).json()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method == "parameters":
                continue
            schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            bodies = [least(schema)] if schema else [{}]
            # Each field once, with its least value.
            bodies += (
                [bodies[0] | {name: least(schema["properties"][name])} for name in schema["properties"]]
                if schema
                else []
            )
            for number, body in enumerate(bodies):
                case.queue.num_asked = 0
                session = f"{method}{len(path)}-{number}"
                url = path.replace("{session}", session).replace("{name}", "policy")
                if path == "/feedback":
                    await case.ask(case.client(f"/sessions/{session}/v1"))
                    body = {**body, "session_id": session, "metrics": {}}
                    body.pop("msg_ids", None)
                body = {**body, "session_id": session} if "session_id" in body else body
                answer = await case.http.request(method, url, json=body if method == "post" else None, headers=headers)
                assert answer.status_code == 200, (url, body, answer.text)
    listed = {path.replace("{name}", "{name:path}") for path in document["paths"]}
    written = {route.path for route in case.server.app().routes if isinstance(route, Route)} - {"/openapi.json"}
    assert written == listed


SCHEMAS = {
    path: methods["post"]["requestBody"]["content"]["application/json"]["schema"]
    for path, methods in document()["paths"].items()
    if "requestBody" in methods.get("post", ())
}


@pytest.mark.parametrize("path", sorted(SCHEMAS.keys() & BODIES.keys()))
def test_the_openapi_document_accepts_what_the_server_accepts(path: str) -> None:
    jsonschema.validate({name: value for name, value in BODIES[path].items() if value is not None}, SCHEMAS[path])


@served()
async def test_the_openapi_document_excludes_what_the_server_refuses(case: Case) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": ASKED, "stop": ""}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": "hi", "stop": ["x", ""]}),
        ("/v1/responses", {"input": []}),
        ("/v1/messages", {"messages": [{"role": "user"}], "max_tokens": 4}),
        ("/v1/messages", {"messages": ASKED, "max_tokens": 4, "temperature": -1}),
        ("/feedback", {"reward": 1, "session_id": ".hidden"}),
        ("/feedback", {"reward": 1, "msg_ids": []}),
    ):
        status, _ = await case.post(path, json.dumps(body))
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(body, SCHEMAS[path])
        assert status == 400, (path, body)
