"""Chats: the messages and tools of a row, read in the same way for tasks and for supervised rows.

Nulls are read by their source. A null field of a message means the same as a missing one, as in OpenAI's API. Nulls
deeper inside are kept in JSON; `own_value` removes those that an Arrow table has made.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from rftdask.data.datasets import own_value
from rftdask.errors import DataError
from rftdask.storage.checked_json import parse_json, parse_portable

Message = dict[str, Any]


def read_chat(row: Mapping[str, Any], column: str, where: str) -> list[Message]:
    """Read a column that holds a list of messages or its JSON text.

    Args: where: the row and the column, for the error.
    Raises: DataError: it holds something else, or a message is not {role: text, content: text or parts}.
    """
    stored = row[column]
    stored = _parsed(stored, where) if isinstance(stored, str) else stored
    is_list = isinstance(stored, list | tuple | np.ndarray) and len(stored) > 0
    if not is_list or not all(isinstance(message, Mapping) for message in stored):
        raise DataError(f"{where} is not a list of messages {{role, content}}: {row[column]!r:.100}")
    for message in stored:
        if not isinstance(message.get("role"), str) or isinstance(message.get("content"), int | float | bytes):
            raise DataError(f"{where} has the message {str(message)[:80]}, which is not {{role: text, content: text}}")
    messages = stored if isinstance(row[column], str) else own_value(row, column)
    # Templates read the content of every message, even of a tool call, whose content is null.
    return [
        {key: None for key in whole if key == "content"} | _message(message)
        for whole, message in zip(stored, messages, strict=True)
    ]


def read_tools(row: Mapping[str, Any], column: str, where: str) -> list[Any] | None:
    """Read a column that holds a list of JSON schemas or its JSON text; None: it holds nothing.

    Raises: DataError: it holds something else.
    """
    value = own_value(row, column)
    # Tables store schemas as text, because tools have different fields.
    tools = _parsed(value, where) if isinstance(value, str) and value else value
    if isinstance(tools, np.ndarray):
        tools = tools.tolist()
    if tools is None or tools == "":
        return None
    if not isinstance(tools, list):
        raise DataError(f"{where} holds {type(tools).__name__}, not a list of JSON schemas")
    return [_copied(tool) for tool in tools] or None


def with_parsed_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the function of a tool call with its arguments as a value instead of JSON text.

    OpenAI's API has them as text, which templates would serialize again. Invalid JSON is kept.
    """
    function = dict(function)
    if isinstance(text := function.get("arguments"), str):
        with suppress(ValueError):
            function["arguments"] = parse_portable(text or "{}")
    return function


def text_size(value: Any) -> int:
    """Return the number of characters of the texts in a chat, or in other nested values."""
    if isinstance(value, str):
        return len(value)
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return sum(map(text_size, parts))


def _message(message: Mapping[str, Any]) -> Message:
    plain = {key: _copied(item) for key, item in message.items() if item is not None}
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_call(call) for call in plain["tool_calls"]]
    return plain


def _call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": with_parsed_arguments(call["function"])}
    return with_parsed_arguments(call)


def _parsed(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{where} is not valid JSON: {error}") from error


def _copied(value: Any) -> Any:
    """Copy a value, with arrays as lists."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list | tuple | np.ndarray) else value
