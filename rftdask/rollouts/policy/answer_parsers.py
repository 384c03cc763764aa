"""Answer parser: splits a policy's answer into content, reasoning and tool calls, as OpenAI's API returns them.

This module parses JSON within <tool_call>, thoughts before </think>, and gpt-oss channels. Other formats use the
tokenizer's response template or vLLM's parsers, which need the package vllm but no accelerator.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from rftdask.data.tokenizer import Tokenizer
from rftdask.errors import UserError
from rftdask.storage.checked_json import parse_portable

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_CALLS_BY_MARK = {
    "<function=": "qwen3_coder",
    "<|python_tag|>": "llama3_json",
    "[TOOL_CALLS]": "mistral",
    "<arg_key>": "glm45",
    "\uff5ctool\u2581calls\u2581begin\uff5c": "deepseek_v3",
    "<|channel|>": "openai",
    "<tool_call>": "hermes",
}
"""Mark in a chat template -> parser of its tool calls; the first match applies."""
_THOUGHTS_BY_MARK = {"</think>": "think", "<|channel|>": "openai_gptoss", "[THINK]": "mistral"}
_OWN_THOUGHTS = ("think", "deepseek_r1", "deepseek_v3", "qwen3")
"""Names of one format: thoughts end with </think> and begin with <think>, in the answer or at the prompt's end."""
_OWN_CALLS = ("hermes", "none")
_CHANNELS = ("openai", "openai_gptoss")
"""Names of gpt-oss's format for tool calls and for thoughts, which are parsed together."""
_MESSAGE = re.compile(
    r"(?:to=(?P<to>\S+?)\s*)?<\|channel\|>(?P<channel>\w+)(?:\s+to=(?P<later>[^\s<]+))?[^<]*(?:<\|constrain\|>[^<]*)?"
    r"<\|message\|>(?P<text>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
"""A message in gpt-oss's format; a call names its tool before or after the channel."""
_TEMPLATE = "template"


class ToolCall(NamedTuple):
    name: str
    arguments: Any


class ParsedAnswer(NamedTuple):
    content: str | None
    """None: only calls or thoughts."""
    reasoning: str | None
    calls: tuple[ToolCall, ...]


Tools: TypeAlias = Sequence[Mapping[str, Any]]
_ParseCalls: TypeAlias = Callable[[str, Tools], tuple[str | None, tuple[ToolCall, ...]]]
_ParseThoughts: TypeAlias = Callable[[str, str], tuple[str | None, str | None]]
"""(text, prompt) -> (thoughts, content)."""


class AnswerParser:
    """Parser of one model's answers.

    Args:
        calls, reasoning: parser names: of this module or vLLM, "template" (the tokenizer's response template) or
            "none". None: recognized from the chat template; by default calls are JSON within <tool_call>.
    Raises: UserError: a named parser needs vLLM, which is not installed or lacks it.
    """

    def __init__(self, tokenizer: Tokenizer, calls: str | None = None, reasoning: str | None = None) -> None:
        has_template = getattr(tokenizer, "response_template", None) is not None
        self.chat_template = template_of(tokenizer)
        self._tokenizer = tokenizer
        self._by_template = has_template and calls in (None, _TEMPLATE) and reasoning in (None, _TEMPLATE)
        if not has_template and _TEMPLATE in (calls, reasoning):
            raise UserError("parser 'template': the model's tokenizer has no response_template; name another parser")
        self._calls_name = calls or _shown(_CALLS_BY_MARK, self.chat_template) or "hermes"
        self._thoughts_name = reasoning or _shown(_THOUGHTS_BY_MARK, self.chat_template) or "none"
        # Configured parsers are created now, so that a mistake is reported before any rollout.
        self._calls = self._calls_parser() if calls not in (None, _TEMPLATE, *_CHANNELS) else None
        self._thoughts = self._thoughts_parser() if reasoning not in (None, _TEMPLATE, *_CHANNELS) else None

    def parse(self, text: str, tokens: Sequence[int], prompt: str, tools: Tools | None) -> ParsedAnswer:
        """Split an answer to the rendered `prompt` into its parts.

        Args: text: of the tokens without special tokens, cut at a stop text; tools: None: calls stay text.
        Raises: UserError: the format needs a parser of vLLM, which is not installed.
        """
        if self._by_template:
            parsed = cast(Any, self._tokenizer).parse_response(list(tokens), prefix=prompt, tools=list(tools or ()))
            functions = [call["function"] for call in parsed.get("tool_calls") or ()]
            calls = tuple(ToolCall(function["name"], function.get("arguments", {})) for function in functions)
            if not calls or tools is not None:
                thoughts = parsed.get("reasoning_content") or parsed.get("reasoning") or parsed.get("thinking")
                return ParsedAnswer(parsed.get("content"), thoughts, calls)
        marked = self._marked(text, tokens)
        if self._calls_name in _CHANNELS or self._thoughts_name in _CHANNELS:
            return _by_channels(marked, text, None if self._calls_name == "none" else tools)
        self._thoughts = self._thoughts or self._thoughts_parser()
        thoughts, content = self._thoughts(marked, prompt)
        tool_calls: tuple[ToolCall, ...] = ()
        if tools is not None and content is not None:
            self._calls = self._calls or self._calls_parser()
            content, tool_calls = self._calls(content, tools)
        # An answer with only content is returned without special tokens.
        is_plain = thoughts is None and content is not None and not tool_calls
        return ParsedAnswer(text if is_plain else content, thoughts, tool_calls)

    def _marked(self, text: str, tokens: Sequence[int]) -> str:
        # The answer with special tokens except the last, for formats whose marks may be special tokens. `text` for
        # this module's formats, and if a stop text cut the answer.
        if self._calls_name in _OWN_CALLS and self._thoughts_name in ("none", *_OWN_THOUGHTS):
            return text
        tokens, end = list(tokens), getattr(self._tokenizer, "eos_token_id", None)
        if self._tokenizer.decode(tokens, skip_special_tokens=True) != text:
            return text
        kept = tokens[:-1] if tokens and tokens[-1] == end else tokens
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def certain(self, text: str, prompt: str, tools: Tools | None) -> tuple[str, str]:
        """The parts of (reasoning, content) that no continuation of `text` can change; with other parsers none."""
        if self._by_template or self._thoughts_name not in ("none", *_OWN_THOUGHTS):
            return "", ""
        thoughts, content = _certain_thoughts(text, prompt) if self._thoughts_name != "none" else ("", text)
        if tools is None or self._calls_name == "none":
            return thoughts, content
        text = before_any(content, ("<tool_call>",))
        # Surrounding spaces are dropped if the answer has calls, and kept otherwise.
        return thoughts, "" if self._calls_name != "hermes" or text[:1].isspace() else text.rstrip()

    def grammar(self, schema: Mapping[str, Any], prompt: str, *, are_calls: bool, max_calls: int | None = None) -> str:
        """Grammar in llguidance's Lark form: optional thoughts, then JSON that follows `schema`, or tool calls that do.

        Raises: UserError: no grammar exists for the model's format of calls or thoughts.
        """
        if self._by_template or self._thoughts_name not in ("none", *_OWN_THOUGHTS):
            advice = "set explorer.rollout_model.reasoning_parser"
            raise UserError(f"answers can be guided only if thoughts are in <think>; {advice}")
        if are_calls and self._calls_name != "hermes":
            text = f"calls can be guided only as JSON within <tool_call>, not as {self._calls_name!r}"
            raise UserError(f"{text}; set explorer.rollout_model.tool_call_parser")
        # No free choice of spaces: a barely trained policy would write them forever.
        spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        answer = f"%json {json.dumps({**schema, 'x-guidance': spaces})}"
        rules = {"start": "answer", "answer": answer}
        if are_calls:
            further = "" if max_calls == 1 else ' ("\\n" call)*'
            call = '"<tool_call>" "\\n"? json "\\n"? "</tool_call>"'
            rules |= {"answer": f"call{further}", "call": call, "json": answer}
        if self._thoughts_name != "none":
            # Lazy: thoughts end at the first </think>.
            is_open = prompt.rstrip().endswith("<think>")
            rules["start"] = r'thoughts "\n"* answer' if is_open else r'("\n"* thoughts "\n"*)? answer'
            rules["thoughts[lazy]"] = rf"/{'' if is_open else '<think>'}(?s:.*)<\/think>/"
        return "\n".join(f"{name}: {rule}" for name, rule in rules.items())

    def _calls_parser(self) -> _ParseCalls:
        name = self._calls_name
        if name == "none":
            return lambda text, tools: (text, ())
        if name == "hermes":
            return _hermes_calls
        kind, request_type = _vllm_parser("tool_call_parser", name)

        def parse(text: str, tools: Tools) -> tuple[str | None, tuple[ToolCall, ...]]:
            request = request_type(messages=[], model="policy", tools=list(tools))
            parsed = kind(self._tokenizer, request.tools).extract_tool_calls(text, request)
            functions = [call.function for call in parsed.tool_calls]
            return parsed.content, tuple(ToolCall(call.name, _loaded(call.arguments)) for call in functions)

        return parse

    def _thoughts_parser(self) -> _ParseThoughts:
        name = self._thoughts_name
        if name == "none":
            return lambda text, prompt: (None, text)
        if name in _OWN_THOUGHTS:
            return _before_think_ends
        kind, request_type = _vllm_parser("reasoning_parser", name)
        parser = kind(self._tokenizer)

        def parse(text: str, prompt: str) -> tuple[str | None, str | None]:
            request = request_type(messages=[], model="policy")
            parts: tuple[str | None, str | None] = parser.extract_reasoning(text, request)
            return parts

        return parse


def before_any(text: str, marks: Sequence[str]) -> str:
    """Return the text before the first mark, or before a beginning of a mark at its end."""
    if positions := [text.index(mark) for mark in marks if mark in text]:
        return text[: min(positions)]
    for length in range(min(len(text), max(map(len, marks), default=1) - 1), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return text[:-length]
    return text


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Tool calls written <tool_call>{"name": ..., "arguments": {...}}</tool_call>. Invalid JSON is skipped."""
    calls: list[ToolCall] = []
    for match in _TOOL_CALL.finditer(text):
        with contextlib.suppress(ValueError):
            call = parse_portable(match[1])
            if isinstance(call.get("name"), str):  # an object, because the pattern begins with a brace
                calls.append(ToolCall(call["name"], call.get("arguments", {})))
    return calls


def template_of(tokenizer: Tokenizer | None) -> str | None:
    """Return the source of the chat template; None: the tokenizer has none."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):  # several by name, such as one for chats with tools
        template = "\n".join(map(str, template.values()))
    return template if isinstance(template, str) else None


def _hermes_calls(text: str, tools: Tools) -> tuple[str | None, tuple[ToolCall, ...]]:
    calls = tuple(parse_tool_calls(text))
    return (_TOOL_CALL.sub("", text).strip() or None, calls) if calls else (text, ())


def _by_channels(marked: str, text: str, tools: Tools | None) -> ParsedAnswer:
    messages = list(_MESSAGE.finditer(marked))
    if not messages:
        return ParsedAnswer(text, None, ())
    thoughts, content, calls = list[str](), list[str](), list[ToolCall]()
    for message in messages:
        name = (message["to"] or message["later"] or "").removeprefix("functions.")
        if name and tools is not None:
            calls.append(ToolCall(name, _loaded(message["text"].strip())))
        else:
            (thoughts if message["channel"] == "analysis" else content).append(message["text"])
    return ParsedAnswer("\n".join(content) or None, "\n".join(thoughts) or None, tuple(calls))


def _before_think_ends(text: str, prompt: str) -> tuple[str | None, str | None]:
    if prompt.rstrip().endswith("</think>"):  # thoughts have ended, or were switched off
        return None, text
    thoughts, end, rest = text.partition("</think>")
    opened = text.lstrip().startswith("<think>")
    if not end and not opened and not prompt.rstrip().endswith("<think>"):
        return None, text
    # An answer that was cut within its thoughts has no content.
    return thoughts.replace("<think>", "", opened).strip(), rest.lstrip("\n") if end else None


def _certain_thoughts(text: str, prompt: str) -> tuple[str, str]:
    if not prompt.rstrip().endswith("</think>"):
        begun = text.lstrip()
        is_open = prompt.rstrip().endswith("<think>") and not "<think>".startswith(begun)
        # Without an opening tag, a later </think> would turn everything before it into thoughts.
        if not is_open and not begun.startswith("<think>"):
            return "", ""
        text = text if "</think>" in text else before_any(text, ("</think>",))
    thoughts, content = _before_think_ends(text, prompt)
    return thoughts or "", content or ""


def _shown(marks: Mapping[str, str], template: str | None) -> str | None:
    return next((name for mark, name in marks.items() if mark in (template or "")), None)


def _vllm_parser(key: str, name: str) -> tuple[Any, Any]:
    """Return vLLM's parser class for a config key, and the class of its requests. Raises: UserError."""
    if importlib.util.find_spec("vllm") is None:
        names = "hermes, openai" if key == "tool_call_parser" else f"{', '.join(_OWN_THOUGHTS)}, openai_gptoss"
        raise UserError(
            f"explorer.rollout_model.{key}: answers of the model need vLLM's parser {name!r}, which is not installed; "
            f"pip install 'rftdask[vllm]', or use a parser of rftdask: {names}, none"
        )
    # Late: optional, and the import takes seconds.
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    is_call = key == "tool_call_parser"
    find = ToolParserManager.get_tool_parser if is_call else ReasoningParserManager.get_reasoning_parser
    try:
        return find(name), ChatCompletionRequest
    except (KeyError, ImportError) as error:
        raise UserError(f"explorer.rollout_model.{key}: the installed vLLM has no parser {name!r}: {error}") from error


def _loaded(arguments: str) -> Any:
    with contextlib.suppress(ValueError):
        return parse_portable(arguments or "{}")
    return arguments
