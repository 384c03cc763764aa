"""Supervised rows: rows of a dataset as token sequences to learn from.

A row is a prompt with a response or a chat (`SftRows`), a prompt with a better and a worse response (`PreferenceRows`),
a response with a label (`LabeledRows`), or plain text (`TextRows`). The section `format` of the configuration gives
columns their meaning. This module knows neither storage nor batches.

Invariant: the ids are those of the whole rendered chat, or the whole text, cut where the learned parts begin and end.
Pieces are tokenized separately only if a token would span such a cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from rftdask.config.schema.buffer import FormatConfig
from rftdask.data.chats import Message, read_chat, read_tools, text_size
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

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Begin of a template block that renders the assistant's text."""

Row = tuple[Sequence[int], int, Sequence[bool] | None]
"""(tokens, prompt length, loss mask of the response or None for all of it)."""
LabeledRow = tuple[Sequence[int], int, Sequence[bool] | None, float]
"""A `Row` with 1.0 for a desirable response, 0.0 for an undesirable one."""


@dataclass(frozen=True)
class Example:
    """A training example before template and tokenizer: an answer to a prompt, or the answers in a chat."""

    messages: Sequence[Message] = ()
    """The whole chat; empty for raw text."""
    learned: Sequence[int] = ()
    """Indices of the assistant's messages to learn, ascending; none is 0."""
    prompt: str = ""
    """Part of raw text that is not learned."""
    response: str = ""
    """Part of raw text that is learned."""


class SftRows:
    """Tokenizes prompts and responses, or whole chats, on demand.

    prompt_type raw joins prompt and response unchanged, between the first and the end token of the tokenizer; plaintext
    and messages render them with its chat template.

    Example: SftRows(dataset, tokenizer, FormatConfig(), max_tokens=2048).read([3, 5])
    """

    schema = "sft"
    sequences_per_row = 1

    def __init__(self, dataset: Dataset, tokenizer: Tokenizer, fmt: FormatConfig, max_tokens: int) -> None:
        """max_tokens: longer sequences are cut at the end.

        Raises: DataError: a column of the format is missing, or the template lacks the {% generation %} blocks.
        """
        check_columns(dataset, self.schema, fmt)
        if fmt.return_assistant_tokens_mask and not _GENERATION.search(str(getattr(tokenizer, "chat_template", ""))):
            raise DataError(
                "format.return_assistant_tokens_mask: the chat template marks nothing, it has no {% generation %} "
                "block; use a template with such blocks (model.chat_template_path), or leave the key out: answers are "
                "then found by rendering the chat up to each of them"
            )
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._format = fmt
        self._max_tokens = max_tokens

    def read(self, numbers: Sequence[int]) -> list[Row]:
        """Tokenize the rows with these numbers. Raises: DataError: a row has no text where the format requires it."""
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
            try:
                pieces, hidden = self._render(number, row, example)
            except DataError:
                raise
            except Exception as error:  # a template may raise anything
                raise DataError(
                    f"row {number}: the chat template cannot render it: {type(error).__name__}: {error}"
                ) from error
        parts = _encode_pieces(partial(encode_hidden, self._tokenizer, hidden=hidden), [text for text, _ in pieces])
        if not example.messages:
            parts[0] = with_first_token(self._tokenizer, parts[0])
            parts[-1] = with_end_token(self._tokenizer, parts[-1])
        for part, (_, is_learned) in zip(parts, pieces, strict=True):
            tokens.extend(part)
            learned.extend([is_learned] * len(part))
        # Cut the end, not the beginning: an answer without its question teaches nothing.
        tokens, learned = tokens[: self._max_tokens], learned[: self._max_tokens]
        if not any(learned):
            raise DataError(
                f"row {number}: the prompt has {len(tokens)} tokens, so nothing of the response fits in "
                f"{self._max_tokens} (model.max_model_len)"
            )
        # Everything before the first learned token is the prompt, whatever its roles.
        prompt_length = learned.index(True)
        mask = learned[prompt_length:]
        return tokens, prompt_length, None if all(mask) else mask

    def _render(
        self, number: int, row: Mapping[str, Any], example: Example
    ) -> tuple[list[tuple[str, bool]], dict[str, str]]:
        """Render the chat; return (text, is learned) pieces, and the hidden special tokens (`hide_special`)."""
        prefix = self._format.reply_prefix or ""
        key = self._format.tools_key
        chat = example.messages, read_tools(row, key, _where(number, key)), prefix
        (messages, tools, prefix), hidden = hide_special(self._tokenizer, chat)

        def render(messages: Sequence[Message], **options: Any) -> str:
            options |= {} if tools is None else {"tools": tools}
            return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, **options))

        if self._format.return_assistant_tokens_mask:
            text, blocks = render_marked(self._tokenizer, messages, tools)
            if not blocks:
                raise DataError(f"row {number}: the chat template marks nothing in it (return_assistant_tokens_mask)")
            # Pieces alternate: text before a block, the block, ..., text after the last block.
            cuts = pairwise([0, *(place for block in blocks for place in block), len(text)])
            return [(text[start:end], bool(count % 2)) for count, (start, end) in enumerate(cuts)], hidden

        # Render the chat up to each answer; the difference of two renderings is the text between them.
        whole = render(messages)
        pieces: list[tuple[str, bool]] = []
        done = ""
        for place in example.learned:
            if prefix:  # as tasks are rendered
                begun = [*messages[:place], {"role": "assistant", "content": prefix}]
                prompt = render(begun, continue_final_message=True)
            else:
                prompt = render(messages[:place], add_generation_prompt=True)
            end = whole if place == len(messages) - 1 else render(messages[: place + 1])
            # Some templates drop earlier thoughts, or trim: then the rendered prompt is not a prefix of the whole.
            if not (prompt.startswith(done) and end.startswith(prompt) and whole.startswith(end)):
                raise DataError(
                    f"row {number}: the chat template renders the prompt differently once the answer follows, so the "
                    "tokens to learn cannot be identified; use prompt_type raw or another template"
                )
            pieces += [(prompt[len(done) :], False), (end[len(prompt) :], True)]
            done = end
        return pieces, hidden


