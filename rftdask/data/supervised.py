"""Supervised rows: rows of a dataset as token sequences to learn from.

A row is a prompt with a response or a chat (`SftRows`), a prompt with a better and a worse response (`PreferenceRows`),
a response with a verdict (`LabeledRows`), or plain text (`TextRows`). What a column means is said by the section
`format` of the configuration. It knows no storage and no batches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rftdask.config.schema.buffer import FormatConfig
from rftdask.data.datasets import Dataset
from rftdask.data.tokenizer import Tokenizer, encode_hidden, hide_special
from rftdask.errors import DataError
from rftdask.storage.checked_json import parse_json

Row = tuple[Sequence[int], int, Sequence[bool] | None]
"""(tokens, prompt length, loss mask of the response or None for all of it)."""
LabeledRow = tuple[Sequence[int], int, Sequence[bool] | None, float]
"""The same, and 1.0 for a desirable response, 0.0 for an undesirable one."""


class SftRows:
    """Tokenizes prompts and responses, or whole chats, on demand.

    prompt_type raw joins prompt and response as they are, an end token after; plaintext and messages render them
    through the chat template of the tokenizer.

    Example: SftRows(dataset, tokenizer, FormatConfig(), max_tokens=2048).read([3, 5])
    """

    sequences_per_row = 1

    def __init__(self, dataset: Dataset, tokenizer: Tokenizer, fmt: FormatConfig, max_tokens: int) -> None:
        """max_tokens: a longer sequence loses its end. Raises: DataError: a column of the format is missing."""
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._format = fmt
        self._max_tokens = max_tokens
        self._is_chat = fmt.prompt_type != "raw"
        self._has_messages = fmt.prompt_type == "messages" and fmt.messages_key in dataset.columns
        for column in [fmt.messages_key] if self._has_messages else [fmt.prompt_key, fmt.response_key]:
            _check_column(dataset, column, "*_key")

    def read(self, numbers: Sequence[int]) -> list[Row]:
        """Tokenize the rows of these numbers. Raises: DataError: a row has no text where the format says so."""
        return [self._tokenize(number, self._dataset[number]) for number in numbers]

    def _tokenize(self, number: int, row: Mapping[str, Any]) -> Row:
        fmt = self._format
        hidden: dict[str, str] = {}
        if self._is_chat:
            pieces, hidden = self._chat_pieces(number, row)
        else:
            prompt = _text(number, row, fmt.prompt_key)
            pieces = [(prompt, False), (_text(number, row, fmt.response_key), True)]
        tokens: list[int] = []
        learned: list[bool] = []
        # Each piece is tokenized by itself, so that no token spans what is learned and what is not.
        for text, is_learned in pieces:
            part = encode_hidden(self._tokenizer, text, hidden)
            tokens.extend(part)
            learned.extend([is_learned] * len(part))
        if not self._is_chat and self._tokenizer.eos_token_id is not None:
            tokens.append(self._tokenizer.eos_token_id)
            learned.append(True)
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

    def _chat_pieces(self, number: int, row: Mapping[str, Any]) -> tuple[list[tuple[str, bool]], dict[str, str]]:
        """The rendered chat, cut where what is learned begins and ends, and what is hidden in it (`hide_special`)."""
        fmt = self._format
        if self._has_messages:
            messages = read_messages(number, row, fmt)
        else:
            messages = [{"role": "system", "content": fmt.system_prompt}] if fmt.system_prompt else []
            for role, column in (("user", fmt.prompt_key), ("assistant", fmt.response_key)):
                messages.append({"role": role, "content": _text(number, row, column)})
        column = fmt.tools_key
        value = row.get(column)
        try:
            tools = json.loads(value) if isinstance(value, str) and value else value or None
        except ValueError as error:
            raise DataError(f"row {number}: column {column!r} is no JSON: {error}") from error
        if tools is not None and not isinstance(tools, list):
            raise DataError(
                f"row {number}: column {column!r} holds {type(tools).__name__}, a list of JSON schemas is needed"
            )

        (messages, tools), hidden = hide_special(self._tokenizer, (messages, tools))

        def render(messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
            more = {} if tools is None else {"tools": tools}
            return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, **more, **options))

        if fmt.enable_concatenated_multi_turn:
            learned = [place for place, message in enumerate(messages) if place and message["role"] == "assistant"]
        else:
            learned = [len(messages) - 1]
        # The chat is rendered again up to each answer, and the difference of two renderings is what lies between them.
        whole = render(messages)
        pieces: list[tuple[str, bool]] = []
        done = ""
        for place in learned:
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


def read_messages(number: int, row: Mapping[str, Any], fmt: FormatConfig) -> list[dict[str, Any]]:
    """The chat of a row. Raises: DataError: it is none, or holds no answer of the assistant to learn."""
    where, value = f"row {number}: column {fmt.messages_key!r}", row[fmt.messages_key]
    try:
        messages = parse_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"{where} is no JSON: {error}") from error
    if not isinstance(messages, list | tuple | np.ndarray) or not all(isinstance(m, Mapping) for m in messages):
        raise DataError(f"{where} is no list of messages {{role, content}}")
    messages = [dict(message) for message in messages]
    for message in messages:
        if not isinstance(message.get("role"), str) or isinstance(message.get("content"), int | float):
            raise DataError(f"{where} has the message {str(message)[:80]}, which is not {{role: text, content: text}}")
    # Answers at place 0 answer nothing. Unless all answers are trained, the last message must be one: it is the row's
    # response.
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not any(answers) or not (fmt.enable_concatenated_multi_turn or answers[-1] == len(messages) - 1):
        raise DataError(f"{where} does not end with an answer of the assistant to a prompt: there is nothing to learn")
    return messages


class PreferenceRows:
    """Tokenizes rows of {prompt, chosen, rejected} on demand, each as two sequences, the better response first.

    Invariant: reading n rows gives 2 n sequences, those of a row next to each other.

    Example: PreferenceRows(dataset, tokenizer, FormatConfig(), 2048).read([3]) gives [chosen row, rejected row]
    """

    sequences_per_row = 2

    def __init__(self, dataset: Dataset, tokenizer: Tokenizer, fmt: FormatConfig, max_tokens: int) -> None:
        """`fmt` says how prompt and response are joined. Raises: DataError: a column is missing."""
        # The whole chat of a row would leave no place for a second response: prompt and responses have columns.
        self._sides = [
            SftRows(dataset, tokenizer, fmt.model_copy(update={"messages_key": "", "response_key": key}), max_tokens)
            for key in (fmt.chosen_key, fmt.rejected_key)
        ]

    def read(self, numbers: Sequence[int]) -> list[Row]:
        """Tokenize two sequences of each of these rows. Raises: DataError: a row has no text where the format says."""
        return [row for number in numbers for side in self._sides for row in side.read([number])]


class LabeledRows:
    """Tokenizes rows of {prompt, response, label} on demand; or, of a dataset without labels, pairs, each as a
    desirable and an undesirable response.

    Example: LabeledRows(dataset, tokenizer, FormatConfig(), 2048).read([3]) gives [(tokens, prompt length, None, 1.0)]
    """

    def __init__(self, dataset: Dataset, tokenizer: Tokenizer, fmt: FormatConfig, max_tokens: int) -> None:
        """`fmt` says how prompt and response are joined. Raises: DataError: a column is missing."""
        self._dataset, self._label_key = dataset, fmt.label_key
        self._rows: SftRows | PreferenceRows
        if fmt.label_key in dataset.columns:
            alone = fmt.model_copy(update={"messages_key": ""})  # a whole chat does not say which answer is meant
            self._rows = SftRows(dataset, tokenizer, alone, max_tokens)
        else:
            self._rows = PreferenceRows(dataset, tokenizer, fmt, max_tokens)
        self.sequences_per_row = self._rows.sequences_per_row

    def read(self, numbers: Sequence[int]) -> list[LabeledRow]:
        """Tokenize the rows of these numbers. Raises: DataError: a row has no text, or a label that is no verdict."""
        rows = self._rows.read(numbers)
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
        _check_column(dataset, self._key, "prompt_key")
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens

    def read(self, numbers: Sequence[int]) -> list[Row]:
        """Tokenize the rows of these numbers. Raises: DataError: a row has no text, or too little to learn from."""
        rows: list[Row] = []
        for number in numbers:
            tokens = self._tokenizer.encode(_text(number, self._dataset[number], self._key), add_special_tokens=False)
            if self._tokenizer.eos_token_id is not None:
                tokens = [*tokens, self._tokenizer.eos_token_id]
            tokens = tokens[: self._max_tokens]
            if len(tokens) < 2:
                raise DataError(f"row {number}: column {self._key!r} has {len(tokens)} tokens; two are the least")
            rows.append((tokens, 1, None))
        return rows


def _check_column(dataset: Dataset, column: str, option: str) -> None:
    if column not in dataset.columns:
        raise DataError(
            f"the dataset has no column {column!r}; columns: {', '.join(dataset.columns)} (set format.{option})"
        )


def _text(number: int, row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise DataError(f"row {number}: column {column!r} holds {type(value).__name__}, text is needed")
    return value
