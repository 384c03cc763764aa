"""Supervised rows: a dataset's prompts and responses as tokens to imitate. It knows no storage and no batches."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rftdask.data.datasets import Dataset
from rftdask.errors import DataError

Row = tuple[Sequence[int], int, Sequence[bool] | None]
"""(tokens, prompt length, loss mask of the response or None for all of it)."""


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def apply_chat_template(self, messages: Any, **options: Any) -> Any: ...


@dataclass(frozen=True)
class SupervisedFormat:
    """Which column means what."""

    prompt_type: str
    """plaintext: prompt and response are joined as they are, an end token after; messages: through the chat template.
    """
    prompt_key: str
    response_key: str
    messages_key: str
    """Column of a whole chat whose last message is the response; used when the dataset has it."""
    system_prompt: str | None
    max_tokens: int
    """A longer sequence loses its end."""
    tools_key: str = "tools"
    """Column of the tools of a chat, a list of JSON schemas or its JSON text; used when the dataset has it."""
    all_turns: bool = False
    """Every assistant message of a chat is learned, not only the last."""


class SupervisedRows:
    """Tokenizes rows on demand.

    Example: SupervisedRows(dataset, tokenizer, fmt).read([3, 5])
    """

    def __init__(self, dataset: Dataset, tokenizer: Tokenizer, fmt: SupervisedFormat) -> None:
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._format = fmt
        self._has_messages = fmt.prompt_type == "messages" and fmt.messages_key in dataset.columns
        needed = [fmt.messages_key] if self._has_messages else [fmt.prompt_key, fmt.response_key]
        for column in needed:
            if column not in dataset.columns:
                raise DataError(
                    f"the dataset has no column {column!r}; columns: {', '.join(dataset.columns)} (set format.*_key)"
                )

    def read(self, numbers: Sequence[int]) -> list[Row]:
        """The rows of these numbers. Raises: DataError: a row has no text where the format says so."""
        return [self._tokenize(number, self._dataset[number]) for number in numbers]

    def _tokenize(self, number: int, row: Mapping[str, Any]) -> Row:
        tokens: list[int] = []
        learned: list[bool] = []
        for text, is_learned in self._segments(number, row):
            part = self._tokenizer.encode(text, add_special_tokens=False)
            tokens.extend(part)
            learned.extend([is_learned] * len(part))
        if not self._is_chat() and self._tokenizer.eos_token_id is not None:
            tokens.append(self._tokenizer.eos_token_id)
            learned.append(True)
        tokens, learned = tokens[: self._format.max_tokens], learned[: self._format.max_tokens]
        if not any(learned):
            raise DataError(
                f"row {number}: the prompt alone has {len(tokens)} tokens, nothing of the response fits in "
                f"{self._format.max_tokens} (model.max_model_len)"
            )
        prompt_length = learned.index(True)
        mask = learned[prompt_length:]
        return tokens, prompt_length, None if all(mask) else mask

    def _segments(self, number: int, row: Mapping[str, Any]) -> list[tuple[str, bool]]:
        """Pieces of the text, each tokenized by itself, and whether they are learned."""
        if not self._is_chat():
            keys = (self._format.prompt_key, self._format.response_key)
            prompt, response = (self._text(number, row, key) for key in keys)
            return [(prompt, False), (response, True)]
        messages = self._messages(number, row)
        tools = self._tools(number, row)
        whole = self._render(messages, tools)
        segments: list[tuple[str, bool]] = []
        done = ""
        for place in self._learned_places(number, messages):
            prompt = self._render(messages[:place], tools, add_generation_prompt=True)
            end = whole if place == len(messages) - 1 else self._render(messages[: place + 1], tools)
            if not (prompt.startswith(done) and end.startswith(prompt) and whole.startswith(end)):
                raise DataError(
                    f"row {number}: the chat template renders the prompt differently once the answer follows, so the "
                    "tokens to learn cannot be told apart; use prompt_type plaintext or another template"
                )
            segments += [(prompt[len(done) :], False), (end[len(prompt) :], True)]
            done = end
        return segments

    def _learned_places(self, number: int, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if not self._format.all_turns:
            return [len(messages) - 1]
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if not places:
            raise DataError(f"row {number}: the chat has no message of the assistant, so there is nothing to learn")
        return places

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, **options: Any) -> str:
        more = {} if tools is None else {"tools": tools}
        return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, **more, **options))

    def _tools(self, number: int, row: Mapping[str, Any]) -> list[Any] | None:
        """The tools of a row; None if it has none. Raises: DataError: the column holds something else."""
        value = row.get(self._format.tools_key)
        try:
            tools = json.loads(value) if isinstance(value, str) and value else value or None
        except ValueError as error:
            raise DataError(f"row {number}: column {self._format.tools_key!r} is no JSON: {error}") from error
        if tools is not None and not isinstance(tools, list):
            raise DataError(
                f"row {number}: column {self._format.tools_key!r} holds {type(tools).__name__}, a list of JSON schemas "
                "is needed"
            )
        return tools

    def _is_chat(self) -> bool:
        return self._format.prompt_type == "messages"

    def _messages(self, number: int, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        if self._has_messages:
            value = row[self._format.messages_key]
            return list(json.loads(value) if isinstance(value, str) else value)
        system = [{"role": "system", "content": self._format.system_prompt}] if self._format.system_prompt else []
        prompt, response = (
            self._text(number, row, self._format.prompt_key),
            self._text(number, row, self._format.response_key),
        )
        return [*system, {"role": "user", "content": prompt}, {"role": "assistant", "content": response}]

    @staticmethod
    def _text(number: int, row: Mapping[str, Any], column: str) -> str:
        value = row.get(column)
        if not isinstance(value, str):
            raise DataError(f"row {number}: column {column!r} holds {type(value).__name__}, text is needed")
        return value
