"""Supervised rows: rows of a dataset as token sequences to learn from.

A row is a prompt with a response or a chat (`SftRows`), a prompt with a better and a worse response (`PreferenceRows`),
a response with a verdict (`LabeledRows`), or plain text (`TextRows`). What a column means is said by the section
`format` of the configuration. It knows no storage and no batches.

Invariant: the ids are those that the tokenizer gives the whole rendered chat, or the whole text, cut where what is
learned begins and ends; pieces are tokenized by themselves only where a token would span such a place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from rftdask.config.schema.buffer import FormatConfig
from rftdask.data.datasets import Dataset
from rftdask.data.tasksets import with_system_prompt
from rftdask.data.tokenizer import (
    Tokenizer,
    encode_hidden,
    hide_special,
    render_marked,
    with_end_token,
    with_first_token,
)
from rftdask.errors import DataError
from rftdask.storage.checked_json import parse_json

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""What begins a block of a template that renders what the assistant says."""

Row = tuple[Sequence[int], int, Sequence[bool] | None]
"""(tokens, prompt length, loss mask of the response or None for all of it)."""
LabeledRow = tuple[Sequence[int], int, Sequence[bool] | None, float]
"""The same, and 1.0 for a desirable response, 0.0 for an undesirable one."""
Message = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """What a row teaches, before any template or tokenizer: an answer to a prompt, or the answers in a chat."""

    messages: Sequence[Message] = ()
    """The whole chat; empty for raw text."""
    learned: Sequence[int] = ()
    """Places in it of the assistant's messages to learn, ascending; before the first there is a message."""
    prompt: str = ""
    """Of raw text what is not learned."""
    response: str = ""
    """Of raw text what is."""


