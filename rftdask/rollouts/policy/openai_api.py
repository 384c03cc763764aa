"""OpenAI's API in front of a model that is asked in text: bodies of requests in, bodies of answers out. Knows no HTTP.

Invariant: what a request asks for is done, or refused with an error in OpenAI's form that names the parameter; nothing
is left out in silence. Answers are of the types of the package openai, which is imported late: it takes most of a
second, and is optional.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rftdask.config.plugins import did_you_mean
from rftdask.data.tokenizer import Tokenizer
from rftdask.rollouts.policy.answer_parsers import ParsedAnswer, template_of
from rftdask.rollouts.workflows.base import Response

if TYPE_CHECKING:
    from openai.types import CompletionUsage
    from openai.types.chat import ChatCompletion

CHAT = "chat/completions"
COMPLETIONS = "completions"
MAX_CHOICES = 128
"""Most answers to one request, as at OpenAI."""
_PIECE_LENGTH = 32
"""Characters in one chunk of a stream."""
_NUMBERS: Mapping[str, tuple[str, type, float, float]] = {
    "temperature": ("temperature", float, 0, 100),
    "top_p": ("top_p", float, 1e-9, 1),
    "top_k": ("top_k", int, -1, 2**31),
    "max_tokens": ("max_tokens", int, 1, 2**31),
    "max_completion_tokens": ("max_tokens", int, 1, 2**31),
    "min_tokens": ("min_tokens", int, 0, 2**31),
    "repetition_penalty": ("repetition_penalty", float, 1e-3, 100),
    "thinking_token_budget": ("thinking_token_budget", int, 0, 2**31),
}
"""Parameter -> (field of SamplingParams, type, least, most)."""
_WITHOUT_EFFECT = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "session_id", "stream_options"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    }
)
"""They say nothing about the answer."""
_NOTHING_ASKED: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "ignore_eos": (False,),
    "add_generation_prompt": (True,),
}
"""Parameters that are accepted with these values alone, which ask for nothing."""
_TEMPLATE_KEYS = ("enable_thinking", "reasoning_effort")
"""Parameters that the chat template reads."""
NOT_GUIDED = "its engine does not guide what is sampled: ask for it in a message, and look at the answer"


class BadRequestError(ValueError):
    """A request cannot be answered as it is; `param` is the parameter."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True)
class OpenAIAnswer:
    """What a request is answered with."""

    status: int
    """As in HTTP."""
    body: Mapping[str, Any]
    """A completion, or {"error": {"message", "type", "param", "code"}}."""
    responses: tuple[Response, ...] = ()
    """The answers as they were sampled, one for each choice."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of HTTP, beside the usual ones."""


def refusal(
    message: str,
    param: str | None = None,
    code: str | None = None,
    status: int = 400,
    headers: Mapping[str, str] | None = None,
) -> OpenAIAnswer:
    """An error in OpenAI's form, and in Anthropic's."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    # "type" is where Anthropic's clients look; the rest is theirs, too.
    body = {"type": "error", "error": {"message": message, "type": kind, "param": param, "code": code}}
    return OpenAIAnswer(status, body, headers=headers or {})


WRONG_KEY = refusal("wrong key", code="invalid_api_key", status=401)
MODELS = OpenAIAnswer(
    200,
    {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "rftdask"}]},
)
"""The answer to who asks which models there are."""


@dataclass(frozen=True)
class Form:
    """What an answer has to be, thoughts before it aside: JSON of a schema, or calls of tools."""

    param: Literal["response_format", "tool_choice"]
    """Who asks for it."""
    schema: Mapping[str, Any]
    """Of the answer, or of a call: {"name": ..., "arguments": ...}."""
    max_calls: int | None = None
    """Of tools; None: as many as the policy likes."""


@dataclass(frozen=True)
class OpenAIRequest:
    """A request, checked, in the words of `PolicyModel`."""

    path: Literal["chat/completions", "completions"]
    model: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Of a chat: as chat templates take them."""
    prompts: tuple[str, ...] = ()
    """Of completions."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What overrides SamplingParams."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Given to the chat template, `tools` among them."""
    tools: list[Any] | None = None
    """Tools whose calls in an answer become its `tool_calls`; None: an answer is text."""
    form: Form | None = None
    """What an answer has to be; None: anything."""
    only_first_call: bool = False
    n: int = 1
    """Answers to each prompt."""
    seed: int | None = None
    logprobs: bool = False
    token_ids: bool = False


