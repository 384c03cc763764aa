"""OpenAI's completion APIs over a model that takes and gives text: request bodies in, answer bodies out. No HTTP.

Invariant: every parameter of a request takes effect or is refused with an error in OpenAI's form that names it; none is
silently ignored.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from rftdask.config.plugins import did_you_mean
from rftdask.data.chats import with_parsed_arguments
from rftdask.data.tokenizer import Tokenizer
from rftdask.rollouts.policy.answer_parsers import ParsedAnswer, template_of
from rftdask.rollouts.workflows.base import Response
from rftdask.storage.safe_text import encodable

CHAT = "chat/completions"
COMPLETIONS = "completions"
MAX_CHOICES = 128
"""Largest number of answers to one request, as at OpenAI."""
_PIECE_LENGTH = 32
"""Characters per chunk of a stream."""
NUMBERS: Mapping[str, tuple[str, type, float, float]] = {
    "temperature": ("temperature", float, 0, 100),
    "top_p": ("top_p", float, 1e-9, 1),
    "top_k": ("top_k", int, -1, 2**31),
    "max_tokens": ("max_tokens", int, 1, 2**31),
    "max_completion_tokens": ("max_tokens", int, 1, 2**31),
    "min_tokens": ("min_tokens", int, 0, 2**31),
    "repetition_penalty": ("repetition_penalty", float, 1e-3, 100),
    "thinking_token_budget": ("thinking_token_budget", int, 0, 2**31),
}
"""Parameter -> (field of SamplingParams, type, minimum, maximum)."""
_WITHOUT_EFFECT = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "session_id", "stream_options"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    }
)
"""Accepted parameters that do not affect the answer."""
_NEUTRAL_VALUES: Mapping[str, Sequence[Any]] = {
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
"""Parameters accepted only with these values, which request nothing."""
_TEMPLATE_KEYS = ("enable_thinking", "reasoning_effort")
"""Parameters passed to the chat template."""
NOT_GUIDED = "the engine cannot guide sampling; request it in a message, and check the answer"


class BadRequestError(ValueError):
    """A request cannot be answered; `param` is the offending parameter."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class OpenAIAnswer:
    status: int
    """HTTP status."""
    body: Mapping[str, Any]
    """A completion, or {"error": {"message", "type", "param", "code"}}."""
    responses: tuple[Response, ...] = ()
    """Sampled responses, one per choice."""
    headers: Mapping[str, str] = field(default_factory=dict)


def refusal(
    message: str,
    param: str | None = None,
    code: str | None = None,
    status: int = 400,
    headers: Mapping[str, str] | None = None,
) -> OpenAIAnswer:
    """Return an error in OpenAI's and Anthropic's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    # Anthropic's clients read the outer "type"; both read "error".
    body = {"type": "error", "error": {"message": message, "type": kind, "param": param, "code": code}}
    return OpenAIAnswer(status, body, headers=headers or {})


WRONG_KEY = refusal("wrong key", code="invalid_api_key", status=401)
_MODEL = {"id": "policy", "object": "model", "created": 0, "owned_by": "rftdask"}
MODELS = OpenAIAnswer(200, {"object": "list", "data": [_MODEL]})
"""Answer to GET /v1/models."""


def model_of(name: str) -> OpenAIAnswer:
    if name == _MODEL["id"]:
        return OpenAIAnswer(200, _MODEL)
    return refusal(f"model {name!r:.100} does not exist; use {_MODEL['id']}", "model", "model_not_found", status=404)


@dataclass(frozen=True)
class Form:
    """Required form of an answer after any thoughts: JSON that follows a schema, or tool calls."""

    param: Literal["response_format", "tool_choice"]
    schema: Mapping[str, Any]
    """JSON schema of the answer or of one call: {"name": ..., "arguments": ...}."""
    max_calls: int | None = None
    """Largest number of tool calls; None: unlimited."""


@dataclass(frozen=True)
class OpenAIRequest:
    path: Literal["chat/completions", "completions"]
    model: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages of a chat, as chat templates take them."""
    prompts: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of SamplingParams."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, including `tools`."""
    tools: list[Any] | None = None
    """Tools whose calls are parsed into `tool_calls`; None: calls stay text."""
    form: Form | None = None
    only_first_call: bool = False
    n: int = 1
    """Answers per prompt."""
    seed: int | None = None
    logprobs: bool = False
    token_ids: bool = False


NameImage = Callable[[str], str]
"""Returns the stored name of an image, from its data URL or name. Raises: BadRequestError."""