class SftRows:
    """Tokenizes prompts and responses, or whole chats, on demand.

    prompt_type raw joins prompt and response as they are, the tokenizer's first token before and the end token after;
    plaintext and messages render them through the chat template of the tokenizer.

    Example: SftRows(dataset, tokenizer, FormatConfig(), max_tokens=2048).read([3, 5])
    """

    schema = "sft"
    sequences_per_row = 1

    def __init__(self, dataset: Dataset, tokenizer: Tokenizer, fmt: FormatConfig, max_tokens: int) -> None:
        """max_tokens: a longer sequence loses its end. Raises: DataError: a column of the format is missing, or the
        template does not mark what it is to mark.
        """
        check_columns(dataset, self.schema, fmt)
        if fmt.return_assistant_tokens_mask and not _GENERATION.search(str(getattr(tokenizer, "chat_template", ""))):
            raise DataError(
                "format.return_assistant_tokens_mask: the chat template marks nothing, it has no {% generation %} "
                "block; give one that has (model.chat_template_path), or leave the key out: answers are then told "
                "apart by rendering the chat up to each of them"
            )
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._format = fmt
        self._max_tokens = max_tokens

    def read(self, numbers: Sequence[int]) -> list[Row]:
        """Tokenize the rows of these numbers. Raises: DataError: a row has no text where the format says so."""
        rows = ((number, self._dataset[number]) for number in numbers)
        return [
            self._tokenize(number, row, example)
            for number, row in rows
            for example in read_examples(self.schema, number, row, self._format)
        ]

    def _tokenize(self, number: int, row: Mapping[str, Any], example: Example) -> Row:
        tokens: list[int] = []
        learned: list[bool] = []
        hidden: dict[str, str] = {}
        pieces = [(example.prompt, False), (example.response, True)]
        if example.messages:
            pieces, hidden = self._render(number, row, example)
        parts = _encode_pieces(partial(encode_hidden, self._tokenizer, hidden=hidden), [text for text, _ in pieces])
        if not example.messages:
            parts[0] = with_first_token(self._tokenizer, parts[0])
            parts[-1] = with_end_token(self._tokenizer, parts[-1])
        for part, (_, is_learned) in zip(parts, pieces, strict=True):
            tokens.extend(part)
            learned.extend([is_learned] * len(part))
        # The end is cut, not the beginning: an answer without its question teaches nothing.
        tokens, learned = tokens[: self._max_tokens], learned[: self._max_tokens]
        if not any(learned):
            raise DataError(
                f"row {number}: the prompt alone has {len(tokens)} tokens, nothing of the response fits in "
                f"{self._max_tokens} (model.max_model_len)"
            )
        # What comes before the first learned token is the prompt, whatever roles it has.
        prompt_length = learned.index(True)
        mask = learned[prompt_length:]
        return tokens, prompt_length, None if all(mask) else mask

    def _render(
        self, number: int, row: Mapping[str, Any], example: Example
    ) -> tuple[list[tuple[str, bool]], dict[str, str]]:
        """The rendered chat, cut where what is learned begins and ends, and what is hidden in it (`hide_special`)."""
        prefix = self._format.reply_prefix or ""
        chat = example.messages, _tools(number, row, self._format.tools_key), prefix
        (messages, tools, prefix), hidden = hide_special(self._tokenizer, chat)

        def render(messages: Sequence[Message], **options: Any) -> str:
            more = {} if tools is None else {"tools": tools}
            return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, **more, **options))

        if self._format.return_assistant_tokens_mask:
            text, blocks = render_marked(self._tokenizer, messages, tools)
            if not blocks:
                raise DataError(f"row {number}: the chat template marks nothing of it (return_assistant_tokens_mask)")
            # What lies before a block, the block, and so on; the last piece is what follows all of them.
            cuts = pairwise([0, *(place for block in blocks for place in block), len(text)])
            return [(text[start:end], bool(count % 2)) for count, (start, end) in enumerate(cuts)], hidden

        # The chat is rendered again up to each answer, and the difference of two renderings is what lies between them.
        whole = render(messages)
        pieces: list[tuple[str, bool]] = []
        done = ""
        for place in example.learned:
            if prefix:  # as a task is asked
                begun = [*messages[:place], {"role": "assistant", "content": prefix}]
                prompt = render(begun, continue_final_message=True)
            else:
                prompt = render(messages[:place], add_generation_prompt=True)
            end = whole if place == len(messages) - 1 else render(messages[: place + 1])
            # Some templates drop earlier thoughts, or trim: then the rendered prompt is no prefix of the whole.
            if not (prompt.startswith(done) and end.startswith(prompt) and whole.startswith(end)):
                raise DataError(
                    f"row {number}: the chat template renders the prompt differently once the answer follows, so the "
                    "tokens to learn cannot be told apart; use prompt_type raw or another template"
                )
            pieces += [(prompt[len(done) :], False), (end[len(prompt) :], True)]
            done = end
        return pieces, hidden


class PreferenceRows(SftRows):
    """Tokenizes rows of a better and a worse response on demand, each as two sequences, the better one first.

    Invariant: reading n rows gives 2 n sequences, those of a row next to each other.

    Example: PreferenceRows(dataset, tokenizer, FormatConfig(), 2048).read([3]) gives [chosen row, rejected row]
    """

    schema = "dpo"
    sequences_per_row = 2


