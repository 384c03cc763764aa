"""OpenAI's Responses API in terms of chat completions: translates request bodies, answers and streams.

Stateless: `input` must hold the whole conversation, as for agents that set `store` to false. A parameter that chat
completions refuse is refused under its name in this API. No models and no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rftdask.rollouts.policy.openai_api import BadRequestError, TextDelta, pieces, read_parameters

RESPONSES = "responses"
_SAME = ("model", "temperature", "top_p", "top_k", "min_tokens", "repetition_penalty", "stop", "seed", "stream")
_PASSED_ON = (*_SAME, "parallel_tool_calls", "chat_template_kwargs", "enable_thinking", "user", "metadata", "store")
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "include": ([], ["reasoning.encrypted_content"]),
    "truncation": ("disabled",),
    "background": (False,),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
}
"""Parameters accepted only with these values."""
_WITHOUT_EFFECT = ("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "session_id")
OWN_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "verbosity": "text",
    "reasoning_effort": "reasoning",
}
"""Parameter of chat completions -> its name in this API."""


def as_chat(body: Any) -> dict[str, Any]:
    """Translate a request to chat completions. Raises: BadRequestError."""
    parameters = read_parameters(body, _WITHOUT_EFFECT)
    chat: dict[str, Any] = {name: parameters.pop(name) for name in _PASSED_ON if name in parameters}
    messages = _messages(parameters.pop("input", None))
    instructions = parameters.pop("instructions", "")
    if not isinstance(instructions, str | list):
        raise BadRequestError("instructions must be text", "instructions")
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    chat["messages"] = messages
    if "max_output_tokens" in parameters:
        chat["max_completion_tokens"] = parameters.pop("max_output_tokens")
    if (tools := parameters.pop("tools", [])) != []:
        if not isinstance(tools, list) or not all(
            isinstance(t, Mapping) and t.get("type") == "function" for t in tools
        ):
            raise BadRequestError("tools must be functions; tools of OpenAI's own service are not available", "tools")
        keys = ("name", "description", "parameters")
        functions = [{key: tool[key] for key in keys if tool.get(key) is not None} for tool in tools]
        chat["tools"] = [{"type": "function", "function": function} for function in functions]
    if "tool_choice" in parameters:
        choice = parameters.pop("tool_choice")
        if isinstance(choice, Mapping) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = choice
    for name, parts in (
        ("text", {"format": "response_format", "verbosity": "verbosity"}),
        ("reasoning", {"effort": "reasoning_effort"}),
    ):
        value = parameters.pop(name, {})
        # Summaries are never made, because thoughts are returned in full.
        if not isinstance(value, Mapping) or value.keys() - parts - {"summary", "generate_summary"}:
            raise BadRequestError(f"{name}={value!r:.100} is not supported; it may hold {', '.join(parts)}", name)
        chat |= {parts[key]: part for key, part in value.items() if key in parts and part is not None}
    form = chat.get("response_format")
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        chat["response_format"] = {"type": "json_schema", "json_schema": form}
    for name, value in parameters.items():
        if value not in _NEUTRAL_VALUES.get(name, ()):
            is_stateful = name in ("previous_response_id", "conversation")
            advice = "; conversations are not stored, so send the whole one in `input`" if is_stateful else ""
            raise BadRequestError(f"{name}={value!r:.100} is not supported{advice}", name)
    return chat


def _messages(items: Any) -> list[dict[str, Any]]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise BadRequestError("input must be text or a list of items", "input")
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "message":
            message = {"role": item.get("role"), "content": _text(item.get("content"))}
            # Thoughts before an answer belong to the same message.
            if messages and messages[-1] == {"role": "assistant", "content": ""} and message["role"] == "assistant":
                messages.pop()
            messages.append(message)
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item.get("call_id"), "type": "function", "function": call})
        elif kind == "function_call_output":
            content = _text(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind != "reasoning":  # already part of the answer, which returns to the model as it was sampled
            raise BadRequestError(f"input items of this kind are not supported: {item!r:.100}", "input")
    return messages


def _text(content: Any) -> Any:
    # Only text parts differ in name. Chat completions recognize images by `image_url` and refuse other parts.
    if not isinstance(content, list):
        return content
    texts = [isinstance(part, Mapping) and part.get("type") in ("input_text", "output_text") for part in content]
    return [{**part, "type": "text"} if is_text else part for part, is_text in zip(content, texts, strict=True)]


def as_answer(completion: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    [choice] = completion["choices"]
    message, name = choice["message"], completion["id"].rpartition("-")[2]
    is_cut = choice["finish_reason"] == "length"
    status = "incomplete" if is_cut else "completed"
    output: list[dict[str, Any]] = []
    if message.get("reasoning"):
        content = [{"type": "reasoning_text", "text": message["reasoning"]}]
        output.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content})
    if message["content"]:
        part = {"type": "output_text", "text": message["content"], "annotations": []}
        frame = {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": status}
        output.append({**frame, "content": [part]})
    for number, call in enumerate(message.get("tool_calls", ())):
        frame = {"type": "function_call", "id": f"fc_{name}_{number}", "call_id": call["id"], "status": "completed"}
        output.append({**frame, **call["function"]})
    usage = completion["usage"]
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": completion["created"],
        "model": completion["model"],
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        **{key: body.get(key) for key in ("instructions", "temperature", "top_p")},
        "metadata": body.get("metadata") or {},
        "output": output,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def events_of(response: Mapping[str, Any], split: Callable[[str], Sequence[str]] = pieces) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream for a whole response, without sequence numbers. split: splits its texts."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        opened = {**item, "status": "in_progress"} if "status" in item else dict(item)
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        opened |= empty
        yield {"type": "response.output_item.added", "output_index": index, "item": opened}
        for number, part in enumerate(item.get("content", ())):
            place = {**at, "content_index": number}
            kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            logprobs: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
            yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
            for piece in split(part["text"]):
                yield TextDelta({"type": f"response.{kind}.delta", **place, "delta": piece, **logprobs})
            yield {"type": f"response.{kind}.done", **place, "text": part["text"], **logprobs}
            yield {"type": "response.content_part.done", **place, "part": part}
        if item["type"] == "function_call":
            yield {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]}
            call = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **at, **call}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}
