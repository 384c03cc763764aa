"""Anthropic's Messages API in terms of chat completions: translates request bodies, answers and streams.

A parameter that chat completions refuse is refused under its name in this API. Tools must be functions; tools that
Anthropic's own service runs are refused. No models and no HTTP.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rftdask.rollouts.policy.openai_api import BadRequestError, TextDelta, pieces, read_parameters
from rftdask.storage.checked_json import parse_portable

MESSAGES, COUNT_TOKENS = "messages", "messages/count_tokens"
_SAME = ("model", "temperature", "top_p", "top_k", "stream", "max_tokens", "metadata", "session_id")
_WITHOUT_EFFECT = frozenset(
    {"service_tier", "cache_control", "inference_geo", "betas", "speed", "diagnostics", "context_management"}
)
"""Accepted parameters that do not affect the answer."""
OWN_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "enable_thinking": "thinking",
    "thinking_token_budget": "thinking",
    "parallel_tool_calls": "tool_choice",
}
"""Parameter of chat completions -> its name in this API."""
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def as_chat(body: Any) -> dict[str, Any]:
    """Translate a request to chat completions. Raises: BadRequestError."""
    parameters = read_parameters(body, _WITHOUT_EFFECT)
    chat: dict[str, Any] = {name: parameters.pop(name) for name in _SAME if name in parameters}
    system, messages = parameters.pop("system", ""), parameters.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages must be a list of at least one message", "messages")
    if not isinstance(system, str | list):
        raise BadRequestError("system must be text", "system")
    chat["messages"] = [{"role": "system", "content": system}] if system else []
    for message in messages:
        chat["messages"] += _messages_of(message)
    if "stop_sequences" in parameters:
        chat["stop"] = parameters.pop("stop_sequences")
    if (tools := parameters.pop("tools", [])) != []:
        chat["tools"] = [_function(tool) for tool in tools] if isinstance(tools, list) else tools
    chat |= _choice(parameters.pop("tool_choice", {"type": "auto"}))
    chat |= _thinking(parameters.pop("thinking", None))
    chat |= _output(parameters.pop("output_config", {}))
    for name, value in parameters.items():
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
    single = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return {"tool_choice": chosen, **single}


def _thinking(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in ("disabled", "enabled", "adaptive"):
        raise BadRequestError(f"thinking={value!r:.100} is not supported", "thinking")
    budget = {"thinking_token_budget": value["budget_tokens"]} if "budget_tokens" in value else {}
    return {"enable_thinking": kind != "disabled", **budget}


def _output(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or value.keys() - {"format", "effort"}:
        raise BadRequestError(f"output_config={value!r:.100} is not supported", "output_config")
    chat = {} if value.get("effort") is None else {"reasoning_effort": value["effort"]}
    if (form := value.get("format")) is not None:
        schema = form.get("schema") if isinstance(form, Mapping) and form.get("type") == "json_schema" else None
        if schema is None:
            raise BadRequestError(f"output_config.format {form!r:.100} is not supported", "output_config")
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    return chat


def _messages_of(message: Any) -> list[dict[str, Any]]:
    """Split a message of blocks: in chat completions, tool results are separate messages before the text."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        if not isinstance(content, str):
            raise BadRequestError(f"a message must be an object with role and content, not {message!r:.60}", "messages")
        return [dict(message)]
    results, parts, calls = [], [], []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result":
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")})
        elif kind == "tool_use":
            function = {
                "name": block.get("name"),
                "arguments": json.dumps({} if block.get("input") is None else block["input"]),
            }
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "image" and isinstance(source := block.get("source"), Mapping):
            url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        # Thoughts are already part of the answer, which returns to the model as it was sampled.
        elif kind not in ("thinking", "redacted_thinking"):
            parts.append(block)  # chat completions refuse what is not text
    rest = {"role": message.get("role"), "content": parts, **({"tool_calls": calls} if calls else {})}
    return [*results, *([rest] if parts or calls else [])]


def _function(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "custom") != "custom":
        raise BadRequestError("tools must be functions; tools of Anthropic's own service are not available", "tools")
    keys = {"name": "name", "description": "description", "input_schema": "parameters"}
    function = {name: tool[key] for key, name in keys.items() if tool.get(key) is not None}
    return {"type": "function", "function": function}


def as_answer(completion: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
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
            arguments = parse_portable(arguments)
        # The policy may emit arguments that are not an object; pass them through.
        value = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": value})
    stopped_at, usage = choice.get("stop_reason"), completion["usage"]
    default = "end_turn" if stopped_at is None else "stop_sequence"
    return {
        "id": f"msg_{completion['id'].rpartition('-')[2]}",
        **{"type": "message", "role": "assistant", "model": completion["model"], "content": content},
        "stop_reason": _STOP_REASONS.get(choice["finish_reason"], default),
        "stop_sequence": stopped_at,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }


def events_of(message: Mapping[str, Any], split: Callable[[str], Sequence[str]] = pieces) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream for a whole message. split: splits its texts."""
    usage = message["usage"]
    begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": {**message, **begun, "usage": {**usage, "output_tokens": 0}}}
    for index, block in enumerate(message["content"]):
        kind = block["type"]
        name = {"tool_use": "input", "text": "text", "thinking": "thinking"}[kind]
        empty: dict[str, Any] = {**block, name: {} if kind == "tool_use" else ""}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        if kind == "tool_use":
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        else:
            for piece in split(block[name]):
                delta = {"type": f"{name}_delta", name: piece}
                yield TextDelta({"type": "content_block_delta", "index": index, "delta": delta})
        yield {"type": "content_block_stop", "index": index}
    ended = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ended, "usage": usage}
    yield {"type": "message_stop"}
