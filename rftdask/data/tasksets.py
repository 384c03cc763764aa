"""Tasksets: rows of a dataset as tasks. This module knows the meaning of columns, but neither the order of tasks (see
task_schedule.py) nor what the named workflows and rewards do.

Invariant: `task(epoch, index)` depends only on its arguments and on the content of the dataset.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from rftdask.config import fill_from_environment
from rftdask.config.plugins import nearest
from rftdask.config.schema.buffer import FormatConfig, TasksetConfig
from rftdask.data.chats import read_chat, read_tools, text_size
from rftdask.data.datasets import Dataset, Say, find_bad_rows, open_dataset
from rftdask.data.images import ImageFolder, image_files, video_files
from rftdask.data.task import Task, final_answer
from rftdask.errors import DataError

log = logging.getLogger(__name__)

DEFAULT_WORKFLOW = "simple_workflow"
"""Workflow of tasks that name none."""
_JSON_CHAT = re.compile(r"\s*\[\s*\{")
_NUM_CHECKED_IMAGES = 16  # Rows with images or videos that `check` reads; these take long to decode.


class Taskset:
    """The tasks of one dataset.

    Example:
        taskset = Taskset(config.buffer.explorer_input.taskset)
        taskset.check()
        task = taskset.task(epoch=0, index=17)

    Raises: DataError: the dataset cannot be read.
    """

    def __init__(self, config: TasksetConfig, dataset: Dataset | None = None) -> None:
        """dataset: used instead of the one that `config` names."""
        self._config = config
        self._format = config.format
        self.dataset = dataset or open_dataset(
            config.path,
            split=config.split,
            subset_name=config.subset_name,
            dataset_args=config.dataset_args,
            table=config.table,
        )
        is_chat = self._format.prompt_type == "messages"
        self._has_messages = is_chat and self._format.messages_key in self.dataset.columns
        self._workflow = config.default_workflow_type or DEFAULT_WORKFLOW
        self._reward_fn = config.default_reward_fn_type or ""

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint

    def check(
        self, max_bad_rows: int = 0, check_prompt: Callable[[Task], None] | None = None, say: Say = log.info
    ) -> None:
        """Read the rows as tasks, as far as `find_bad_rows` does. A few bad rows are logged.

        check_prompt: tokenizes the prompt of a task, unless it has images. None: lengths are not checked.
        Raises: DataError: a configured column is missing, or more than `max_bad_rows` rows have unusable content.
        """
        keys = ["response_key", "system_prompt_key", "workflow_key", "reward_fn_key", "image_key", "video_key"]
        for option in keys if self._has_messages else ["prompt_key", *keys]:
            column = getattr(self._format, option)
            if column and column not in self.dataset.columns:
                raise DataError(self._missing(option, column))
        has_images = self._format.image_key or self._format.video_key
        count = min(len(self), _NUM_CHECKED_IMAGES) if has_images else len(self)
        name = f"taskset {self._config.name} ({self._config.path})"

        def read(index: int) -> int:
            task = self.task(0, index)
            return text_size((task.prompt, task.messages))

        tokenize = None if check_prompt is None or has_images else lambda index: check_prompt(self.task(0, index))
        num_bad, problem = find_bad_rows(name, count, read, tokenize, say)
        if num_bad > max_bad_rows:
            raise DataError(f"{problem}; fix the data, or raise buffer.max_bad_rows ({max_bad_rows})")
        if num_bad:
            log.warning("%s; all rollouts of such a task fail (buffer.max_bad_rows %d)", problem, max_bad_rows)

    def samples(self) -> list[Task]:
        """Return the first usable task of each workflow and reward function. Raises: as `task`: no row is usable."""
        first: dict[tuple[str, str], Task] = {}
        names_any = self._format.workflow_key or self._format.reward_fn_key
        problem: DataError | None = None
        for index in range(len(self)):
            try:
                row = self.dataset[index]
                workflow = _choice(row, self._format.workflow_key, self._workflow)
                key = workflow, _choice(row, self._format.reward_fn_key, self._reward_fn)
                if key not in first:
                    first[key] = self.task(0, index)
            except DataError as error:
                problem = problem or error
            if first and not names_any:
                break
        if not first and problem is not None:
            raise problem
        return list(first.values())

    def numbers(self, columns: Sequence[str]) -> list[list[float]]:
        """Return [N][len(columns)] numbers of each row. Raises: DataError: no such column, or not a finite number."""
        for column in columns:
            if column not in self.dataset.columns:
                raise DataError(self._missing("data_selector.feature_keys", column))
        rows: list[list[float]] = []
        for index in range(len(self)):
            row = self.dataset[index]
            rows.append([])
            for column in columns:
                cell = row.get(column)
                try:
                    # A bool is a number in Python, but a mistake in a column of difficulties.
                    value = float(cell) if not isinstance(cell, bool) else math.nan  # type: ignore[arg-type]
                except (TypeError, ValueError):
                    value = math.nan
                if not math.isfinite(value):
                    raise DataError(
                        f"{self._where(index)}: column {column!r} (data_selector.feature_keys) is {cell!r:.100}, "
                        "not a number"
                    )
                rows[-1].append(value)
        return rows

    def task_or_problem(self, epoch: int, index: int) -> Task:
        """Return `task`, or for a row that cannot be used a task with its `problem`."""
        try:
            return self.task(epoch, index)
        except DataError as error:
            return Task(self._config.name, epoch, index, workflow=self._workflow, problem=str(error))

    def task(self, epoch: int, index: int) -> Task:
        """Return the task of row `index`. Raises: DataError: the row lacks the prompt or the answer."""
        fmt, stored = self._format, self.dataset[index]
        row = dict(stored)
        option, key = ("messages_key", fmt.messages_key) if self._has_messages else ("prompt_key", fmt.prompt_key)
        value = self._cell(row, index, option, key)
        prompt = value if isinstance(value, str) and not self._is_json_chat(value) else ""
        messages: list[Mapping[str, Any]] = []
        if fmt.prompt_type != "messages" and not isinstance(value, str):
            kind = type(value).__name__
            raise DataError(f"{self._where(index)}: column {key!r} holds a {kind}, {fmt.prompt_type} needs text")
        for option in ("image_key", "video_key"):
            if column := getattr(fmt, option):
                row[column] = self._images(row, index, option)
        if fmt.prompt_type == "raw":
            prompt += fmt.reply_prefix or ""
        else:
            messages = self._chat(stored, key, row, f"{self._where(index)}: column {key!r}")
        return Task(
            taskset=self._config.name,
            epoch=epoch,
            index=index,
            prompt=prompt,
            messages=tuple(messages),
            truth=self._truth(row, index) if fmt.response_key else "",
            workflow=_choice(row, fmt.workflow_key, self._workflow),
            reward_fn=_choice(row, fmt.reward_fn_key, self._reward_fn),
            workflow_args=fill_from_environment(self._config.workflow_args),
            reward_fn_args=fill_from_environment(self._config.reward_fn_args),
            row=row,
            tools=tuple(read_tools(stored, fmt.tools_key, f"{self._where(index)}: column {fmt.tools_key!r}") or ()),
        )

    def _images(self, row: Mapping[str, Any], index: int, option: str) -> list[str]:
        """Store the files of the row's images or videos on this machine; return their names. Raises: DataError."""
        base = self._config.path if os.path.isdir(self._config.path) else os.path.dirname(self._config.path)
        column = getattr(self._format, option)
        try:
            files = (video_files if option == "video_key" else image_files)(row.get(column), base)
        except DataError as error:
            raise DataError(f"{self._where(index)}: column {column!r} (format.{option}): {error}") from error
        folder = ImageFolder()
        return [folder.put(file) for file in files]

    def _chat(
        self, stored: Mapping[str, Any], column: str, row: Mapping[str, Any], where: str
    ) -> list[Mapping[str, Any]]:
        """Return a text or a chat as messages, with the system prompt before and the reply prefix after it.

        row: `stored` with the names of images and videos instead of their files.
        """
        fmt, value = self._format, stored[column]
        is_text = isinstance(value, str) and not self._is_json_chat(value)
        chat = [{"role": "user", "content": value}] if is_text else read_chat(stored, column, where)
        end = [{"role": "assistant", "content": fmt.reply_prefix}] if fmt.reply_prefix else []
        if fmt.image_key:
            _show_images(chat, row[fmt.image_key], "image", where)
        if fmt.video_key:
            _show_images(chat, row[fmt.video_key], "video", where)
        return [*with_system_prompt(chat, row, fmt), *end]

    def _is_json_chat(self, value: str) -> bool:
        """True for the JSON text of a chat. A column of chats may also have texts of one message."""
        return self._has_messages and _JSON_CHAT.match(value) is not None

    def _truth(self, row: Mapping[str, Any], index: int) -> str:
        answer = self._cell(row, index, "response_key", self._format.response_key)
        try:
            return truth_text(answer)
        except DataError as error:
            column = f"column {self._format.response_key!r} (format.response_key)"
            raise DataError(f"{self._where(index)}: {column} {error}") from error

    def _cell(self, row: Mapping[str, Any], index: int, option: str, column: str) -> Any:
        if column not in row:
            raise DataError(f"{self._where(index)}: {self._missing(option, column)}")
        if row[column] is None:
            raise DataError(f"{self._where(index)}: column {column!r} (format.{option}) is empty")
        return row[column]

    def _where(self, index: int) -> str:
        return f"taskset {self._config.name} ({self._config.path}), row {index}"

    def _missing(self, option: str, column: str) -> str:
        columns = self.dataset.columns
        similar = nearest(column, columns, 1)
        hint = f"; nearest: {similar[0]!r}" if similar else ""
        key = option if "." in option else f"format.{option}"
        none = "" if option != "response_key" else ' (format.response_key: "" if there are no answers)'
        return (
            f"taskset {self._config.name} ({self._config.path}) has no column {column!r}, which {key} names{none}; "
            f"columns: {', '.join(columns)}{hint}"
        )