NameImage = Callable[[str], str]
"""The name of an image, of a data URL or of its name. Raises: BadRequestError."""


def read_request(
    path: str, body: Any, tokenizer: Tokenizer | None, name_image: NameImage | None = None
) -> OpenAIRequest:
    """The request of a body that JSON gave. `tokenizer`: whose template renders it; `name_image`: None: the model reads
    text only. Raises: BadRequestError."""
    if path not in (CHAT, COMPLETIONS):
        raise BadRequestError(
            f"there is no {path}; there are {CHAT}, {COMPLETIONS}, responses, messages and models", code="not_found"
        )
    if not isinstance(body, Mapping):
        raise BadRequestError("the body is no JSON object")
    # null is how clients say "not given".
    given = {name: value for name, value in body.items() if value is not None}
    is_chat = path == CHAT
    options: dict[str, Any] = {}
    for name in [name for name in _NUMBERS if name in given]:
        key, kind, least, most = _NUMBERS[name]
        options[key] = _number(name, given.pop(name), kind, least, most)
    for name in ("stop", "bad_words"):
        if texts := texts_of(name, given.pop(name, None)):
            options[name] = texts
    n = int(_number("n", given.pop("n", 1), int, 1, MAX_CHOICES))
    seed = given.pop("seed", None)
    if seed is not None:
        _number("seed", seed, int, -(2**63), 2**64)
    model, tools = given.pop("model", "policy"), given.pop("tools", None)
    if not isinstance(model, str):
        raise BadRequestError("model is a text", "model")
    asked: dict[str, Any] = {"path": path, "model": model, "options": options, "n": n, "seed": seed}
    asked["token_ids"] = _flag("return_token_ids", given)
    _flag("stream", given)
    logprobs = given.pop("logprobs", False)
    if not isinstance(logprobs, bool) and (is_chat or logprobs != 0):
        what = "true or false" if is_chat else "0: the logprob of the sampled token is known, not those of others"
        raise BadRequestError(f"logprobs must be {what}", "logprobs")
    asked["logprobs"] = logprobs is not False  # 0 of completions asks for that of the sampled token
    if is_chat:
        asked |= _chat_parts(given, tools, template_of(tokenizer), name_image)
    else:
        prompt = given.pop("prompt", None)
        prompts = [prompt] if isinstance(prompt, str) else prompt
        if not isinstance(prompts, list) or not prompts or not all(isinstance(each, str) for each in prompts):
            raise BadRequestError("prompt must be a text, or a list of texts; token ids are not taken", "prompt")
        asked["prompts"] = tuple(prompts)
        if n * len(prompts) > MAX_CHOICES:
            raise BadRequestError(f"n times the prompts are more than {MAX_CHOICES}", "n")
    for name, value in given.items():
        if name in _WITHOUT_EFFECT or value in _NOTHING_ASKED.get(name, ()):
            continue
        if name in _NOTHING_ASKED:
            raise BadRequestError(f"{name}={value!r:.100} is not supported; leave it out", name)
        known = (*_NUMBERS, *_WITHOUT_EFFECT, *_NOTHING_ASKED, *_TEMPLATE_KEYS, *_KNOWN)
        raise BadRequestError(f"{name}={value!r:.100} is not supported{did_you_mean(name, known)}", name)
    return OpenAIRequest(**asked)


_KNOWN = (
    *("messages", "prompt", "model", "stop", "bad_words", "n", "seed", "stream", "logprobs", "tools", "tool_choice"),
    *("parallel_tool_calls", "response_format", "chat_template_kwargs", "return_token_ids"),
)


