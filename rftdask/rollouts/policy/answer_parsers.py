"""Answer parser: what a policy wrote, as OpenAI's API tells it: content, reasoning and calls of tools apart.

Models write these in ways of their own, which their chat template shows. Here are the two most common ways, JSON within
<tool_call> and thoughts before </think>, and gpt-oss's channels; the others are the tokenizer's own response template,
or vLLM's parsers, which need the package vllm and nothing that computes. Text in, text out: what is trained are the
tokens, parsed or not.
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
"""What only templates of some models hold -> the parser of their calls; the first that is found."""
_THOUGHTS_BY_MARK = {"</think>": "think", "<|channel|>": "openai_gptoss", "[THINK]": "mistral"}
_OWN_THOUGHTS = ("think", "deepseek_r1", "deepseek_v3", "qwen3")
"""Names for one format: thoughts end with </think>, and begin the answer or the end of the prompt with <think>."""
_OWN_CALLS = ("hermes", "none")
_CHANNELS = ("openai", "openai_gptoss")
"""Names for gpt-oss's format, of its calls and of its thoughts, which are read together."""
_MESSAGE = re.compile(
    r"(?:to=(?P<to>\S+?)\s*)?<\|channel\|>(?P<channel>\w+)(?:\s+to=(?P<later>[^\s<]+))?[^<]*(?:<\|constrain\|>[^<]*)?"
    r"<\|message\|>(?P<text>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
"""A message of an answer in that format; a call names its tool before or after the channel."""
_TEMPLATE = "template"


class ToolCall(NamedTuple):
    """A call of a tool as a policy writes it."""

    name: str
    arguments: Any


class ParsedAnswer(NamedTuple):
    """An answer in its parts."""

    content: str | None
    """None: there is nothing beside calls or thoughts."""
    reasoning: str | None
    calls: tuple[ToolCall, ...]


Tools: TypeAlias = Sequence[Mapping[str, Any]]
_ParseCalls: TypeAlias = Callable[[str, Tools], tuple[str | None, tuple[ToolCall, ...]]]
_ParseThoughts: TypeAlias = Callable[[str, str], tuple[str | None, str | None]]
"""Text and prompt in; thoughts and the rest out."""


class AnswerParser:
    """The parser of one model's answers.

    Args:
        calls, reasoning: names of parsers, ours, vLLM's, "template" (the tokenizer's own response template) or "none";
            None: the one that the chat template shows; where it shows none, calls are JSON within <tool_call>.
    Raises: UserError: a parser that is named needs vLLM, which is not installed or does not have it.
    """

    def __init__(self, tokenizer: Tokenizer, calls: str | None = None, reasoning: str | None = None) -> None:
        own = getattr(tokenizer, "response_template", None) is not None
        self.chat_template = template_of(tokenizer)
        self._tokenizer = tokenizer
        self._by_template = own and calls in (None, _TEMPLATE) and reasoning in (None, _TEMPLATE)
        if not own and _TEMPLATE in (calls, reasoning):
            raise UserError("parser 'template': the model's tokenizer has no response_template; name another parser")
        self._calls_name = calls or _shown(_CALLS_BY_MARK, self.chat_template) or "hermes"
        self._thoughts_name = reasoning or _shown(_THOUGHTS_BY_MARK, self.chat_template) or "none"
        # What a configuration names is made at once, so that a mistake is told before any rollout.
        self._calls = self._calls_parser() if calls not in (None, _TEMPLATE, *_CHANNELS) else None
        self._thoughts = self._thoughts_parser() if reasoning not in (None, _TEMPLATE, *_CHANNELS) else None

    def parse(self, text: str, tokens: Sequence[int], prompt: str, tools: Tools | None) -> ParsedAnswer:
        """The parts of an answer.

        Args: text: the tokens' text, special ones left out, which is what answers to no stop; prompt: as rendered;
            tools: those that may be called; None: calls stay text.
        Raises: UserError: the model's format needs a parser of vLLM, which is not installed.
        """
        if self._by_template:
            parsed = cast(Any, self._tokenizer).parse_response(list(tokens), prefix=prompt, tools=list(tools or ()))
            calls = tuple(
                ToolCall(call["function"]["name"], call["function"].get("arguments", {}))
                for call in (parsed.get("tool_calls") or ())
            )
            if not calls or tools is not None:
                thoughts = parsed.get("reasoning_content") or parsed.get("reasoning") or parsed.get("thinking")
                return ParsedAnswer(parsed.get("content"), thoughts, calls)
        marked = self._marked(text, tokens)
        if self._calls_name in _CHANNELS or self._thoughts_name in _CHANNELS:
            return _by_channels(marked, text, None if self._calls_name == "none" else tools)
        self._thoughts = self._thoughts or self._thoughts_parser()
        thoughts, content = self._thoughts(marked, prompt)
        found: tuple[ToolCall, ...] = ()
        if tools is not None and content is not None:
            self._calls = self._calls or self._calls_parser()
            content, found = self._calls(content, tools)
        # Where there is nothing but content, as it was told: without special tokens.
        is_plain = thoughts is None and content is not None and not found
        return ParsedAnswer(text if is_plain else content, thoughts, found)

    def _marked(self, text: str, tokens: Sequence[int]) -> str:
        """The answer with its special tokens but for the end, where the format may have marks among them; `text` of our
        own formats, and where a stop has cut it."""
        if self._calls_name in _OWN_CALLS and self._thoughts_name in ("none", *_OWN_THOUGHTS):
            return text
        tokens, end = list(tokens), getattr(self._tokenizer, "eos_token_id", None)
        if self._tokenizer.decode(tokens, skip_special_tokens=True) != text:
            return text
        kept = tokens[:-1] if tokens and tokens[-1] == end else tokens
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def certain(self, text: str, prompt: str, tools: Tools | None) -> tuple[str, str]:
        """(reasoning, content) of an answer that begins with `text`, as far as nothing that follows can change them;
        arguments as of `parse`. Of formats that are not ours nothing is certain before the end.
        """
        if self._by_template or self._thoughts_name not in ("none", *_OWN_THOUGHTS):
            return "", ""
        thoughts, content = _certain_thoughts(text, prompt) if self._thoughts_name != "none" else ("", text)
        if tools is None or self._calls_name == "none":
            return thoughts, content
        said = before_any(content, ("<tool_call>",))
        # Beside calls the spaces around a text are left out; without one they are part of it.
        return thoughts, "" if self._calls_name != "hermes" or said[:1].isspace() else said.rstrip()

    def grammar(self, schema: Mapping[str, Any], prompt: str, *, are_calls: bool, max_calls: int | None = None) -> str:
        """The grammar, in llguidance's Lark, of answers to a rendered prompt that are JSON of `schema`, or calls that
        are; thoughts may come before.

        Raises: UserError: calls, or thoughts, of this model are not written in a way for which there is one.
        """
        if self._by_template or self._thoughts_name not in ("none", *_OWN_THOUGHTS):
            raise UserError(
                "an answer is guided where thoughts are in <think>: explorer.rollout_model.reasoning_parser"
            )
        if are_calls and self._calls_name != "hermes":
            raise UserError(
                f"calls are guided as JSON within <tool_call>, not as {self._calls_name!r}: "
                "explorer.rollout_model.tool_call_parser"
            )
        # Without spaces of its own choice: a policy that has learned little would write them for ever.
        spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        answer = f"%json {json.dumps({**schema, 'x-guidance': spaces})}"
        rules = {"start": "answer", "answer": answer}
        if are_calls:
            more = "" if max_calls == 1 else ' ("\\n" call)*'
            rules |= {
                "answer": f"call{more}",
                "call": '"<tool_call>" "\\n"? json "\\n"? "</tool_call>"',
                "json": answer,
            }
        if self._thoughts_name != "none":
            # Lazy: to the first end of thoughts, after which the answer begins.
            begun = prompt.rstrip().endswith("<think>")
            rules["start"] = r'thoughts "\n"* answer' if begun else r'("\n"* thoughts "\n"*)? answer'
            rules["thoughts[lazy]"] = rf"/{'' if begun else '<think>'}(?s:.*)<\/think>/"
        return "\n".join(f"{name}: {rule}" for name, rule in rules.items())

    def _calls_parser(self) -> _ParseCalls:
        name = self._calls_name
        if name == "none":
            return lambda text, tools: (text, ())
        if name == "hermes":
            return _hermes_calls
        _need_vllm("tool_call_parser", name)
        # Late: it takes seconds, and is installed where it is needed.
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        kind = _of_vllm("tool_call_parser", name, ToolParserManager.get_tool_parser)

        def parse(text: str, tools: Tools) -> tuple[str | None, tuple[ToolCall, ...]]:
            request = ChatCompletionRequest(messages=[], model="policy", tools=list(tools))
            found = kind(self._tokenizer, request.tools).extract_tool_calls(text, request)
            return found.content, tuple(
                ToolCall(each.function.name, _loaded(each.function.arguments)) for each in found.tool_calls
            )

        return parse

    def _thoughts_parser(self) -> _ParseThoughts:
        name = self._thoughts_name
        if name == "none":
            return lambda text, prompt: (None, text)
        if name in _OWN_THOUGHTS:
            return _before_think_ends
        _need_vllm("reasoning_parser", name)
        # Late: as above.
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.reasoning import ReasoningParserManager

        kind = _of_vllm("reasoning_parser", name, ReasoningParserManager.get_reasoning_parser)
        parser = kind(self._tokenizer)

        def parse(text: str, prompt: str) -> tuple[str | None, str | None]:
            found: tuple[str | None, str | None] = parser.extract_reasoning(
                text, ChatCompletionRequest(messages=[], model="policy")
            )
            return found

        return parse


def before_any(text: str, marks: Sequence[str]) -> str:
    """The text before the first of the marks, of which the last one may have begun only."""
    if found := [text.index(mark) for mark in marks if mark in text]:
        return text[: min(found)]
    for length in range(min(len(text), max(map(len, marks), default=1) - 1), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return text[:-length]
    return text


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


def template_of(tokenizer: Tokenizer | None) -> str | None:
    """The chat template's source; None: the tokenizer has no such text."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):  # by name: chats with tools may have one of their own
        template = "\n".join(map(str, template.values()))
    return template if isinstance(template, str) else None


def _hermes_calls(text: str, tools: Tools) -> tuple[str | None, tuple[ToolCall, ...]]:
    calls = tuple(parse_tool_calls(text))
    return (_TOOL_CALL.sub("", text).strip() or None, calls) if calls else (text, ())


def _by_channels(marked: str, text: str, tools: Tools | None) -> ParsedAnswer:
    messages = list(_MESSAGE.finditer(marked))
    if not messages:
        return ParsedAnswer(text, None, ())
    thoughts, said, calls = list[str](), list[str](), list[ToolCall]()
    for message in messages:
        name = (message["to"] or message["later"] or "").removeprefix("functions.")
        if name and tools is not None:
            calls.append(ToolCall(name, _loaded(message["text"].strip())))
        else:
            (thoughts if message["channel"] == "analysis" else said).append(message["text"])
    return ParsedAnswer("\n".join(said) or None, "\n".join(thoughts) or None, tuple(calls))


def _before_think_ends(text: str, prompt: str) -> tuple[str | None, str | None]:
    if prompt.rstrip().endswith("</think>"):  # they have ended, or were switched off
        return None, text
    thoughts, end, rest = text.partition("</think>")
    opened = text.lstrip().startswith("<think>")
    if not end and not opened and not prompt.rstrip().endswith("<think>"):
        return None, text
    # Cut off within its thoughts, an answer is nothing else.
    return thoughts.replace("<think>", "", opened).strip(), rest.lstrip("\n") if end else None


def _certain_thoughts(text: str, prompt: str) -> tuple[str, str]:
    if prompt.rstrip().endswith("</think>"):
        return "", text
    begun, is_open = text.lstrip(), prompt.rstrip().endswith("<think>")
    opened = begun.startswith("<think>")
    # Where nothing opened them a later end would make thoughts of all before it.
    if not opened and (not is_open or "<think>".startswith(begun)):
        return "", ""
    thoughts, end, rest = text.partition("</think>")
    thoughts = thoughts if end else before_any(text, ("</think>",))
    return thoughts.replace("<think>", "", opened).strip(), rest.lstrip("\n")


def _shown(marks: Mapping[str, str], template: str | None) -> str | None:
    return next((name for mark, name in marks.items() if mark in (template or "")), None)


def _need_vllm(key: str, name: str) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            f"explorer.rollout_model.{key}: the model's answers need vLLM's parser {name!r}, and it is not installed: "
            "pip install 'rftdask[vllm]', or name a parser that comes with rftdask: "
            + (
                "hermes, openai, none"
                if key == "tool_call_parser"
                else f"{', '.join(_OWN_THOUGHTS)}, openai_gptoss, none"
            )
        )


def _of_vllm(key: str, name: str, find: Callable[[str], Any]) -> Any:
    try:
        return find(name)
    except (KeyError, ImportError) as error:
        raise UserError(f"explorer.rollout_model.{key}: the installed vLLM has no parser {name!r}: {error}") from error


def _loaded(arguments: str) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(arguments or "{}")
    return arguments