def read_request(
    path: str, body: Any, tokenizer: Tokenizer | None, name_image: NameImage | None = None
) -> OpenAIRequest:
    """Check a request body. tokenizer: None: the chat template is unknown, as of a model behind an API; name_image:
    None: the model reads only text. Raises: BadRequestError.
    """
    parameters = read_parameters(body)
    is_chat = path == CHAT
    options: dict[str, Any] = {}
    for name, (key, kind, minimum, maximum) in NUMBERS.items():
        if name in parameters:
            options[key] = _number(name, parameters.pop(name), kind, minimum, maximum)
    for name in ("stop", "bad_words"):
        if texts := texts_of(name, parameters.pop(name, None)):
            options[name] = texts
    n = int(_number("n", parameters.pop("n", 1), int, 1, MAX_CHOICES))
    seed = parameters.pop("seed", None)
    if seed is not None:
        _number("seed", seed, int, -(2**63), 2**64)
    model, tools = parameters.pop("model", "policy"), parameters.pop("tools", None)
    if not isinstance(model, str):
        raise BadRequestError("model must be text", "model")
    parts: dict[str, Any] = {"path": path, "model": model, "options": options, "n": n, "seed": seed}
    parts["token_ids"] = _flag("return_token_ids", parameters)
    _flag("stream", parameters)
    if not isinstance(parameters.get("stream_options", {}), Mapping):
        raise BadRequestError("stream_options must be an object", "stream_options")
    logprobs = parameters.pop("logprobs", False)
    if not isinstance(logprobs, bool) and (is_chat or logprobs != 0):
        valid = "true or false" if is_chat else "0, because only the logprob of the sampled token is known"
        raise BadRequestError(f"logprobs must be {valid}", "logprobs")
    parts["logprobs"] = logprobs is not False  # in text completions, 0 requests the sampled token's logprob
    if is_chat:
        parts |= _chat_parts(parameters, tools, template_of(tokenizer), name_image)
    else:
        prompt = parameters.pop("prompt", None)
        prompts = [prompt] if isinstance(prompt, str) else prompt
        if not isinstance(prompts, list) or not prompts or not all(isinstance(text, str) for text in prompts):
            raise BadRequestError("prompt must be text or a list of texts; token ids are not accepted", "prompt")
        parts["prompts"] = tuple(prompts)
        if n * len(prompts) > MAX_CHOICES:
            raise BadRequestError(f"n times the number of prompts exceeds {MAX_CHOICES}", "n")
    for name, value in parameters.items():
        if name in _WITHOUT_EFFECT or value in _NEUTRAL_VALUES.get(name, ()):
            continue
        known = (*NUMBERS, *_WITHOUT_EFFECT, *_NEUTRAL_VALUES, *_TEMPLATE_KEYS, *_KNOWN)
        advice = "; leave it out" if name in _NEUTRAL_VALUES else did_you_mean(name, known)
        raise BadRequestError(f"{name}={value!r:.100} is not supported{advice}", name)
    return OpenAIRequest(**parts)


def read_parameters(body: Any, without_effect: Collection[str] = ()) -> dict[str, Any]:
    """Return the parameters of a JSON body that are not null and may affect the answer. Raises: BadRequestError."""
    if not isinstance(body, Mapping):
        raise BadRequestError("the body must be a JSON object")
    return {name: value for name, value in body.items() if value is not None and name not in without_effect}


_KNOWN = (
    *("messages", "prompt", "model", "stop", "bad_words", "n", "seed", "stream", "logprobs", "tools", "tool_choice"),
    *("parallel_tool_calls", "response_format", "chat_template_kwargs", "return_token_ids"),
)


def _chat_parts(
    parameters: dict[str, Any], tools: Any, template: str | None, name_image: NameImage | None
) -> dict[str, Any]:
    # The fields of a chat request; their entries are removed from `parameters`.
    messages = parameters.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages must be a list of at least one message", "messages")
    form = _answer_form(parameters.pop("response_format", None))
    choice = parameters.pop("tool_choice", "auto")
    parallel = _flag("parallel_tool_calls", parameters, True)
    options = parameters.pop("chat_template_kwargs", {})
    if not isinstance(options, Mapping) or not {"messages", "tools", "tokenize"}.isdisjoint(options):
        raise BadRequestError("chat_template_kwargs must be an object of template variables", "chat_template_kwargs")
    named = {f"chat_template_kwargs.{name}": (name, value) for name, value in options.items()}
    named |= {name: (name, parameters.pop(name)) for name in _TEMPLATE_KEYS if name in parameters}
    for param, (name, value) in named.items():
        # Templates silently ignore variables that they do not read.
        is_neutral = (name, value) == ("reasoning_effort", "none") or (
            (name, value) == ("enable_thinking", False) and "think" not in (template or "")
        )
        if template is not None and name not in template and not is_neutral:
            raise BadRequestError(f"{param}: the model's chat template does not read it", param)
    kwargs = dict(named.values())
    if tools not in (None, []):
        if not isinstance(tools, list) or not all(map(_is_function, tools)):
            raise BadRequestError('tools must be functions: [{"type": "function", "function": {"name": ...}}]', "tools")
        if template is not None and "tools" not in template:
            advice = "set one that does (model.chat_template_path), or describe the tools in a message"
            raise BadRequestError(f"tools: the model's chat template does not show them; {advice}", "tools")
        kwargs["tools"] = tools
    if choice not in ("auto", "none"):
        if form is not None:
            raise BadRequestError("response_format and a required tool_choice exclude each other", "tool_choice")
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


