"""OpenAI client: `client.chat.completions.create(...)` over a workflow's model. No HTTP, no package `openai`.

For agents written against that interface. Its answers have the fields of openai's that such code reads.
Every call is one of the model's own, so it is recorded with the tokens that were sampled; an answer is complete before
a stream begins. A parameter that would change what is sampled and is not known here is refused, not ignored.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

from rftdask.rollouts.workflows.base import Response

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "repetition_penalty": "repetition_penalty",
}
"""Parameter -> field of SamplingParams."""
_WITHOUT_EFFECT = frozenset({"timeout", "user", "metadata", "store", "stream_options", "extra_headers", "seed"})
"""Accepted: they say nothing about the answer, but for the seed, which is the rollout's own."""
_AS_DEFAULT = {
    "n": 1,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "frequency_penalty": 0,
    "presence_penalty": 0,
}
"""Accepted with this value."""
_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_PIECE_LENGTH = 32
"""Characters in one chunk of a stream."""


class OpenAIObject(SimpleNamespace):
    """An object of openai's, such as a ChatCompletion: its fields are attributes."""

    def model_dump(self, *, exclude_none: bool = False, **_formats: Any) -> dict[str, Any]:
        """The fields as plain data, in their order."""

        def plain(value: Any) -> Any:
            if isinstance(value, OpenAIObject):
                return value.model_dump(exclude_none=exclude_none)
            return [plain(item) for item in value] if isinstance(value, list) else value

        return {name: plain(value) for name, value in vars(self).items() if not (exclude_none and value is None)}

    def model_dump_json(self, *, exclude_none: bool = False, **_formats: Any) -> str:
        """`model_dump` as JSON text."""
        return json.dumps(self.model_dump(exclude_none=exclude_none))


class ToolCall(NamedTuple):
    """A call of a tool as a policy writes it."""

    name: str
    arguments: Any


class ChatModel(Protocol):
    """The part of a model that the client uses."""

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Response:
        """See PolicyModel.chat."""


class OpenAIClient:
    """Example: answer = await model.openai_client().chat.completions.create(messages=[...], model="policy")"""

    def __init__(self, model: ChatModel, wait: Callable[[Any], Any] | None = None) -> None:
        """wait: gives the result of a coroutine, for code that blocks; None: `create` is awaited."""
        self.chat = SimpleNamespace(completions=Completions(model, wait))


class Completions:
    """The `completions` of a client."""

    def __init__(self, model: ChatModel, wait: Callable[[Any], Any] | None) -> None:
        self._model = model
        self._wait = wait
        # By message, what the policy wrote: a template would write a call of a tool in its own way.
        self._told: dict[str, str] = {}

    def create(self, *, messages: Sequence[Mapping[str, Any]], model: str = "policy", **parameters: Any) -> Any:
        """A ChatCompletion, or with stream=True an iterator of its chunks; both async unless the client blocks.

        Raises: ValueError: a parameter that is not supported, by name.
        """
        answer = self._create(list(messages), model, parameters)
        if self._wait is None:
            return answer
        completed = self._wait(answer)
        return completed.blocking() if isinstance(completed, CompletionStream) else completed

    async def _create(self, messages: list[Mapping[str, Any]], model: str, parameters: dict[str, Any]) -> Any:
        streams = bool(parameters.pop("stream", False))
        with_logprobs = bool(parameters.pop("logprobs", False))
        # Only the logprob of the sampled token is known, so the list of others is empty in every answer.
        parameters.pop("top_logprobs", None)
        # Before the policy is asked: what is refused costs no call.
        options = chat_options(parameters)
        chat = [_plain(message) for message in messages]
        chat = [self._as_sampled(message) if "tool_calls" in message else message for message in chat]
        response = await self._model.chat(chat, **options)
        completion = as_completion(response, model, parses_tools="tools" in options, with_logprobs=with_logprobs)
        if completion.choices[0].message.tool_calls:
            self._told[_key(_plain(completion.choices[0].message))] = response.text
        return CompletionStream(chunks_of(completion)) if streams else completion

    def _as_sampled(self, message: dict[str, Any]) -> dict[str, Any]:
        # A message with calls of tools that the policy made, as the text that it wrote.
        text = self._told.get(_key(message))
        return message if text is None else {"role": "assistant", "content": text}


def _key(message: Mapping[str, Any]) -> str:
    return json.dumps([message["content"], message["tool_calls"]], sort_keys=True, default=str)


class CompletionStream:
    """The chunks of one answer, for `async for`."""

    def __init__(self, chunks: Sequence[OpenAIObject]) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[OpenAIObject]:
        for chunk in self._chunks:
            yield chunk

    def blocking(self) -> Iterator[OpenAIObject]:
        """The chunks for code that does not await."""
        return iter(self._chunks)


