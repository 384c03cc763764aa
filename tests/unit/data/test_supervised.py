"""Promises of supervised rows: only the response is learned."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from jinja2 import TemplateError

from rftdask.config.schema.buffer import FormatConfig
from rftdask.data.datasets import RowsDataset
from rftdask.data.supervised import Row, SftRows
from rftdask.errors import DataError

EOS = 0


class CharTokenizer:
    """Code points as token ids; a chat is a sequence of <role>content, with an end mark after each answer."""

    eos_token_id: int | None = EOS
    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, tokens))

    def apply_chat_template(
        self,
        messages: Any,
        *,
        tokenize: bool,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Any = (),
    ) -> str:
        assert not tokenize
        text = "".join(f"[{tool['name']}]" for tool in tools)
        text += "".join(f"<{m['role']}>{m['content']}" + ("|" if m["role"] == "assistant" else "") for m in messages)
        return text.removesuffix("|" if continue_final_message else "") + (
            "<assistant>" if add_generation_prompt else ""
        )


def marked(row: Row) -> list[tuple[int, bool]]:
    """(token, is learned) of a row."""
    tokens, prompt, mask = row
    marks = [False] * prompt + list(mask if mask is not None else [True] * (len(tokens) - prompt))
    return list(zip(tokens, marks, strict=True))


class MovingTemplate(CharTokenizer):
    """A template that begins with the number of messages, so that the answer changes the prompt before it."""

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        return f"{len(messages)}:" + super().apply_chat_template(messages, **options)


def read(rows: list[dict[str, Any]], tokenizer: CharTokenizer | None = None, **fields: Any) -> list[tuple[str, str]]:
    """(prompt, response) of each row as the trainer sees them."""
    values = {"prompt_type": "messages", "prompt_key": "q", "response_key": "a", "messages_key": "messages"}
    max_tokens = fields.pop("max_tokens", 99)
    fmt = FormatConfig(**{**values, **fields})
    source = SftRows(RowsDataset([rows], "f"), tokenizer or CharTokenizer(), fmt, max_tokens)
    found = []
    for tokens, prompt_length, mask in source.read(range(len(rows))):
        assert mask is None
        text = "".join(chr(t) if t else "$" for t in tokens)
        found.append((text[:prompt_length], text[prompt_length:]))
    return found


def test_a_raw_row_is_prompt_and_response_and_an_end_token() -> None:
    assert read([{"q": "1+1=", "a": "2"}], prompt_type="raw") == [("1+1=", "2$")]


def test_plaintext_is_a_chat_of_the_two_columns() -> None:
    row = {"q": "hi", "a": "yo", "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    assert read([row], prompt_type="plaintext") == [("<user>hi<assistant>", "yo|")]
    assert read([row], prompt_type="messages") == [("<user>x<assistant>", "y|")]


def test_a_chat_is_rendered_by_the_template_with_its_end() -> None:
    assert read([{"q": "hi", "a": "yo"}]) == [("<user>hi<assistant>", "yo|")]
    assert read([{"q": "hi", "a": "yo"}], system_prompt="be kind") == [("<system>be kind<user>hi<assistant>", "yo|")]


@pytest.mark.parametrize("as_json", [False, True])
def test_the_last_message_of_a_messages_column_is_learned(as_json: bool) -> None:
    chat: Any = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    if as_json:
        chat = json.dumps(chat)
    assert read([{"messages": chat, "q": "x", "a": "y"}]) == [("<user>a<assistant>b|<user>c<assistant>", "d|")]


def test_long_responses_are_cut_and_long_prompts_refused() -> None:
    assert read([{"q": "12", "a": "3456"}], prompt_type="raw", max_tokens=4) == [("12", "34")]
    with pytest.raises(DataError, match=r"row 0: the prompt has 2 tokens, so nothing of the response fits in 2"):
        read([{"q": "12", "a": "3456"}], prompt_type="raw", max_tokens=2)


def test_a_template_that_changes_the_prompt_is_refused() -> None:
    with pytest.raises(
        DataError, match="row 0: the chat template renders the prompt differently once the answer follows"
    ):
        read([{"q": "hi", "a": "yo"}], MovingTemplate())


@pytest.mark.parametrize("prompt_type", ["raw", "plaintext", "messages"])
def test_a_value_that_is_not_text_is_refused_with_its_row(prompt_type: str) -> None:
    with pytest.raises(DataError, match="row 1: column 'a' holds int, not text"):
        read([{"q": "1", "a": "2"}, {"q": "1", "a": 2}], prompt_type=prompt_type)


@pytest.mark.parametrize("error", [TypeError("no text"), TemplateError("roles must alternate"), KeyError("content")])
def test_a_row_that_the_template_refuses_is_named(error: Exception) -> None:
    class Refusing(CharTokenizer):
        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            if messages[0]["content"] == "bad":
                raise error
            return super().apply_chat_template(messages, **options)

    rows = [{"q": "good", "a": "b"}, {"q": "bad", "a": "b"}]
    with pytest.raises(DataError, match=f"row 1: the chat template cannot render it: {type(error).__name__}: "):
        read(rows, Refusing())


def test_a_missing_column_is_reported_with_the_existing_ones() -> None:
    with pytest.raises(DataError, match=r"has no column 'a', which format.response_key names; columns: q, answer"):
        read([{"q": "1", "answer": "2"}])


@pytest.mark.parametrize("prompt_type", ["plaintext", "messages"])
def test_a_system_prompt_of_the_row_wins_as_in_tasks(prompt_type: str) -> None:
    rows = [{"q": "hi", "a": "yo", "style": "terse"}, {"q": "hi", "a": "yo", "style": None}]
    found = read(rows, prompt_type=prompt_type, system_prompt="be kind", system_prompt_key="style")
    assert found == [("<system>terse<user>hi<assistant>", "yo|"), ("<system>be kind<user>hi<assistant>", "yo|")]


def test_a_chat_gets_the_system_prompt_unless_it_has_its_own() -> None:
    own = [{"role": "system", "content": "own"}, *CHAT[:2]]
    found = read([{"messages": CHAT[:2]}, {"messages": own}], system_prompt="be kind")
    assert [prompt for prompt, _ in found] == ["<system>be kind<user>a<assistant>", "<system>own<user>a<assistant>"]


def test_a_missing_column_of_system_prompts_is_reported() -> None:
    with pytest.raises(DataError, match=r"has no column 'style', which format.system_prompt_key names"):
        read([{"q": "1", "a": "2"}], system_prompt_key="style")


@pytest.mark.parametrize("answer", ["yo", "Well, yo"])
def test_the_reply_prefix_is_part_of_the_prompt(answer: str) -> None:
    assert read([{"q": "hi", "a": answer}], reply_prefix="Well, ") == [("<user>hi<assistant>Well, ", "yo|")]
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]
    assert read([{"messages": chat}], reply_prefix="Well, ") == [("<user>hi<assistant>Well, ", "yo|")]
    assert read([{"q": "1+1", "a": "2"}], prompt_type="raw", reply_prefix="=") == [("1+1=", "2$")]


def test_every_learned_turn_has_the_prefix() -> None:
    assert learned([{"messages": CHAT}], reply_prefix=":") == ["<user>a<assistant>:B|<tool>c<assistant>:D|"]


def test_prompt_and_response_may_be_chats() -> None:
    row = {"q": CHAT[:3], "a": CHAT[3:]}
    assert read([row]) == [("<user>a<assistant>b|<tool>c<assistant>", "d|")]
    with pytest.raises(DataError, match="row 0: column 'q' holds list, not text"):
        read([row], prompt_type="plaintext")


def test_a_raw_row_ends_once() -> None:
    class Spelled(CharTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [0 if character == "$" else ord(character) for character in text]

    assert read([{"q": "1+1=", "a": "2$"}], Spelled(), prompt_type="raw") == [("1+1=", "2$")]


CHAT: list[dict[str, str]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "tool", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def learned(rows: list[dict[str, Any]], **fields: Any) -> list[str]:
    """The text of each row, response parts in upper case if learned and in lower case if not."""
    max_tokens = fields.pop("max_tokens", 99)
    all_turns = fields.pop("all_turns", True)
    fmt = FormatConfig(messages_key="messages", enable_concatenated_multi_turn=all_turns, **fields)
    read = SftRows(RowsDataset([rows], "f"), CharTokenizer(), fmt, max_tokens).read([0])
    return ["".join(chr(t).upper() if mark else chr(t) for t, mark in marked(row)) for row in read]


def test_all_turns_of_a_chat_can_be_learned_in_one_sequence() -> None:
    assert learned([{"messages": CHAT}]) == ["<user>a<assistant>B|<tool>c<assistant>D|"]
    assert learned([{"messages": CHAT}], all_turns=False) == ["<user>a<assistant>b|<tool>c<assistant>D|"]


def test_a_chat_that_is_cut_keeps_the_turns_that_fit() -> None:
    assert learned([{"messages": CHAT}], max_tokens=22) == ["<user>a<assistant>B|<t"]


def test_a_chat_without_an_answer_is_refused() -> None:
    with pytest.raises(DataError, match=r"row 0: .* does not end with an answer of the assistant"):
        learned([{"messages": CHAT[:1]}])


@pytest.mark.parametrize("as_json", [False, True])
def test_tools_of_a_row_go_through_the_template(as_json: bool) -> None:
    tools: Any = [{"name": "add"}]
    row = {"messages": CHAT[:2], "tools": json.dumps(tools) if as_json else tools}
    assert learned([row]) == ["[add]<user>a<assistant>B|"]
    assert learned([{"messages": CHAT[:2], "tools": None}]) == ["<user>a<assistant>B|"]


def test_tools_that_are_not_a_list_are_refused() -> None:
    with pytest.raises(DataError, match="row 0: column 'tools' holds dict, not a list of JSON schemas"):
        learned([{"messages": CHAT[:2], "tools": {"name": "add"}}])
    with pytest.raises(DataError, match="row 0: column 'tools' is not valid JSON"):
        learned([{"messages": CHAT[:2], "tools": "{"}])