class LabeledRows:
    """Tokenizes rows of {prompt, response, label} on demand; or, of a dataset without labels, pairs, each as a
    desirable and an undesirable response.

    Example: LabeledRows(dataset, tokenizer, FormatConfig(), 2048).read([3]) gives [(tokens, prompt length, None, 1.0)]
    """

    def __init__(self, dataset: Dataset, tokenizer: Tokenizer, fmt: FormatConfig, max_tokens: int) -> None:
        """`fmt` says how prompt and response are joined. Raises: DataError: a column is missing."""
        self._dataset, self._label_key = dataset, fmt.label_key
        schema, fmt = schema_of("kto", dataset, fmt)
        self._rows = (SftRows if schema == "sft" else PreferenceRows)(dataset, tokenizer, fmt, max_tokens)
        self.sequences_per_row = self._rows.sequences_per_row

    def read(self, numbers: Sequence[int]) -> list[LabeledRow]:
        """Tokenize the rows of these numbers. Raises: DataError: a row has no text, or a label that is no verdict."""
        rows = self._rows.read(numbers)
        # Of a pair the better response is the desirable one.
        labels = [1.0, 0.0] * len(numbers) if self.sequences_per_row == 2 else [self._label(n) for n in numbers]
        return [(*row, label) for row, label in zip(rows, labels, strict=True)]

    def _label(self, number: int) -> float:
        value = self._dataset[number].get(self._label_key)
        if value not in (0, 1):  # False and True among them
            raise DataError(
                f"row {number}: column {self._label_key!r} holds {str(value)[:40]!r}; true or false is needed"
            )
        return float(value)


class TextRows:
    """Tokenizes rows of one text (`prompt_key`) on demand; every token but the first is learned, and an end token."""

    sequences_per_row = 1

    def __init__(self, dataset: Dataset, tokenizer: Tokenizer, fmt: FormatConfig, max_tokens: int) -> None:
        """max_tokens: a longer text loses its end. Raises: DataError: there is no such column."""
        self._key = fmt.prompt_key
        check_columns(dataset, "cpt", fmt)
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens

    def read(self, numbers: Sequence[int]) -> list[Row]:
        """Tokenize the rows of these numbers. Raises: DataError: a row has no text, or too little to learn from."""
        rows: list[Row] = []
        for number in numbers:
            tokens = self._tokenizer.encode(_text(number, self._dataset[number], self._key), add_special_tokens=False)
            tokens = with_end_token(self._tokenizer, with_first_token(self._tokenizer, tokens))
            tokens = tokens[: self._max_tokens]
            if len(tokens) < 2:
                raise DataError(f"row {number}: column {self._key!r} has {len(tokens)} tokens; two are the least")
            # The first token is the prompt: nothing predicts it.
            rows.append((tokens, 1, None))
        return rows


# ---- rows before any tokenizer


def schema_of(schema: str, dataset: Dataset, fmt: FormatConfig) -> tuple[str, FormatConfig]:
    """How rows are read: "kto" as "sft" where the dataset has labels, else as "dpo"; any other schema as it is.

    Raises: DataError: a dataset for "kto" has neither labels nor pairs.
    """
    if schema != "kto":
        return schema, fmt
    # Beside a label a whole chat does not say which answer is meant.
    has_label = fmt.label_key in dataset.columns
    if not has_label and fmt.chosen_key not in dataset.columns:
        raise DataError(
            f"it has neither verdicts (column {fmt.label_key!r}, format.label_key) nor pairs (column "
            f"{fmt.chosen_key!r}, format.chosen_key); columns: {', '.join(dataset.columns)}"
        )
    return ("sft", fmt.model_copy(update={"messages_key": ""})) if has_label else ("dpo", fmt)


def check_columns(dataset: Dataset, schema: str, fmt: FormatConfig) -> None:
    """Raises: DataError: the format names a column that the dataset has not."""
    has_chat = fmt.prompt_type == "messages" and fmt.messages_key in dataset.columns
    prompt = [] if has_chat else ["prompt_key"]
    if schema == "dpo":  # rows tell whether their messages hold the prompt
        options = [*(prompt if fmt.prompt_type != "messages" else []), "chosen_key", "rejected_key"]
    else:
        options = ["prompt_key"] if schema == "cpt" else [*prompt, *(["response_key"] if prompt else [])]
    if fmt.return_assistant_tokens_mask and (schema != "sft" or fmt.prompt_type == "raw" or fmt.reply_prefix):
        raise DataError(
            "format.return_assistant_tokens_mask is for the chats of sft: pairs learn the answer after their prompt, "
            "raw text has no template, and a reply_prefix is marked and not said; leave one of them out"
        )
    if fmt.system_prompt_key and fmt.prompt_type != "raw" and schema != "cpt":
        options.append("system_prompt_key")
    for option in options:
        column = getattr(fmt, option)
        if column not in dataset.columns:
            raise DataError(
                f"it has no column {column!r}, which format.{option} names; columns: {', '.join(dataset.columns)}"
            )