class PreferenceRows(SftRows):
    """Tokenizes rows of a better and a worse response on demand, each as two sequences, the better one first.

    Invariant: reading n rows returns 2 n sequences, those of a row next to each other.

    Example: PreferenceRows(dataset, tokenizer, FormatConfig(), 2048).read([3]) returns [chosen row, rejected row]
    """

    schema = "dpo"
    sequences_per_row = 2


class LabeledRows:
    """Tokenizes rows of {prompt, response, label} on demand. A dataset without labels has pairs, each of which is read
    as a desirable and an undesirable response.

    Example: LabeledRows(dataset, tokenizer, FormatConfig(), 2048).read([3]) is [(tokens, prompt length, None, 1.0)]
    """

    def __init__(self, dataset: Dataset, tokenizer: Tokenizer, fmt: FormatConfig, max_tokens: int) -> None:
        """Raises: DataError: a column is missing."""
        self._dataset, self._label_key = dataset, fmt.label_key
        schema, fmt = schema_of("kto", dataset, fmt)
        self._rows = (SftRows if schema == "sft" else PreferenceRows)(dataset, tokenizer, fmt, max_tokens)
        self.sequences_per_row = self._rows.sequences_per_row

    def read(self, numbers: Sequence[int]) -> list[LabeledRow]:
        """Tokenize the rows with these numbers. Raises: DataError: a row has no text, or an invalid label."""
        rows = self._rows.read(numbers)
        # The better response of a pair is the desirable one.
        labels = [1.0, 0.0] * len(numbers)
        if self.sequences_per_row == 1:
            labels = [_read_label(number, self._dataset[number], self._label_key) for number in numbers]
        return [(*row, label) for row, label in zip(rows, labels, strict=True)]


class TextRows(SftRows):
    """Tokenizes rows of one text (`prompt_key`) on demand, with an end token; every token but the first is learned."""

    schema = "cpt"

    def read(self, numbers: Sequence[int]) -> list[Row]:
        """Tokenize the rows with these numbers. Raises: DataError: a row has no text, or fewer than two tokens."""
        rows: list[Row] = []
        for number in numbers:
            key = self._format.prompt_key
            tokens = self._tokenizer.encode(_text(number, self._dataset[number], key), add_special_tokens=False)
            tokens = with_end_token(self._tokenizer, with_first_token(self._tokenizer, tokens))[: self._max_tokens]
            if len(tokens) < 2:
                raise DataError(f"row {number}: column {key!r} has {len(tokens)} tokens; at least 2 are needed")
            # The first token is the prompt: nothing predicts it.
            rows.append((tokens, 1, None))
        return rows