def _number(name: str, value: Any, kind: type, minimum: float, maximum: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise BadRequestError(f"{name} must be {'an integer' if kind is int else 'a number'}, not {value!r:.60}", name)
    if not minimum <= value <= maximum:
        raise BadRequestError(f"{name}={value} must be at least {minimum:g} and at most {maximum:g}", name)
    return value


def _flag(name: str, parameters: dict[str, Any], default: bool = False) -> bool:
    value = parameters.pop(name, default)
    if not isinstance(value, bool):
        raise BadRequestError(f"{name} must be true or false, not {value!r:.60}", name)
    return value


def texts_of(name: str, value: Any) -> tuple[str, ...]:
    """Texts of a parameter that is one text, a list of texts, or None. Raises: BadRequestError."""
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise BadRequestError(f"{name} must be a non-empty text or a list of them", name)
    if lone := next((text for text in texts if encodable(text) != text), None):
        raise BadRequestError(f"{name} contains {lone!r:.60}, which is not text in UTF-8", name)
    return tuple(texts)


def _answer_form(value: Any) -> Form | None:
    kind = value.get("type") if isinstance(value, Mapping) else value
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return Form("response_format", {"type": "object"})
    wrapper = value.get("json_schema") if kind == "json_schema" else None
    schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
    if not isinstance(schema, Mapping):
        valid = '{"type": "json_schema", "json_schema": {"schema": {...}}}, json_object, or text'
        raise BadRequestError(f"response_format {value!r:.100} is not supported; use {valid}", "response_format")
    return Form("response_format", schema)


def _call_form(choice: Any, tools: Sequence[Any] | None, parallel: bool) -> Form:
    functions = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools or ()}
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not functions or (choice != "required" and name not in functions):
        valid = "auto, none, required, or a function of `tools`"
        raise BadRequestError(f"tool_choice {choice!r:.100} is not supported; use {valid}", "tool_choice")
    calls = []
    for function_name, parameters in functions.items():
        if name in (None, function_name):
            arguments = parameters or {"type": "object", "properties": {}}
            parts = {"name": {"const": function_name}, "arguments": arguments}
            calls.append({"type": "object", "properties": parts, "required": [*parts], "additionalProperties": False})
    return Form("tool_choice", calls[0] if len(calls) == 1 else {"anyOf": calls}, None if parallel and not name else 1)