def _show_images(chat: list[dict[str, Any]], names: Sequence[str], kind: str, where: str) -> None:
    """Put the images or videos into the placeholders `{"type": kind}` of the chat.

    Without placeholders they go before the text of the first user message. Raises: DataError: the counts differ.
    """
    contents = [message["content"] for message in chat if isinstance(message.get("content"), list)]
    places = [part for content in contents for part in content if part.get("type") == kind]
    if not places and names:
        first = next((message for message in chat if message["role"] == "user"), chat[0])
        text = first["content"] if isinstance(first["content"], list) else [{"type": "text", "text": first["content"]}]
        places = [{"type": kind} for _ in names]
        first["content"] = [*places, *text]
    if len(places) != len(names):
        raise DataError(f"{where} has places for {len(places)} {kind}s, and there are {len(names)}")
    for part, name in zip(places, names, strict=True):
        part[kind] = name


def with_system_prompt(
    messages: Sequence[dict[str, Any]], row: Mapping[str, Any], fmt: FormatConfig
) -> list[dict[str, Any]]:
    """Prepend the system prompt of the row, or else of the format, unless the chat begins with a system message."""
    system = _choice(row, fmt.system_prompt_key or "", fmt.system_prompt or "")
    # No empty system message: some templates would render it, and others would replace it by their own.
    begin = [{"role": "system", "content": system}] if system and messages[0]["role"] != "system" else []
    return [*begin, *messages]


def _choice(row: Mapping[str, Any], column: str, default: str) -> str:
    if not column or not (value := row.get(column)):
        return default
    try:
        return _text(value)
    except DataError as error:
        raise DataError(f"column {column!r} {error}") from error


def truth_text(answer: Any) -> str:
    """Return a reference answer as text, which is "72" for "48+24 = 72\\n#### 72", "72", 72, 72.0 and b"72".

    Numbers are as people write them, without an exponent or zeros at the end. A list or an object is JSON.
    Raises: DataError: bytes that are not UTF-8.
    """
    if isinstance(answer, list | dict):
        return json.dumps(answer, default=_text)
    return final_answer(_text(answer)) if isinstance(answer, str | bytes) else _text(answer)


def _text(value: Any) -> str:
    """Return a value as text. Raises: DataError: bytes that are not UTF-8."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"holds bytes that are not UTF-8: {value!r:.60}; store text") from error
    if isinstance(value, float | Decimal | np.floating) and math.isfinite(value):
        text = format(Decimal(str(value or 0)), "f")
        return text.rstrip("0").rstrip(".") if "." in text else text
    return str(value)
