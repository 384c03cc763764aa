"""OpenAPI 3.1 document of the server, at /openapi.json: routes, fields, types and bounds.

Fields that it does not list are accepted as OpenAI and Anthropic define them, or are a 400 that names the field.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from rftdask.rollouts.policy.openai_api import MAX_CHOICES, NUMBERS

_TEXT = {"type": "string"}
_SOME_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"type": "array", "items": _SOME_TEXT}
_SOME_TEXTS = {**_TEXTS, "minItems": 1}
_PARTS = {"type": "array", "items": {"type": "object"}}
SESSION_ID = "[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}"
"""Regular expression of the names of sessions, which are also names of files."""
_ID = {"type": "string", "pattern": f"^{SESSION_ID}$"}
_COUNT = {"type": "integer", "minimum": 1, "maximum": 2**31}


def _object(*required: str, **fields: Any) -> dict[str, Any]:
    # A null is a field that is left out.
    properties = {
        name: kind if name in required else {"anyOf": [kind, {"type": "null"}]} for name, kind in fields.items()
    }
    return {"type": "object", "required": list(required), "properties": properties}


def _numbers(*names: str) -> dict[str, Any]:
    kinds = {int: "integer", float: "number"}
    fields = {name: (kinds[kind], low, high) for name, (_, kind, low, high) in NUMBERS.items()}
    return {
        name: {"type": kind, "minimum": low, "maximum": high}
        for name, (kind, low, high) in fields.items()
        if name in names or not names
    }


def _messages(*required: str, **content: Any) -> dict[str, Any]:
    # The chat template decides which roles exist.
    return {"type": "array", "minItems": 1, "items": _object("role", *required, role=_TEXT, **content)}


_SHARED = {"model": _TEXT, "stream": {"type": "boolean"}, "session_id": _ID}
_OPENAI = {
    **_SHARED,
    **_numbers(),
    "n": {"type": "integer", "minimum": 1, "maximum": MAX_CHOICES},
    "stop": {"anyOf": [_SOME_TEXT, _TEXTS]},
    "seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**64},
}
_CHAT = _object("messages", messages=_messages(content={"anyOf": [_TEXT, _PARTS]}), **_OPENAI)
_CLAUDE = {
    "messages": _messages("content", content={"anyOf": [_TEXT, _PARTS]}),
    "system": {"anyOf": [_TEXT, _PARTS]},
    **_SHARED,
    **_numbers("temperature", "top_p", "top_k"),
}
_RESPONSES = {
    "input": {"anyOf": [_TEXT, {**_PARTS, "minItems": 1}]},
    "instructions": {"anyOf": [_TEXT, _PARTS]},
    "max_output_tokens": _COUNT,
    **_SHARED,
    **_numbers("temperature", "top_p"),
}
_METRICS = {"type": "object", "additionalProperties": {"type": "number"}}
_REWARD = {"reward": {"type": "number"}, "session_id": _ID, "msg_ids": _SOME_TEXTS, "task_id": _TEXT}
_BODIES = {
    "/v1/chat/completions": ("Answer a chat", _CHAT),
    "/v1/completions": ("Complete a text", _object("prompt", prompt={"anyOf": [_SOME_TEXT, _SOME_TEXTS]}, **_OPENAI)),
    "/v1/responses": ("Answer a chat, in the form of OpenAI's Responses API", _object("input", **_RESPONSES)),
    "/v1/messages": (
        "Answer a chat, in the form of Anthropic's API",
        _object("messages", "max_tokens", max_tokens=_COUNT, stop_sequences=_TEXTS, **_CLAUDE),
    ),
    "/v1/messages/count_tokens": ("Count the tokens of a prompt", _object("messages", **_CLAUDE)),
    "/sessions": ("Open a session", _object(task_id=_TEXT)),
    "/feedback": (
        "End a session, or the sessions of some answers, with a reward",
        _object("reward", **_REWARD, metrics=_METRICS),
    ),
    "/commit": ("Store incomplete groups now", None),
}
_READS = {
    "/health": "Policy version, engines and load",
    "/v1/models": "Names of the served models",
    "/v1/models/{name}": "A served model",
}


def document() -> dict[str, Any]:
    """Return the document. The routes below /v1 also exist below /sessions/{session}."""
    paths: dict[str, Any] = {path: {"get": _operation(text)} for path, text in _READS.items()}
    paths["/health"]["get"]["security"] = []
    paths["/v1/models/{name}"]["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": _TEXT}]
    for path, (text, body) in _BODIES.items():
        paths[path] = {"post": _operation(text)}
        if body is not None:
            paths[path]["post"]["requestBody"] = {"required": bool(body["required"]), "content": _json(body)}
    session = {"name": "session", "in": "path", "required": True, "schema": _ID}
    for path in [path for path in paths if path.startswith("/v1/")]:
        copy = {**paths[path], "parameters": [*paths[path].get("parameters", ()), session]}
        paths[f"/sessions/{{session}}{path}"] = copy
    return {
        "openapi": "3.1.0",
        "info": {"title": "rftdask serve", "version": version("rftdask")},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}],
    }


def _operation(summary: str) -> dict[str, Any]:
    # "type" in an error is OpenAI's; Anthropic's clients read the outer one.
    error = _object("error", error=_object("message", "type", "param", "code"))
    responses = {"200": {"description": "Done"}, "4XX": {"description": "Not accepted", "content": _json(error)}}
    responses["503"] = {"description": "No engine is ready, or storage fails", "content": _json(error)}
    return {"summary": summary, "responses": responses}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