def plain_message(message: Any, name_image: NameImage | None = str) -> dict[str, Any]:
    """A message as chat templates take it: content is text, or parts if it has images, which are referenced by name;
    arguments of tool calls are objects. Raises: BadRequestError: it holds something else.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRequestError(f"a message must be an object with a role, not {message!r:.60}", "messages")
    # Templates read the content of every message, even if it has only tool calls.
    plain = {"content": "", **{key: value for key, value in message.items() if value is not None}}
    if isinstance(plain["content"], list):
        parts = [_plain_part(part, name_image) for part in plain["content"]]
        has_image = any(part["type"] != "text" for part in parts)
        plain["content"] = parts if has_image else "".join(part["text"] for part in parts)
    elif not isinstance(plain["content"], str):
        raise BadRequestError(f"the content of a message must be text, not {plain['content']!r:.60}", "messages")
    if plain["role"] == "developer":  # the newer name of system, which chat templates do not know
        plain["role"] = "system"
    if "tool_calls" in plain:
        try:
            functions = [with_parsed_arguments(call["function"]) for call in plain["tool_calls"]]
            plain["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        except (KeyError, TypeError):
            raise BadRequestError(f"tool_calls {plain['tool_calls']!r:.100} cannot be read", "messages") from None
    return plain


def _plain_part(part: Any, name_image: NameImage | None) -> dict[str, str]:
    part = part if isinstance(part, Mapping) else {"part": part}
    if isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if "video" in str(part.get("type")):
        if name_image is not str or not isinstance(part.get("video"), str):  # videos of tasks have names already
            raise BadRequestError("videos in messages are not supported; send frames as images", "messages")
        return {"type": "video", "video": part["video"]}
    image = part.get("image") if part.get("type") == "image" else part.get("image_url")
    image = image.get("url") if isinstance(image, Mapping) else image
    if not isinstance(image, str):
        raise BadRequestError(f"parts of messages must be text or images, got {part!r:.100}", "messages")
    if name_image is None:
        raise BadRequestError(f"messages must be text for this model, got {part!r:.100}", "messages")
    return {"type": "image", "image": name_image(image)}


class SampledAnswer(NamedTuple):
    response: Response
    parsed: ParsedAnswer
    turn: int
    """Turn in the rollout, from 0."""


def completion(
    request: OpenAIRequest, answers: Sequence[SampledAnswer], tokenizer: Tokenizer | None, num_prompt_tokens: int
) -> OpenAIAnswer:
    """Return a ChatCompletion or Completion, by the path of the request.

    Args: tokenizer: None: logprobs are left out; num_prompt_tokens: tokens of all prompts, each counted once.
    """
    is_chat = request.path == CHAT
    choices: list[dict[str, Any]] = []
    for index, answer in enumerate(answers):
        finish_reason = "length" if answer.response.finish_reason == "length" else "stop"
        details = (_chat_choice if is_chat else _text_choice)(request, answer, tokenizer)
        choices.append({"index": index, "finish_reason": finish_reason, "logprobs": None, **details})
    num_sampled = sum(len(answer.response.tokens) for answer in answers)
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt_tokens + num_sampled,
        },
    }
    if is_chat and request.token_ids:
        body["prompt_token_ids"] = list(answers[0].response.prompt_tokens)
    return OpenAIAnswer(200, body, tuple(answer.response for answer in answers))


def _chat_choice(request: OpenAIRequest, answer: SampledAnswer, tokenizer: Tokenizer | None) -> dict[str, Any]:
    response, parsed, turn = answer
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
    choice: dict[str, Any] = {"message": message}
    calls = parsed.calls[: 1 if request.only_first_call else None]
    for number, call in enumerate(calls):
        arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)
        function = {"name": call.name, "arguments": arguments}
        # The id is deterministic, because some templates show it to the policy.
        shown = {"id": f"call_{turn}_{number}", "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(shown)
    if parsed.reasoning is not None:
        # Clients read one of two names.
        message |= {"reasoning": parsed.reasoning, "reasoning_content": parsed.reasoning}
    if request.token_ids:
        choice["token_ids"] = list(response.tokens)
    if response.finish_reason != "length" and calls:
        choice["finish_reason"] = "tool_calls"
    elif response.finish_reason != "length" and (stop := request.options.get("stop")) and tokenizer is not None:
        # The text ends before the stop text, which the tokens still include. vLLM uses the same name.
        rest = tokenizer.decode(list(response.tokens), skip_special_tokens=True)[len(response.text) :]
        choice["stop_reason"] = next((text for text in stop if rest.startswith(text)), None)
    if request.logprobs and tokenizer is not None:
        content = [
            {"token": text, "bytes": list(text.encode()), "logprob": logprob, "top_logprobs": []}
            for text, logprob in zip(_token_texts(response, tokenizer), response.logprobs, strict=True)
        ]
        choice["logprobs"] = {"content": content, "refusal": None}
    return choice


def _text_choice(request: OpenAIRequest, answer: SampledAnswer, tokenizer: Tokenizer | None) -> dict[str, Any]:
    response = answer.response
    choice: dict[str, Any] = {"text": answer.parsed.content or ""}
    if request.token_ids:
        choice |= {"token_ids": list(response.tokens), "prompt_token_ids": list(response.prompt_tokens)}
    if request.logprobs and tokenizer is not None:
        texts = _token_texts(response, tokenizer)
        offsets = [0, *accumulate(map(len, texts[:-1]))] if texts else []
        choice["logprobs"] = {"text_offset": offsets, "token_logprobs": list(response.logprobs), "tokens": texts}
    return choice


def _token_texts(response: Response, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode([token], skip_special_tokens=False) for token in response.tokens]


class TextDelta(dict[str, Any]):
    """Event of a stream that holds a piece of text; all other events are frames around the texts."""


def pieces(text: str) -> list[str]:
    return re.findall(rf"(?s).{{1,{_PIECE_LENGTH}}}", text)


def chunks_of(
    body: Mapping[str, Any], with_usage: bool, split: Callable[[str], Sequence[str]] = pieces
) -> Iterator[dict[str, Any]]:
    """Chunks of a stream for a complete body: per choice its text in pieces, whole tool calls and the finish reason."""
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
        # Clients read thoughts under one of two names.
        for names in (("reasoning", "reasoning_content"), ("content",)):
            for piece in split(message.get(names[0]) or ""):
                yield TextDelta(chunk(index, dict.fromkeys(names, piece)))
        for number, call in enumerate(message.get("tool_calls", ())):
            yield chunk(index, {"tool_calls": [{"index": number, **call}]})
        yield chunk(index, {}, **last)
    if with_usage:
        yield {**common, "choices": [], "usage": body["usage"]}
