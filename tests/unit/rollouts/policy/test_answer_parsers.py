"""Promises of answer parsers: the chat template or a name selects the parser."""

import importlib.util
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from rftdask.config import load_config
from rftdask.errors import ConfigError, UserError
from rftdask.rollouts.policy.answer_parsers import AnswerParser, ParsedAnswer, ToolCall
from tests.unit.config.config_cases import grpo
from tests.unit.rollouts.rollout_cases import CharTokenizer

TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALL = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
ADD = ToolCall("add", {"x": 1})
without_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")


def parse(text: str, template: str | None = None, prompt: str = "", tools: Any = TOOLS, **names: str) -> ParsedAnswer:
    tokenizer = CharTokenizer()
    if template is not None:
        tokenizer.chat_template = template  # type: ignore[attr-defined]
    return AnswerParser(tokenizer, **names).parse(text, [*map(ord, text)], prompt, tools)


def test_calls_are_json_in_tags_by_default() -> None:
    assert parse(f"so {CALL}") == ParsedAnswer("so", None, (ADD,))
    assert parse(CALL) == ParsedAnswer(None, None, (ADD,))
    assert parse("<tool_call>{broken}</tool_call>") == ParsedAnswer("<tool_call>{broken}</tool_call>", None, ())
    assert parse(CALL, tools=None) == parse(CALL, calls="none") == ParsedAnswer(CALL, None, ())


@pytest.mark.parametrize(
    ("text", "prompt", "parsed"),
    [
        ("<think>\nhm\n</think>\n\n4", "", ("4", "hm")),
        ("hm</think>4", "<think>\n", ("4", "hm")),
        ("cut of", "<think>\n", (None, "cut of")),
        ("<think>cut of", "", (None, "cut of")),
        ("4", "<think>\n\n</think>\n\n", ("4", None)),
        ("4", "", ("4", None)),
        ("a</think>b</think>c", "<think>", ("b</think>c", "a")),
    ],
)
def test_template_decides_where_thoughts_end(text: str, prompt: str, parsed: tuple[str | None, str | None]) -> None:
    assert parse(text, "... </think> ...", prompt)[:2] == parsed
    assert parse(text, None, prompt, reasoning="qwen3")[:2] == parsed
    assert parse(text, "... </think> ...", prompt, reasoning="none")[:2] == (text, None)


def test_calls_within_thoughts_are_ignored() -> None:
    assert parse(f"<think>{CALL}</think>4", "</think>").calls == ()
    assert parse(f"<think>hm</think>{CALL}", "</think> <tool_call>") == ParsedAnswer(None, "hm", (ADD,))


class WithTemplate(CharTokenizer):
    response_template: ClassVar = {"kind": "own"}

    def parse_response(self, response: list[int], prefix: str, tools: Any) -> dict[str, Any]:
        call = {"function": {"name": "add", "arguments": {"x": len(response)}}}
        return {"content": prefix, "thinking": "hm", "tool_calls": [call]}


def test_response_template_of_the_tokenizer_is_used() -> None:
    parsed = AnswerParser(WithTemplate()).parse("abc", [1, 2, 3], "p", TOOLS)
    assert parsed == ParsedAnswer("p", "hm", (ToolCall("add", {"x": 3}),))
    assert AnswerParser(WithTemplate(), "hermes").parse(CALL, [1], "p", TOOLS).calls == (ADD,)
    with pytest.raises(UserError, match="no response_template"):
        AnswerParser(CharTokenizer(), "template")


class Marked(CharTokenizer):
    """A tokenizer whose marks are special tokens, as in gpt-oss, with ids above those of characters."""

    MARKS = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>")
    chat_template = "{{ messages }}<|channel|>"
    eos_token_id = 2_000_000 + MARKS.index("<|return|>")

    def ids(self, text: str) -> list[int]:
        parts = re.split(f"({'|'.join(map(re.escape, self.MARKS))})", text)
        return [
            token
            for part in parts
            for token in ([2_000_000 + self.MARKS.index(part)] if part in self.MARKS else map(ord, part))
        ]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        shown = [
            chr(t) if t < 2_000_000 else "" if skip_special_tokens else self.MARKS[t - 2_000_000] for t in token_ids
        ]
        return "".join(shown)


THINKS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


@pytest.mark.parametrize("names", [{}, {"calls": "openai", "reasoning": "openai_gptoss"}])
@pytest.mark.parametrize(
    ("said", "tools", "parsed"),
    [
        (f"{THINKS}<|channel|>final<|message|>4<|return|>", TOOLS, ParsedAnswer("4", "hm", ())),
        (
            f'{THINKS}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"x": 1}}<|call|>',
            TOOLS,
            ParsedAnswer(None, "hm", (ADD,)),
        ),
        (
            f'{THINKS} to=functions.add<|channel|>commentary json<|message|>{{"x": 1}}<|call|>',
            TOOLS,
            ParsedAnswer(None, "hm", (ADD,)),
        ),
        (
            f'{THINKS}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"x": 1}}<|call|>',
            None,
            ParsedAnswer('{"x": 1}', "hm", ()),
        ),
        ("<|channel|>analysis<|message|>cut of", TOOLS, ParsedAnswer(None, "cut of", ())),
        ("just so", TOOLS, ParsedAnswer("just so", None, ())),
    ],
)
def test_gpt_oss_channels_become_an_answer(names: dict[str, str], said: str, tools: Any, parsed: ParsedAnswer) -> None:
    tokenizer = Marked()
    tokens = tokenizer.ids(said)
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    assert AnswerParser(tokenizer, **names).parse(text, tokens, "", tools) == parsed


def test_calls_in_channels_stay_text_without_a_parser() -> None:
    said = f'{THINKS}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"x": 1}}<|call|>'
    tokens = Marked().ids(said)
    text = Marked().decode(tokens, skip_special_tokens=True)
    assert AnswerParser(Marked(), "none").parse(text, tokens, "", TOOLS) == ParsedAnswer('{"x": 1}', "hm", ())


@without_vllm
def test_format_that_needs_vllm_is_refused_by_name() -> None:
    # Configured parsers fail at once, parsers suggested by a template when an answer is parsed.
    with pytest.raises(UserError, match=r"vLLM's parser 'mistral'.*hermes, openai, none"):
        AnswerParser(CharTokenizer(), "mistral")
    with pytest.raises(UserError, match=r"reasoning_parser.*'glm45'"):
        AnswerParser(CharTokenizer(), reasoning="glm45")
    with pytest.raises(UserError, match=r"vLLM's parser 'qwen3_coder'"):
        parse("<function=add>", "<tool_call>\n<function=")
    assert parse("no tools, no calls", "<function=", tools=None).content == "no tools, no calls"


def test_unknown_parser_error_suggests_names() -> None:
    for key, wrong, nearest in (
        ("tool_call_parser", "hermess", "hermes"),
        ("tool_call_parser", "qwen3-coder", "qwen3_coder"),
        ("reasoning_parser", "deepseek-r1", "deepseek_r1"),
    ):
        with pytest.raises(ConfigError, match=f"{key}.*did you mean .*{nearest}"):
            load_config(grpo(explorer={"rollout_model": {key: wrong}}))