def read_examples(schema: str, number: int, row: Mapping[str, Any], fmt: FormatConfig) -> tuple[Example, ...]:
    """What a row teaches: one example, of schema "dpo" two. Raises: DataError: the row does not fit the format."""
    if schema == "dpo":
        return _read_pair(number, row, fmt)
    if fmt.prompt_type == "raw":
        return (_raw(number, row, fmt, fmt.response_key),)
    if fmt.prompt_type != "messages" or row.get(fmt.messages_key) is None:
        prompt = _chat(number, row, fmt, fmt.prompt_key, "user")
        return (_answered(number, row, fmt, prompt, fmt.response_key),)
    messages = with_system_prompt(_messages(number, row[fmt.messages_key], fmt.messages_key), row, fmt)
    # Answers at place 0 answer nothing. Unless all are trained, the last message must be one: it is the row's response.
    answers = [place for place, message in enumerate(messages) if place and message["role"] == "assistant"]
    all_are_learned = fmt.enable_concatenated_multi_turn or fmt.return_assistant_tokens_mask
    if not answers or not (all_are_learned or answers[-1] == len(messages) - 1):
        raise DataError(
            f"row {number}: column {fmt.messages_key!r} does not end with an answer of the assistant to a prompt: "
            "there is nothing to learn"
        )
    return (_example(number, messages, answers if all_are_learned else answers[-1:], fmt),)


def _read_pair(number: int, row: Mapping[str, Any], fmt: FormatConfig) -> tuple[Example, Example]:
    keys = fmt.chosen_key, fmt.rejected_key
    if fmt.prompt_type == "raw":
        chosen, rejected = (_raw(number, row, fmt, key) for key in keys)
        return chosen, rejected
    better, worse = (_chat(number, row, fmt, key, "assistant") for key in keys)
    has_prompt = [messages[0]["role"] != "assistant" for messages in (better, worse)]
    shared = 0
    if all(has_prompt):  # the prompt is what both begin with; of two that are the same, all but the last message
        last = min(len(better), len(worse)) - 1
        shared = next((place for place in range(last) if better[place] != worse[place]), last)
        prompt = better[:shared]
    elif any(has_prompt):
        raise DataError(f"row {number}: of the columns {keys[0]!r} and {keys[1]!r} only one begins with a prompt")
    elif fmt.prompt_type == "messages" and row.get(fmt.messages_key) is not None:
        prompt = _messages(number, row[fmt.messages_key], fmt.messages_key)
    elif fmt.prompt_key in row:
        prompt = _chat(number, row, fmt, fmt.prompt_key, "user")
    else:
        raise DataError(
            f"row {number} has no prompt: no column {fmt.prompt_key!r}, which format.prompt_key names, and "
            f"{keys[0]!r} begins with an answer"
        )
    chosen, rejected = (_answered(number, row, fmt, prompt, key, shared) for key in keys)
    return chosen, rejected


def _answered(
    number: int, row: Mapping[str, Any], fmt: FormatConfig, prompt: Sequence[Message], column: str, num_shared: int = 0
) -> Example:
    """The prompt and what `column` holds after its first `num_shared` messages, whose answers are learned."""
    answer = _chat(number, row, fmt, column, "assistant")[num_shared:]
    if not prompt or {answer[0]["role"], answer[-1]["role"]} != {"assistant"}:
        raise DataError(f"row {number}: column {column!r} does not answer the prompt with messages of the assistant")
    messages = with_system_prompt([*prompt, *answer], row, fmt)
    first = len(messages) - len(answer)
    # Of the answer alone: answers in the prompt are context.
    learned = [place for place in range(first, len(messages)) if messages[place]["role"] == "assistant"]
    return _example(number, messages, learned, fmt)


