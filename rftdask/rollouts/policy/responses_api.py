"""OpenAI's Responses API as chat completions: a body in the one's words to the other's, the answer and its stream back.

It keeps no state: a request tells the whole conversation (`input`), as agents that set `store` to false do. What chat
completions refuse is refused here by the name that it has here. Knows no models and no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rftdask.rollouts.policy.openai_api import BadRequestError, TextDelta, pieces

RESPONSES = "responses"
_SAME = ("model", "temperature", "top_p", "top_k", "min_tokens", "repetition_penalty", "stop", "seed", "stream")
_PASSED_ON = (*_SAME, "parallel_tool_calls", "chat_template_kwargs", "enable_thinking", "user", "metadata", "store")
_NOTHING_ASKED: Mapping[str, tuple[Any, ...]] = {
    "include": ([], ["reasoning.encrypted_content"]),
    "truncation": ("disabled",),
    "background": (False,),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
}
"""Accepted with these values alone."""
_WITHOUT_EFFECT = ("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "session_id")
OWN_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "verbosity": "text",
    "reasoning_effort": "reasoning",
}
"""Parameter of chat completions -> its name here."""


def as_chat(body: Any) -> dict[str, Any]:
    """The body of a chat completion that asks the same. Raises: BadRequestError."""
    if not isinstance(body, Mapping):
        raise BadRequestError("the body is no JSON object")
    given = {name: value for name, value in body.items() if value is not None and name not in _WITHOUT_EFFECT}
    chat: dict[str, Any] = {name: given.pop(name) for name in _PASSED_ON if name in given}
    messages = _messages(given.pop("input", None))
    if instructions := given.pop("instructions", ""):
        messages.insert(0, {"role": "system", "content": instructions})
    chat["messages"] = messages
    if "max_output_tokens" in given:
        chat["max_completion_tokens"] = given.pop("max_output_tokens")
    if tools := given.pop("tools", []):
        if not isinstance(tools, list) or not all(
            isinstance(t, Mapping) and t.get("type") == "function" for t in tools
        ):
            raise BadRequestError("tools must be functions: those of OpenAI's own service are not here", "tools")
        keys = ("name", "description", "parameters")
        functions = [{key: tool[key] for key in keys if tool.get(key) is not None} for tool in tools]
        chat["tools"] = [{"type": "function", "function": function} for function in functions]
    if "tool_choice" in given:
        choice = given.pop("tool_choice")
        if isinstance(choice, Mapping) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = choice
    for name, parts in (
        ("text", {"format": "response_format", "verbosity": "verbosity"}),
        ("reasoning", {"effort": "reasoning_effort"}),
    ):
        asked = given.pop(name, {})
        # Thoughts are told whole, so nothing is summed up.
        strange = asked.keys() - parts - {"summary", "generate_summary"} if isinstance(asked, Mapping) else {name}
        if strange:
            raise BadRequestError(f"{name}={asked!r:.100} is not supported: it may hold {', '.join(parts)}", name)
        chat |= {parts[key]: value for key, value in asked.items() if key in parts and value is not None}
    form = chat.get("response_format")
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        chat["response_format"] = {"type": "json_schema", "json_schema": form}
    for name, value in given.items():
        if value not in _NOTHING_ASKED.get(name, ()):
            kept = ": no conversation is kept here, so tell all of it in `input`" * (
                name in ("previous_response_id", "conversation")
            )
            raise BadRequestError(f"{name}={value!r:.100} is not supported{kept}", name)
    return chat


def _messages(asked: Any) -> list[dict[str, Any]]:
    if isinstance(asked, str):
        return [{"role": "user", "content": asked}]
    if not isinstance(asked, list) or not asked:
        raise BadRequestError("input must be a text, or a list of items", "input")
    messages: list[dict[str, Any]] = []
    for item in asked:
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "message":
            message = {"role": item.get("role"), "content": _text(item.get("content"))}
            # Thoughts before an answer are of the same message.
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
        elif kind != "reasoning":  # which the model knows: its answers go back to it as it wrote them
            raise BadRequestError(f"input holds {item!r:.100}, which is not supported", "input")
    return messages


def _text(content: Any) -> Any:
    # Parts under the names that chat completions have for them; others are refused there.
    if not isinstance(content, list):
        return content
    own = ("input_text", "output_text")  # an input_image is told by its image_url there, too
    return [
        {**part, "type": "text"} if isinstance(part, Mapping) and part.get("type") in own else part for part in content
    ]


def as_response(completion: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """The Response of a chat completion to the request `body`."""
    from openai.types.responses import Response  # late: it takes most of a second

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
        own = {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": status}
        output.append({**own, "content": [part]})
    for number, call in enumerate(message.get("tool_calls", ())):
        own = {"type": "function_call", "id": f"fc_{name}_{number}", "call_id": call["id"], "status": "completed"}
        output.append({**own, **call["function"]})
    usage = completion["usage"]
    response = Response.model_validate(
        {
            "id": f"resp_{name}",
            "object": "response",
            "created_at": completion["created"],
            "model": completion["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata") or {},
            "output": output,
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "temperature": body.get("temperature"),
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": body.get("top_p"),
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }
    )
    return response.model_dump(mode="json", exclude_unset=True)


def events_of(response: Mapping[str, Any], split: Callable[[str], Sequence[str]] = pieces) -> Iterator[dict[str, Any]]:
    """The events of a stream that tells a whole response, its texts in the pieces of `split`; without numbers."""
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
            here = {**at, "content_index": number}
            kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
            yield {"type": "response.content_part.added", **here, "part": {**part, "text": ""}}
            for piece in split(part["text"]):
                yield TextDelta({"type": f"response.{kind}.delta", **here, "delta": piece, **more})
            yield {"type": f"response.{kind}.done", **here, "text": part["text"], **more}
            yield {"type": "response.content_part.done", **here, "part": part}
        if item["type"] == "function_call":
            yield {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]}
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **at, **told}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}