Rows = SftRows | PreferenceRows | LabeledRows | TextRows


def make_rows(schema: str, dataset: Dataset, tokenizer: Tokenizer, fmt: FormatConfig, max_tokens: int) -> Rows:
    """Return the rows of a dataset for an algorithm with this schema. Raises: DataError: as `SftRows`."""
    kinds: dict[str, type[Rows]] = {"cpt": TextRows, "dpo": PreferenceRows, "kto": LabeledRows}
    return kinds.get(schema, SftRows)(dataset, tokenizer, fmt, max_tokens)


# ---- rows before any tokenizer


def schema_of(schema: str, dataset: Dataset, fmt: FormatConfig) -> tuple[str, FormatConfig]:
    """Return the schema for reading rows: for "kto" "sft" if the dataset has labels, else "dpo"; others unchanged.

    Raises: DataError: a dataset for "kto" has neither labels nor pairs.
    """
    if schema != "kto":
        return schema, fmt
    has_label = fmt.label_key in dataset.columns
    if not has_label and fmt.chosen_key not in dataset.columns:
        raise DataError(
            f"it has neither labels (column {fmt.label_key!r}, format.label_key) nor pairs (column "
            f"{fmt.chosen_key!r}, format.chosen_key); columns: {', '.join(dataset.columns)}"
        )
    # Without messages_key: a label does not say to which answer of a chat it applies.
    return ("sft", fmt.model_copy(update={"messages_key": ""})) if has_label else ("dpo", fmt)


def check_columns(dataset: Dataset, schema: str, fmt: FormatConfig) -> None:
    """Raise DataError if the format names a column that the dataset lacks, or conflicts with the schema."""
    has_chat = fmt.prompt_type == "messages" and fmt.messages_key in dataset.columns
    prompt = [] if has_chat else ["prompt_key"]
    if schema == "dpo":  # messages of a row may contain the prompt
        options = [*(prompt if fmt.prompt_type != "messages" else []), "chosen_key", "rejected_key"]
    else:
        options = ["prompt_key"] if schema == "cpt" else [*prompt, *(["response_key"] if prompt else [])]
    if fmt.return_assistant_tokens_mask and (schema != "sft" or fmt.prompt_type == "raw" or fmt.reply_prefix):
        raise DataError(
            "format.return_assistant_tokens_mask works only with chats of sft: pairs learn the answer after their "
            "prompt, raw text has no template, and a reply_prefix would be marked as learned; leave one of them out"
        )
    if fmt.system_prompt_key and fmt.prompt_type != "raw" and schema != "cpt":
        options.append("system_prompt_key")
    for option in options:
        column = getattr(fmt, option)
        if column not in dataset.columns:
            raise DataError(
                f"it has no column {column!r}, which format.{option} names; columns: {', '.join(dataset.columns)}"
            )


def check_row(schema: str, fmt: FormatConfig, number: int, row: Mapping[str, Any], *, has_label: bool = False) -> int:
    """Check a row, as far as no tokenizer is needed, and return its number of characters.

    Raises: DataError: it cannot be used.
    """
    if has_label:
        _read_label(number, row, fmt.label_key)
    if schema == "cpt":
        return len(_text(number, row, fmt.prompt_key))
    read_tools(row, fmt.tools_key, _where(number, fmt.tools_key))
    return text_size([(e.messages, e.prompt, e.response) for e in read_examples(schema, number, row, fmt)])