def _example(number: int, messages: Sequence[Message], learned: Sequence[int], fmt: FormatConfig) -> Example:
    """The chat, each learned answer with the reply prefix before it unless it begins with that."""
    messages = list(messages)
    for place in learned if fmt.reply_prefix else ():
        # As a task is asked: the policy learns to go on from the prefix, so the prefix is no part of what it says.
        content = messages[place].get("content")
        if not isinstance(content, str):
            raise DataError(f"row {number}: message {place} has no text that format.reply_prefix could begin")
        if not content.startswith(str(fmt.reply_prefix)):
            messages[place] = {**messages[place], "content": f"{fmt.reply_prefix}{content}"}
    return Example(messages, learned)


def _raw(number: int, row: Mapping[str, Any], fmt: FormatConfig, column: str) -> Example:
    prompt = _text(number, row, fmt.prompt_key) + (fmt.reply_prefix or "")
    return Example(prompt=prompt, response=_text(number, row, column))


def _chat(number: int, row: Mapping[str, Any], fmt: FormatConfig, column: str, role: str) -> list[Message]:
    """A column of text, which `role` says, or of messages."""
    value = row.get(column)
    if fmt.prompt_type == "messages" and isinstance(value, list | tuple | np.ndarray):
        return _messages(number, value, column)
    return [{"role": role, "content": _text(number, row, column)}]


def _messages(number: int, value: Any, column: str) -> list[Message]:
    """A chat, or its JSON text, without the nulls that a table has where a message lacks what others have."""
    where = f"row {number}: column {column!r}"
    try:
        messages = parse_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"{where} is no JSON: {error}") from error
    is_list = isinstance(messages, list | tuple | np.ndarray) and len(messages) > 0
    if not is_list or not all(isinstance(message, Mapping) for message in messages):
        raise DataError(f"{where} is no list of messages {{role, content}}")
    for message in messages:
        if not isinstance(message.get("role"), str) or isinstance(message.get("content"), int | float):
            raise DataError(f"{where} has the message {str(message)[:80]}, which is not {{role: text, content: text}}")
    # Templates ask for the content of a call of tools, which has none.
    return [{key: None for key in message if key == "content"} | _without_nulls(message) for message in messages]


def _tools(number: int, row: Mapping[str, Any], column: str) -> list[Any] | None:
    value = row.get(column)
    try:
        # Tables hold schemas as text, since the columns of two tools differ.
        tools = json.loads(value) if isinstance(value, str) and value else value or None
    except ValueError as error:
        raise DataError(f"row {number}: column {column!r} is no JSON: {error}") from error
    if tools is not None and not isinstance(tools, list):
        raise DataError(
            f"row {number}: column {column!r} holds {type(tools).__name__}, a list of JSON schemas is needed"
        )
    return None if tools is None else [_without_nulls(tool) for tool in tools]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple | np.ndarray) else value


def _text(number: int, row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise DataError(f"row {number}: column {column!r} holds {type(value).__name__}, text is needed")
    return value


def _encode_pieces(encode: Callable[[str], list[int]], texts: Sequence[str]) -> list[list[int]]:
    """The token ids of each text, as they are in the joined text unless a token would span two of them."""
    whole = encode("".join(texts))
    # Cheap and mostly right: if the pieces encode as they do in the whole, the cuts fall between tokens.
    alone = [encode(text) for text in texts[:-1]]
    before = [token for part in alone for token in part]
    if whole[: len(before)] == before:
        return [*alone, whole[len(before) :]]
    # A tokenizer that begins every text with a mark of its own (SentencePiece) has it once in the joined text.
    begun = [encode("".join(texts[:count])) for count in range(1, len(texts))]
    if all(whole[: len(start)] == start for start in begun):
        return [whole[start:end] for start, end in pairwise([0, *map(len, begun), len(whole)])]
    return [*alone, encode(texts[-1])]
