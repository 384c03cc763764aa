"""Supervised rows: a dataset's prompts and responses as tokens to imitate. It knows no storage and no batches."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rftdask.buffer.datasets import Dataset
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
        prompt, whole = self._texts(number, row)
        prompt_tokens = self._tokenizer.encode(prompt, add_special_tokens=False)
        response_tokens = self._tokenizer.encode(whole[len(prompt) :], add_special_tokens=False)
        if not self._is_chat() and self._tokenizer.eos_token_id is not None:
            response_tokens.append(self._tokenizer.eos_token_id)
        tokens = (prompt_tokens + response_tokens)[: self._format.max_tokens]
        if len(tokens) <= len(prompt_tokens):
            raise DataError(
                f"row {number}: the prompt alone has {len(prompt_tokens)} tokens, nothing of the response fits in "
                f"{self._format.max_tokens} (model.max_model_len)"
            )
        return tokens, len(prompt_tokens), None

    def _texts(self, number: int, row: Mapping[str, Any]) -> tuple[str, str]:
        """(prompt, prompt + response) as they are tokenized."""
        if not self._is_chat():
            prompt, response = (
                self._text(number, row, self._format.prompt_key),
                self._text(number, row, self._format.response_key),
            )
            return prompt, prompt + response
        messages = self._messages(number, row)
        prompt = self._tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
        whole = self._tokenizer.apply_chat_template(messages, tokenize=False)
        if not whole.startswith(prompt):
            raise DataError(
                f"row {number}: the chat template renders the prompt differently once the answer follows, so "
                f"the tokens to "
                "learn cannot be told apart; use prompt_type plaintext or another template"
            )
        return prompt, whole

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