def _chat_parts(
    given: dict[str, Any], tools: Any, template: str | None, name_image: NameImage | None
) -> dict[str, Any]:
    """The fields of a chat, whose parameters leave `given`. Raises: BadRequestError."""
    messages = given.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages must be a list of at least one message", "messages")
    form = _answer_form(given.pop("response_format", None))
    choice = given.pop("tool_choice", "auto")
    parallel = _flag("parallel_tool_calls", given, True)
    options = given.pop("chat_template_kwargs", {})
    if not isinstance(options, Mapping) or not {"messages", "tools", "tokenize"}.isdisjoint(options):
        raise BadRequestError(
            "chat_template_kwargs must be an object of what the template reads", "chat_template_kwargs"
        )
    named = {f"chat_template_kwargs.{name}": (name, value) for name, value in options.items()}
    named |= {name: (name, given.pop(name)) for name in _TEMPLATE_KEYS if name in given}
    for param, (name, value) in named.items():
        # A template takes whatever it is given, and says nothing of what it does not read.
        nothing_asked = (name, value) == ("reasoning_effort", "none") or (
            (name, value) == ("enable_thinking", False) and "think" not in (template or "")
        )
        if template is not None and name not in template and not nothing_asked:
            raise BadRequestError(f"{param}: the model's chat template does not read it", param)
    kwargs = dict(named.values())
    if tools:
        if not isinstance(tools, list) or not all(map(_is_function, tools)):
            raise BadRequestError('tools must be functions: [{"type": "function", "function": {"name": ...}}]', "tools")
        if template is not None and "tools" not in template:
            told = "give the model one that does (model.chat_template_path), or tell of the tools in a message"
            raise BadRequestError(f"tools: the model's chat template does not show them; {told}", "tools")
        kwargs["tools"] = tools
    if choice not in ("auto", "none"):
        if form is not None:
            raise BadRequestError("an answer is either of a response_format or calls of tools", "tool_choice")
        form = _call_form(choice, tools, parallel)
    return {
        "messages": [plain_message(message, name_image) for message in messages],
        "template_options": kwargs,
        "tools": tools if tools and choice != "none" else None,
        "form": form,
        "only_first_call": not parallel,
    }


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _number(name: str, value: Any, kind: type, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise BadRequestError(
            f"{name} must be a number{' without a fraction' * (kind is int)}, not {value!r:.60}", name
        )
    if not least <= value <= most:
        raise BadRequestError(f"{name}={value} must be at least {least:g} and at most {most:g}", name)
    return value


def _flag(name: str, given: dict[str, Any], default: bool = False) -> bool:
    value = given.pop(name, default)
    if not isinstance(value, bool):
        raise BadRequestError(f"{name} must be true or false, not {value!r:.60}", name)
    return value


def texts_of(name: str, value: Any) -> tuple[str, ...]:
    """One text or several as several; None is none. Raises: BadRequestError: something else."""
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise BadRequestError(f"{name} must be a text, or a list of texts, none of them empty", name)
    return tuple(texts)


def _answer_form(asked: Any) -> Form | None:
    """The form that a response_format asks for. Raises: BadRequestError."""
    kind = asked.get("type") if isinstance(asked, Mapping) else asked
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return Form("response_format", {"type": "object"})
    told = asked.get("json_schema") if kind == "json_schema" else None
    schema = told.get("schema") if isinstance(told, Mapping) else None
    if not isinstance(schema, Mapping):
        known = '{"type": "json_schema", "json_schema": {"schema": {...}}}, json_object, or text'
        raise BadRequestError(f"response_format {asked!r:.100} is not supported; it is {known}", "response_format")
    return Form("response_format", schema)


def _call_form(choice: Any, tools: Sequence[Any] | None, parallel: bool) -> Form:
    """The form of the calls that a tool_choice asks for. Raises: BadRequestError."""
    functions = {tool["function"]["name"]: tool["function"] for tool in tools or ()}
    name, chosen = None, choice
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        chosen = "required" if name in functions else choice
    if chosen != "required" or not functions:
        known = "auto, none, required, or a function of `tools`"
        raise BadRequestError(f"tool_choice {choice!r:.100} is not supported; it is {known}", "tool_choice")
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": own},
                "arguments": function.get("parameters") or {"type": "object", "properties": {}},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for own, function in functions.items()
        if name in (None, own)
    ]
    return Form("tool_choice", calls[0] if len(calls) == 1 else {"anyOf": calls}, None if parallel and not name else 1)