def read_examples(schema: str, number: int, row: Mapping[str, Any], fmt: FormatConfig) -> tuple[Example, ...]:
    """Read a row as one example, with schema "dpo" as two. Raises: DataError: the row does not fit the format."""
    if schema == "dpo":
        return _read_pair(number, row, fmt)
    if fmt.prompt_type == "raw":
        return (_raw(number, row, fmt, fmt.response_key),)
    if fmt.prompt_type != "messages" or row.get(fmt.messages_key) is None:
        prompt = _chat(number, row, fmt, fmt.prompt_key, "user")
        return (_answered(number, row, fmt, prompt, fmt.response_key),)
    chat = read_chat(row, fmt.messages_key, _where(number, fmt.messages_key))
    messages = with_system_prompt(chat, row, fmt)
    # An answer at place 0 answers nothing. Unless all answers are learned, the last message must be the row's answer.
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
    if all(has_prompt):  # the prompt is their common beginning; if both are equal, all but the last message
        last = min(len(better), len(worse)) - 1
        shared = next((place for place in range(last) if better[place] != worse[place]), last)
        prompt = better[:shared]
    elif any(has_prompt):
        raise DataError(f"row {number}: only one of the columns {keys[0]!r} and {keys[1]!r} begins with a prompt")
    elif fmt.prompt_type == "messages" and row.get(fmt.messages_key) is not None:
        prompt = read_chat(row, fmt.messages_key, _where(number, fmt.messages_key))
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
    """Join the prompt and the messages of `column` after its first `num_shared` ones, whose answers are learned."""
    answer = _chat(number, row, fmt, column, "assistant")[num_shared:]
    if not prompt or {answer[0]["role"], answer[-1]["role"]} != {"assistant"}:
        raise DataError(f"row {number}: column {column!r} does not answer the prompt with messages of the assistant")
    messages = with_system_prompt([*prompt, *answer], row, fmt)
    first = len(messages) - len(answer)
    # Answers in the prompt are context, and not learned.
    learned = [place for place in range(first, len(messages)) if messages[place]["role"] == "assistant"]
    return _example(number, messages, learned, fmt)


def _example(number: int, messages: Sequence[Message], learned: Sequence[int], fmt: FormatConfig) -> Example:
    """Make an example of a chat, and let each learned answer begin with the reply prefix."""
    messages = list(messages)
    for place in learned if fmt.reply_prefix else ():
        # As in tasks, the policy learns to continue from the prefix, which is not part of its own text.
        content = messages[place].get("content")
        if not isinstance(content, str):
            raise DataError(f"row {number}: message {place} has no text to which format.reply_prefix can be added")
        if not content.startswith(str(fmt.reply_prefix)):
            messages[place] = {**messages[place], "content": f"{fmt.reply_prefix}{content}"}
    return Example(messages, learned)


def _raw(number: int, row: Mapping[str, Any], fmt: FormatConfig, column: str) -> Example:
    prompt = _text(number, row, fmt.prompt_key) + (fmt.reply_prefix or "")
    return Example(prompt=prompt, response=_text(number, row, column))


def _chat(number: int, row: Mapping[str, Any], fmt: FormatConfig, column: str, role: str) -> list[Message]:
    """Read a column of messages, or of text as one message of `role`."""
    if fmt.prompt_type == "messages" and isinstance(row.get(column), list | tuple | np.ndarray):
        return read_chat(row, column, _where(number, column))
    return [{"role": role, "content": _text(number, row, column)}]


def _where(number: int, column: str) -> str:
    return f"row {number}: column {column!r}"


def _text(number: int, row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise DataError(f"row {number}: column {column!r} holds {type(value).__name__}, not text")
    return value


def _read_label(number: int, row: Mapping[str, Any], column: str) -> float:
    value = row.get(column)
    if value not in (0, 1):  # False and True among them
        raise DataError(f"row {number}: column {column!r} holds {str(value)[:40]!r}; use true or false")
    return float(value)


def _encode_pieces(encode: Callable[[str], list[int]], texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text, as in the joined text unless a token would span two texts."""
    whole = encode("".join(texts))
    # Usually the pieces encode as they do in the whole, and the cuts fall between tokens.
    separate = [encode(text) for text in texts[:-1]]
    before = [token for part in separate for token in part]
    if whole[: len(before)] == before:
        return [*separate, whole[len(before) :]]
    # A tokenizer that begins every text with its own mark (SentencePiece) has it once in the joined text.
    begun = [encode("".join(texts[:count])) for count in range(1, len(texts))]
    if all(whole[: len(start)] == start for start in begun):
        return [whole[start:end] for start, end in pairwise([0, *map(len, begun), len(whole)])]
    return [*separate, encode(texts[-1])]
