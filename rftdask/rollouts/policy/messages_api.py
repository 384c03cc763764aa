"""Anthropic's Messages API as chat completions: a body in the one's words to the other's, and the answer back.

What chat completions refuse is refused here by the name that it has here. Tools are functions; those that Anthropic's
own service runs are refused. Knows no models and no HTTP.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rftdask.rollouts.policy.openai_api import BadRequestError, TextDelta, pieces

MESSAGES, COUNT_TOKENS = "messages", "messages/count_tokens"
_SAME = ("model", "temperature", "top_p", "top_k", "stream", "max_tokens", "metadata", "session_id")
_WITHOUT_EFFECT = frozenset(
    {"service_tier", "cache_control", "inference_geo", "betas", "speed", "diagnostics", "context_management"}
)
"""They say nothing about the answer."""
OWN_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "enable_thinking": "thinking",
    "thinking_token_budget": "thinking",
    "parallel_tool_calls": "tool_choice",
}
"""Parameter of chat completions -> its name here."""
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def as_chat(body: Any) -> dict[str, Any]:
    """The body of a chat completion that asks the same. Raises: BadRequestError."""
    if not isinstance(body, Mapping):
        raise BadRequestError("the body is no JSON object")
    given = {name: value for name, value in body.items() if value is not None and name not in _WITHOUT_EFFECT}
    chat: dict[str, Any] = {name: given.pop(name) for name in _SAME if name in given}
    system, asked = given.pop("system", ""), given.pop("messages", None)
    if not isinstance(asked, list) or not asked:
        raise BadRequestError("messages must be a list of at least one message", "messages")
    chat["messages"] = [{"role": "system", "content": system}] if system else []
    for message in asked:
        chat["messages"] += _messages_of(message)
    if stop := given.pop("stop_sequences", []):
        chat["stop"] = stop
    if tools := given.pop("tools", []):
        chat["tools"] = [_function(tool) for tool in tools] if isinstance(tools, list) else tools
    chat |= _choice(given.pop("tool_choice", {"type": "auto"}))
    chat |= _thinking(given.pop("thinking", {"type": None}))
    chat |= _output(given.pop("output_config", {}))
    for name, value in given.items():
        raise BadRequestError(f"{name}={value!r:.100} is not supported", name)
    return chat


def _choice(choice: Any) -> dict[str, Any]:
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "tool":
        chosen: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in ("auto", "none", "any"):
        chosen = "required" if kind == "any" else kind
    else:
        raise BadRequestError(f"tool_choice={choice!r:.100} is not supported", "tool_choice")
    one = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return {"tool_choice": chosen, **one}


def _thinking(asked: Any) -> dict[str, Any]:
    kind = asked.get("type") if isinstance(asked, Mapping) else asked
    if kind is None:
        return {}
    if kind not in ("disabled", "enabled", "adaptive"):
        raise BadRequestError(f"thinking={asked!r:.100} is not supported", "thinking")
    budget = {"thinking_token_budget": asked["budget_tokens"]} if "budget_tokens" in asked else {}
    return {"enable_thinking": kind != "disabled", **budget}


def _output(asked: Any) -> dict[str, Any]:
    if not isinstance(asked, Mapping) or asked.keys() - {"format", "effort"}:
        raise BadRequestError(f"output_config={asked!r:.100} is not supported", "output_config")
    chat = {} if asked.get("effort") is None else {"reasoning_effort": asked["effort"]}
    if (form := asked.get("format")) is not None:
        schema = form.get("schema") if isinstance(form, Mapping) and form.get("type") == "json_schema" else None
        if schema is None:
            raise BadRequestError(f"output_config.format {form!r:.100} is not supported", "output_config")
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    return chat


def _messages_of(message: Any) -> list[dict[str, Any]]:
    """A message of blocks: results of tools are messages of their own in chat completions, before what is said."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        if not isinstance(content, str):
            raise BadRequestError(f"a message must be an object with role and content, not {message!r:.60}", "messages")
        return [dict(message)]
    results, said, calls = [], [], []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result":
            told = block.get("content") or ""
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": told})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "image" and isinstance(source := block.get("source"), Mapping):
            url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
            said.append({"type": "image_url", "image_url": {"url": url}})
        elif kind not in (
            "thinking",
            "redacted_thinking",
        ):  # the model knows them: its answers go back as it wrote them
            said.append(block)  # what is no text is refused there
    rest = {"role": message.get("role"), "content": said, **({"tool_calls": calls} if calls else {})}
    return [*results, *([rest] if said or calls else [])]


def _function(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "custom") != "custom":
        raise BadRequestError("tools must be functions: those of Anthropic's own service are not here", "tools")
    keys = {"name": "name", "description": "description", "input_schema": "parameters"}
    function = {own: tool[key] for key, own in keys.items() if tool.get(key) is not None}
    return {"type": "function", "function": function}


def as_message(completion: Mapping[str, Any]) -> dict[str, Any]:
    """The Message of a chat completion."""
    [choice] = completion["choices"]
    message = choice["message"]
    content: list[dict[str, Any]] = []
    if message.get("reasoning"):
        content.append({"type": "thinking", "thinking": message["reasoning"], "signature": ""})
    if message["content"]:
        content.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
        # A policy may write what is no object; it is shown all the same.
        given = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
    stopped_at = choice.get("stop_reason")
    usual = "end_turn" if stopped_at is None else "stop_sequence"
    return {
        "id": f"msg_{completion['id'].rpartition('-')[2]}",
        "type": "message",
        "role": "assistant",
        "model": completion["model"],
        "content": content,
        "stop_reason": _STOP_REASONS.get(choice["finish_reason"], usual),
        "stop_sequence": stopped_at,
        "usage": {
            "input_tokens": completion["usage"]["prompt_tokens"],
            "output_tokens": completion["usage"]["completion_tokens"],
        },
    }


def events_of(message: Mapping[str, Any], split: Callable[[str], Sequence[str]] = pieces) -> Iterator[dict[str, Any]]:
    """The events of a stream that tells a whole message, its texts in the pieces of `split`."""
    usage = message["usage"]
    begun: dict[str, Any] = {
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 0},
    }
    yield {"type": "message_start", "message": {**message, **begun}}
    for index, block in enumerate(message["content"]):
        kind = block["type"]
        name = {"tool_use": "input", "text": "text", "thinking": "thinking"}[kind]
        empty: dict[str, Any] = {**block, name: {} if kind == "tool_use" else ""}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        if kind == "tool_use":
            told = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield {"type": "content_block_delta", "index": index, "delta": told}
        else:
            for piece in split(block[name]):
                told = {"type": f"{name}_delta", name: piece}
                yield TextDelta({"type": "content_block_delta", "index": index, "delta": told})
        yield {"type": "content_block_stop", "index": index}
    ended = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ended, "usage": usage}
    yield {"type": "message_stop"}
