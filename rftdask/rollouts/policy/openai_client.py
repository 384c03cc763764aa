"""OpenAI client: `client.chat.completions.create(...)` over a workflow's model. No HTTP, no package `openai`.

For agents written against that interface. The types below have the names and fields of openai's that such code reads.
Every call is one of the model's own, so it is recorded with the tokens that were sampled; an answer is complete before
a stream begins. A parameter that would change what is sampled and is not known here is refused, not ignored.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

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


class _Data:
    """Methods that openai's types offer beside their fields, as far as agents use them."""

    def model_dump(self, *, exclude_none: bool = False, **_formats: Any) -> dict[str, Any]:
        def kept(items: list[tuple[str, Any]]) -> dict[str, Any]:
            return {key: value for key, value in items if not (exclude_none and value is None)}

        plain: dict[str, Any] = asdict(self, dict_factory=kept)  # type: ignore[call-overload]  # a dataclass
        return plain

    def model_dump_json(self, *, exclude_none: bool = False, **_formats: Any) -> str:
        return json.dumps(self.model_dump(exclude_none=exclude_none))


@dataclass(frozen=True)
class Function(_Data):
    name: str
    arguments: str
    """JSON text of the call's arguments."""


@dataclass(frozen=True)
class ToolCall(_Data):
    id: str
    function: Function
    type: str = "function"
    index: int = 0


@dataclass(frozen=True)
class ChatCompletionMessage(_Data):
    role: str | None = "assistant"
    content: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None


@dataclass(frozen=True)
class TokenLogprob(_Data):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Logprobs(_Data):
    content: list[TokenLogprob] | None = None


@dataclass(frozen=True)
class Choice(_Data):
    message: ChatCompletionMessage
    finish_reason: str
    index: int = 0
    logprobs: Logprobs | None = None


@dataclass(frozen=True)
class DeltaChoice(_Data):
    delta: ChatCompletionMessage
    index: int = 0
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


@dataclass(frozen=True)
class Usage(_Data):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(frozen=True)
class ChatCompletion(_Data):
    id: str
    model: str
    choices: list[Choice]
    usage: Usage
    object: str = "chat.completion"
    created: int = 0


@dataclass(frozen=True)
class ChatCompletionChunk(_Data):
    id: str
    model: str
    choices: list[DeltaChoice]
    usage: Usage | None = None
    object: str = "chat.completion.chunk"
    created: int = 0


class ChatModel(Protocol):
    """The part of a model that the client uses."""

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Response: ...


class OpenAIClient:
    """Example: answer = await model.openai_client().chat.completions.create(messages=[...], model="policy")"""

    def __init__(self, model: ChatModel, wait: Callable[[Any], Any] | None = None) -> None:
        """wait: gives the result of a coroutine, for code that blocks; None: `create` is awaited."""
        self.chat = _Chat(Completions(model, wait))


class _Chat:
    def __init__(self, completions: Completions) -> None:
        self.completions = completions


class Completions:
    def __init__(self, model: ChatModel, wait: Callable[[Any], Any] | None) -> None:
        self._model = model
        self._wait = wait

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
        parameters.pop("top_logprobs", None)
        options = chat_options(parameters)
        response = await self._model.chat([_plain(message) for message in messages], **options)
        completion = as_completion(response, model, parses_tools="tools" in options, with_logprobs=with_logprobs)
        return CompletionStream(chunks_of(completion)) if streams else completion


class CompletionStream:
    """The chunks of one answer, for `async for`."""

    def __init__(self, chunks: Sequence[ChatCompletionChunk]) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[ChatCompletionChunk]:
        for chunk in self._chunks:
            yield chunk

    def blocking(self) -> Iterator[ChatCompletionChunk]:
        return iter(self._chunks)


def chat_options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of `create` as options of `PolicyHandle.chat`. Raises: ValueError: not supported, by name."""
    options: dict[str, Any] = {}
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


def as_completion(response: Response, model: str, *, parses_tools: bool, with_logprobs: bool) -> ChatCompletion:
    calls = parse_tool_calls(response.text) if parses_tools else []
    text = _TOOL_CALL.sub("", response.text).strip() if calls else response.text
    message = ChatCompletionMessage(content=text or None if calls else text, tool_calls=calls or None)
    finish_reason = "tool_calls" if calls and response.finish_reason == "stop" else response.finish_reason
    tokens = [TokenLogprob(token=f"token_id:{t}", logprob=p) for t, p in zip(response.tokens, response.logprobs)]  # noqa: B905
    usage = Usage(
        prompt_tokens=len(response.prompt_tokens),
        completion_tokens=len(response.tokens),
        total_tokens=len(response.prompt_tokens) + len(response.tokens),
    )
    choice = Choice(
        message=message, finish_reason=finish_reason, logprobs=Logprobs(content=tokens) if with_logprobs else None
    )
    return ChatCompletion(id=f"chatcmpl-{uuid.uuid4().hex[:12]}", model=model, choices=[choice], usage=usage)


def chunks_of(completion: ChatCompletion) -> list[ChatCompletionChunk]:
    """The answer in pieces: the role, then the text, tool calls whole, and last the reason why it ended."""
    choice = completion.choices[0]
    deltas = [ChatCompletionMessage(content="")]
    content = choice.message.content or ""
    pieces = re.findall(rf"(?s).{{1,{_PIECE_LENGTH}}}", content)
    deltas += [ChatCompletionMessage(role=None, content=piece) for piece in pieces]
    for call in choice.message.tool_calls or []:
        deltas.append(ChatCompletionMessage(role=None, tool_calls=[call]))
    chunk = ChatCompletionChunk(id=completion.id, model=completion.model, choices=[])
    chunks = [replace(chunk, choices=[DeltaChoice(delta=delta)]) for delta in deltas]
    last = DeltaChoice(
        delta=ChatCompletionMessage(role=None), finish_reason=choice.finish_reason, logprobs=choice.logprobs
    )
    return [*chunks, replace(chunk, choices=[last], usage=completion.usage)]


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls a response makes, written <tool_call>{"name": ..., "arguments": {...}}</tool_call> as Qwen and Hermes
    models are taught; what is no such JSON is no call.
    """
    calls: list[ToolCall] = []
    for match in _TOOL_CALL.finditer(text):
        try:
            call = json.loads(match[1])
        except ValueError:
            continue
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            arguments = json.dumps(call.get("arguments", {}))
            name = Function(name=call["name"], arguments=arguments)
            calls.append(ToolCall(id=f"call_{len(calls)}", function=name, index=len(calls)))
    return calls


def _plain(message: Any) -> dict[str, Any]:
    """A message as chat templates take it. Agents give back the ChatCompletionMessage they were answered with; the
    arguments of its tool calls are an object again, because templates write them as JSON themselves.
    """
    given = message.model_dump() if isinstance(message, _Data) else dict(message)
    plain = {key: value for key, value in given.items() if value is not None}
    plain.setdefault("content", "")
    if "tool_calls" in plain:
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    return plain


def _plain_call(call: Any) -> dict[str, Any]:
    given = call.model_dump() if isinstance(call, _Data) else dict(call)
    function = dict(given["function"])
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError):  # what is no JSON is shown as it is
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return {"type": "function", "function": function}