def chat_options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of `create` as options of `PolicyHandle.chat`. Raises: ValueError: not supported, by name."""
    options: dict[str, Any] = {}
    # None is how clients say "not given". `extra_body` holds what openai's own signature does not have.
    given = {name: value for name, value in parameters.items() if value is not None}
    for name, value in {**given, **given.pop("extra_body", {})}.items():
        if name in _SAMPLING:
            options[_SAMPLING[name]] = value
        elif name == "tools":
            options["tools"] = list(value)
        elif (name in _AS_DEFAULT and value == _AS_DEFAULT[name]) or name in _WITHOUT_EFFECT or name == "extra_body":
            continue
        else:
            known = ", ".join(sorted({*_SAMPLING, *_AS_DEFAULT, *_WITHOUT_EFFECT, "stream", "logprobs", "tools"}))
            raise ValueError(f"chat.completions.create: {name}={value!r:.100} is not supported; known: {known}")
    return options


def as_completion(response: Response, model: str, *, parses_tools: bool, with_logprobs: bool) -> OpenAIObject:
    """The response as a ChatCompletion; `parses_tools`: calls of tools in its text become its `tool_calls`."""
    text, finish_reason = response.text, response.finish_reason
    calls = [
        OpenAIObject(
            id=f"call_{index}",
            function=OpenAIObject(name=call.name, arguments=json.dumps(call.arguments)),
            type="function",
            index=index,
        )
        for index, call in enumerate(parse_tool_calls(text) if parses_tools else [])
    ]
    if calls:
        # The client sees calls in their own field, as with openai's; the tokens that are trained keep them.
        text = _TOOL_CALL.sub("", text).strip()
        # A call that was cut off by the limit stays "length", as with openai's.
        finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
    tokens = [
        OpenAIObject(token=f"token_id:{token}", logprob=logprob, bytes=None, top_logprobs=[])
        for token, logprob in zip(response.tokens, response.logprobs, strict=True)
    ]
    num_prompt, num_response = len(response.prompt_tokens), len(response.tokens)
    choice = OpenAIObject(
        message=_message("assistant", text or None if calls else text, calls or None),
        finish_reason=finish_reason,
        index=0,
        logprobs=OpenAIObject(content=tokens) if with_logprobs else None,
    )
    return OpenAIObject(
        id=f"chatcmpl-{uuid.uuid4().hex[:12]}",
        model=model,
        choices=[choice],
        usage=OpenAIObject(
            prompt_tokens=num_prompt, completion_tokens=num_response, total_tokens=num_prompt + num_response
        ),
        object="chat.completion",
        created=0,
    )


def _message(
    role: str | None, content: str | None = None, tool_calls: list[OpenAIObject] | None = None
) -> OpenAIObject:
    return OpenAIObject(role=role, content=content, tool_calls=tool_calls, refusal=None)


def chunks_of(completion: OpenAIObject) -> list[OpenAIObject]:
    """The answer in pieces: the role, then the text, tool calls whole, and last the reason why it ended."""
    whole = completion.choices[0]

    def chunk(delta: OpenAIObject, **last: Any) -> OpenAIObject:
        # Only the last piece says why it ended; agents stop reading there.
        ends = {"finish_reason": whole.finish_reason, "logprobs": whole.logprobs} if last else {}
        choice = OpenAIObject(**{"delta": delta, "index": 0, "finish_reason": None, "logprobs": None, **ends})
        common = {**vars(completion), "usage": None, "object": "chat.completion.chunk"}
        return OpenAIObject(**{**common, "choices": [choice], **last})

    pieces = re.findall(rf"(?s).{{1,{_PIECE_LENGTH}}}", whole.message.content or "")
    deltas = [_message("assistant", ""), *(_message(None, piece) for piece in pieces)]
    deltas += [_message(None, tool_calls=[call]) for call in whole.message.tool_calls or []]
    return [*map(chunk, deltas), chunk(_message(None), usage=completion.usage)]


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls a response makes, written <tool_call>{"name": ..., "arguments": {...}}</tool_call> as Qwen and Hermes
    models are taught; what is no such JSON is no call.
    """
    calls: list[ToolCall] = []
    for match in _TOOL_CALL.finditer(text):
        with contextlib.suppress(ValueError):
            call = json.loads(match[1])
            if isinstance(call.get("name"), str):  # the pattern begins with a brace, so it is an object
                calls.append(ToolCall(call["name"], call.get("arguments", {})))
    return calls


def _plain(message: Any) -> dict[str, Any]:
    """A message as chat templates take it. Agents give back the message they were answered with; the arguments of its
    tool calls are an object again, because templates write them as JSON themselves.
    """
    given = message.model_dump() if isinstance(message, OpenAIObject) else dict(message)
    # Templates read the content of every message, also of one that only calls tools.
    plain = {"content": "", **{key: value for key, value in given.items() if value is not None}}
    calls = []
    for call in plain.get("tool_calls", ()):
        function = dict((call.model_dump() if isinstance(call, OpenAIObject) else call)["function"])
        if isinstance(function.get("arguments"), str):
            with contextlib.suppress(ValueError):  # what is no JSON is shown as it is
                function["arguments"] = json.loads(function["arguments"] or "{}")
        calls.append({"type": "function", "function": function})
    return {**plain, "tool_calls": calls} if "tool_calls" in plain else plain