def plain_message(message: Any, name_image: NameImage | None = str) -> dict[str, Any]:
    """A message as chat templates take it: its content is text, or parts where there are images, each by its name; and
    the arguments of its tool calls are objects, since templates write them as JSON themselves.

    Raises: BadRequestError: it holds something else.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRequestError(f"a message must be an object with a role, not {message!r:.60}", "messages")
    # Templates read the content of every message, also of one that only calls tools.
    plain = {"content": "", **{key: value for key, value in message.items() if value is not None}}
    if isinstance(plain["content"], list):
        parts = [_plain_part(part, name_image) for part in plain["content"]]
        has_image = any(part["type"] != "text" for part in parts)
        plain["content"] = parts if has_image else "".join(part["text"] for part in parts)
    elif not isinstance(plain["content"], str):
        raise BadRequestError(f"the content of a message must be text, not {plain['content']!r:.60}", "messages")
    if plain["role"] == "developer":  # newer for system; chat templates do not know it
        plain["role"] = "system"
    if "tool_calls" in plain:
        try:
            plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
        except (KeyError, TypeError):
            raise BadRequestError(f"tool_calls {plain['tool_calls']!r:.100} cannot be read", "messages") from None
    return plain


def _plain_part(part: Any, name_image: NameImage | None) -> dict[str, str]:
    part = part if isinstance(part, Mapping) else {"part": part}
    if isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if "video" in str(part.get("type")):
        if name_image is not str or not isinstance(part.get("video"), str):  # those of tasks are named already
            raise BadRequestError("a message holds a video; requests take images alone: send frames of it", "messages")
        return {"type": "video", "video": part["video"]}
    told = part.get("image") if part.get("type") == "image" else part.get("image_url")
    told = told.get("url") if isinstance(told, Mapping) else told
    if not isinstance(told, str):
        raise BadRequestError(f"a message holds {part!r:.100}, which is no text and no image", "messages")
    if name_image is None:
        raise BadRequestError(f"a message holds {part!r:.100}, and this model reads text only", "messages")
    return {"type": "image", "image": name_image(told)}


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError):  # what is no JSON is shown as it is
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return {"type": "function", "function": function}


class Told(NamedTuple):
    """An answer of the model to a request."""

    response: Response
    parsed: ParsedAnswer
    turn: int
    """Of the rollout, from 0."""


def chat_completion(
    asked: OpenAIRequest, told: Sequence[Told], tokenizer: Tokenizer | None, usage: CompletionUsage | None
) -> OpenAIAnswer:
    """A ChatCompletion. tokenizer: of the tokens, where their logprobs are asked for."""
    from openai.types.chat import ChatCompletion, ChatCompletionMessage
    from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
    from openai.types.chat.chat_completion_message_function_tool_call import (
        ChatCompletionMessageFunctionToolCall,
        Function,
    )
    from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob

    choices = []
    for index, (response, parsed, turn) in enumerate(told):
        calls = [
            # Of the turn and not of chance: some templates show the numbers of calls to the policy.
            ChatCompletionMessageFunctionToolCall(
                id=f"call_{turn}_{number}",
                type="function",
                function=Function(
                    name=call.name,
                    arguments=call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments),
                ),
            )
            for number, call in enumerate(parsed.calls[: 1 if asked.only_first_call else None])
        ]
        more: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if parsed.reasoning is not None:
            # Two names are in use; clients read the one that they know.
            more |= {"reasoning": parsed.reasoning, "reasoning_content": parsed.reasoning}
        finish: Any = "length" if response.finish_reason == "length" else "tool_calls" if calls else "stop"
        logprobs = None
        if asked.logprobs and tokenizer is not None:
            texts = [tokenizer.decode([token], skip_special_tokens=False) for token in response.tokens]
            logprobs = ChoiceLogprobs(
                content=[
                    ChatCompletionTokenLogprob(token=text, bytes=list(text.encode()), logprob=logprob, top_logprobs=[])
                    for text, logprob in zip(texts, response.logprobs, strict=True)
                ],
                refusal=None,
            )
        message = ChatCompletionMessage(role="assistant", content=parsed.content, refusal=None, **more)
        own: dict[str, Any] = {"token_ids": list(response.tokens)} if asked.token_ids else {}
        stop = asked.options.get("stop")
        if stop and finish == "stop" and tokenizer is not None:
            # The text ends before what it stopped at, which its tokens still hold; the name is vLLM's.
            rest = tokenizer.decode(list(response.tokens), skip_special_tokens=True)[len(response.text) :]
            own["stop_reason"] = next((each for each in stop if rest.startswith(each)), None)
        choices.append(Choice(index=index, message=message, finish_reason=finish, logprobs=logprobs, **own))
    own = {"prompt_token_ids": list(told[0].response.prompt_tokens)} if asked.token_ids else {}
    completion: ChatCompletion = ChatCompletion(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        object="chat.completion",
        created=int(time.time()),
        model=asked.model,
        choices=choices,
        usage=usage,
        **own,  # more fields than openai's, which its types take
    )
    body = completion.model_dump(mode="json", exclude_unset=True)
    return OpenAIAnswer(200, body, tuple(each.response for each in told))


def text_completion(
    asked: OpenAIRequest, told: Sequence[Told], tokenizer: Tokenizer | None, usage: CompletionUsage | None
) -> OpenAIAnswer:
    """A Completion; otherwise as `chat_completion`."""
    from openai.types import Completion, CompletionChoice
    from openai.types.completion_choice import Logprobs

    choices = []
    for index, (response, parsed, _) in enumerate(told):
        logprobs = None
        if asked.logprobs and tokenizer is not None:
            texts = [tokenizer.decode([token], skip_special_tokens=False) for token in response.tokens]
            offsets = [0, *accumulate(map(len, texts[:-1]))] if texts else []
            logprobs = Logprobs(text_offset=offsets, token_logprobs=list(response.logprobs), tokens=texts)
        finish: Any = "length" if response.finish_reason == "length" else "stop"
        own: dict[str, Any] = {}
        if asked.token_ids:
            own = {"token_ids": list(response.tokens), "prompt_token_ids": list(response.prompt_tokens)}
        text = parsed.content or ""
        choices.append(CompletionChoice(index=index, text=text, finish_reason=finish, logprobs=logprobs, **own))
    completion = Completion(
        id=f"cmpl-{uuid.uuid4().hex}",
        object="text_completion",
        created=int(time.time()),
        model=asked.model,
        choices=choices,
        usage=usage,
    )
    body = completion.model_dump(mode="json", exclude_unset=True)
    return OpenAIAnswer(200, body, tuple(each.response for each in told))


def token_usage(num_prompt: int, num_response: int) -> CompletionUsage:
    """Tokens of a request, its prompts counted once."""
    from openai.types import CompletionUsage

    return CompletionUsage(
        prompt_tokens=num_prompt, completion_tokens=num_response, total_tokens=num_prompt + num_response
    )


class TextDelta(dict[str, Any]):
    """An event of a stream that tells a piece of a text; the others are what stands around the texts."""


def pieces(text: str) -> list[str]:
    """A text in the pieces of a stream."""
    return re.findall(rf"(?s).{{1,{_PIECE_LENGTH}}}", text)


def chunks_of(
    body: Mapping[str, Any], with_usage: bool, split: Callable[[str], Sequence[str]] = pieces
) -> Iterator[dict[str, Any]]:
    """The chunks of a stream that tells a whole completion: each choice's text in pieces, calls of tools whole, then
    why it ended; and, if asked for, the usage.
    """
    is_chat = body["object"] == "chat.completion"
    common = {**body, "object": "chat.completion.chunk" if is_chat else "text_completion"}
    common = {key: value for key, value in common.items() if key not in ("choices", "usage")}

    def chunk(index: int, part: Mapping[str, Any], **last: Any) -> dict[str, Any]:
        shown = {"delta": part} if is_chat else part
        choice = {"index": index, **shown, "logprobs": None, "finish_reason": None, **last}
        return {**common, "choices": [choice]}

    for choice in body["choices"]:
        index = choice["index"]
        last = {key: value for key, value in choice.items() if key not in ("index", "message", "text")}
        if not is_chat:
            yield from (TextDelta(chunk(index, {"text": piece})) for piece in split(choice["text"]))
            yield chunk(index, {"text": ""}, **last)
            continue
        message = choice["message"]
        yield chunk(index, {"role": "assistant", "content": ""})
        for name, make in _STREAMED.items():
            yield from (TextDelta(chunk(index, make(piece))) for piece in split(message.get(name) or ""))
        for number, call in enumerate(message.get("tool_calls", ())):
            yield chunk(index, {"tool_calls": [{"index": number, **call}]})
        yield chunk(index, {}, **last)
    if with_usage:
        yield {**common, "choices": [], "usage": body["usage"]}


_STREAMED: Mapping[str, Callable[[str], dict[str, str]]] = {
    "reasoning": lambda piece: {"reasoning": piece, "reasoning_content": piece},
    "content": lambda piece: {"content": piece},
}
