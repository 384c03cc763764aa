"""Tasksets: rows of a dataset as tasks. This module knows which column means what; it knows neither the order in which
tasks are run (see schedule.py) nor what the named workflows and rewards do.

Invariant: `task(epoch, index)` is a function of its arguments and of the dataset's content alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rftdask.config.schema.buffer import TasksetConfig
from rftdask.data.datasets import Dataset, nearest, open_dataset
from rftdask.data.task import Task, final_answer
from rftdask.errors import DataError

_NUM_CHECKED_ROWS = 16


@dataclass(frozen=True)
class TasksetSpec:
    """Where a taskset comes from and what its columns mean; the values of one `taskset` of the configuration.

    Example: TasksetSpec(name="gsm8k", path="data/gsm8k", prompt_key="question", response_key="answer")
    """

    name: str
    path: str
    split: str = "train"
    subset_name: str | None = None
    dataset_args: Mapping[str, Any] = field(default_factory=dict)
    table: str | None = None
    """Table of the database at `path`. None: it is no database."""
    prompt_type: Literal["messages", "plaintext"] = "messages"
    """messages: tasks are chats; plaintext: the policy continues the prompt as it is."""
    prompt_key: str = "prompt"
    """Column of the prompt: text, or a chat."""
    response_key: str = "response"
    """Column of the true answer; "" if the taskset has none."""
    messages_key: str = "message"
    """Column of a chat, a list of {role, content}; used in place of `prompt_key` when the dataset has it."""
    system_prompt: str | None = None
    system_prompt_key: str | None = None
    """Column of a system prompt; it wins over `system_prompt`. A chat that brings its own keeps it."""
    reply_prefix: str | None = None
    """What the reply begins with; it is part of the prompt."""
    workflow: str = "simple_workflow"
    workflow_key: str = ""
    """Column naming the workflow of a row; "" or an empty cell: `workflow`."""
    reward_fn: str = ""
    reward_fn_key: str = ""
    """Column naming the reward function of a row; "" or an empty cell: `reward_fn`."""
    workflow_args: Mapping[str, Any] = field(default_factory=dict)
    reward_fn_args: Mapping[str, Any] = field(default_factory=dict)


def taskset_spec(config: TasksetConfig) -> TasksetSpec:
    """The values of one taskset, defaults of its workflow and reward filled in."""
    fmt = config.format
    return TasksetSpec(
        name=config.name,
        path=config.path,
        split=config.split,
        subset_name=config.subset_name,
        dataset_args=config.dataset_args,
        table=config.table,
        prompt_type=fmt.prompt_type,
        prompt_key=fmt.prompt_key,
        response_key=fmt.response_key,
        messages_key=fmt.messages_key,
        system_prompt=fmt.system_prompt,
        system_prompt_key=fmt.system_prompt_key,
        reply_prefix=fmt.reply_prefix,
        workflow=config.default_workflow_type or "simple_workflow",
        workflow_key=fmt.workflow_key,
        reward_fn=config.default_reward_fn_type or "",
        reward_fn_key=fmt.reward_fn_key,
        workflow_args=config.workflow_args,
        reward_fn_args=config.reward_fn_args,
    )


class Taskset:
    """The tasks of one dataset.

    Example:
        taskset = Taskset(spec)
        taskset.check()
        task = taskset.task(epoch=0, index=17)

    Raises: DataError: the dataset cannot be read.
    """

    def __init__(self, spec: TasksetSpec, dataset: Dataset | None = None) -> None:
        self.spec = spec
        self.dataset = dataset or open_dataset(
            spec.path,
            split=spec.split,
            subset_name=spec.subset_name,
            dataset_args=spec.dataset_args,
            table=spec.table,
        )

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def fingerprint(self) -> str:
        """Content hash of the dataset."""
        return self.dataset.fingerprint

    def check(self) -> None:
        """Read the first rows as tasks. Raises: DataError: a configured column is missing or holds something else."""
        spec = self.spec
        keys = {
            "response_key": spec.response_key,
            "system_prompt_key": spec.system_prompt_key,
            "workflow_key": spec.workflow_key,
            "reward_fn_key": spec.reward_fn_key,
        }
        if not self._has_messages:
            keys = {"prompt_key": spec.prompt_key, **keys}
        for option, column in keys.items():
            if column and column not in self.dataset.columns:
                raise DataError(self._missing(option, column))
        for index in range(min(len(self), _NUM_CHECKED_ROWS)):
            self.task(0, index)

    def plugins(self) -> tuple[set[str], set[str]]:
        """Names of all workflows and of all reward functions of the tasks; reads every row only if rows name them."""
        workflows, rewards = {self.spec.workflow}, {self.spec.reward_fn}
        if self.spec.workflow_key or self.spec.reward_fn_key:
            rows = [self.dataset[index] for index in range(len(self))]
            workflows = {self._choice(row, self.spec.workflow_key, self.spec.workflow) for row in rows}
            rewards = {self._choice(row, self.spec.reward_fn_key, self.spec.reward_fn) for row in rows}
        return workflows, rewards - {""}

    def numbers(self, columns: Sequence[str]) -> list[list[float]]:
        """[N][len(columns)], what the columns hold in each row. Raises: DataError: a column is missing, or a cell is no
        finite number.
        """
        for column in columns:
            if column not in self.dataset.columns:
                raise DataError(self._missing("data_selector.feature_keys", column))
        return [[self._number(index, column) for column in columns] for index in range(len(self))]

    def _number(self, index: int, column: str) -> float:
        cell = self.dataset[index].get(column)
        try:
            value = float(cell) if not isinstance(cell, bool) else math.nan  # type: ignore[arg-type]
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise DataError(
                f"{self._where(index)}: column {column!r} (data_selector.feature_keys) is {cell!r:.100}, not a number"
            )
        return value

    def task(self, epoch: int, index: int) -> Task:
        """The task of row `index`. Raises: DataError: the row lacks the prompt or the answer."""
        spec = self.spec
        row = self.dataset[index]
        prompt, messages = self._prompt(row, index)
        return Task(
            taskset=spec.name,
            epoch=epoch,
            index=index,
            prompt=prompt,
            messages=messages,
            truth=truth_text(self._cell(row, index, "response_key", spec.response_key)) if spec.response_key else "",
            workflow=self._choice(row, spec.workflow_key, spec.workflow),
            reward_fn=self._choice(row, spec.reward_fn_key, spec.reward_fn),
            workflow_args=spec.workflow_args,
            reward_fn_args=spec.reward_fn_args,
            row=row,
        )

    @property
    def _has_messages(self) -> bool:
        return self.spec.prompt_type == "messages" and self.spec.messages_key in self.dataset.columns

    def _prompt(self, row: Mapping[str, Any], index: int) -> tuple[str, tuple[Mapping[str, Any], ...]]:
        spec = self.spec
        option, key = ("messages_key", spec.messages_key) if self._has_messages else ("prompt_key", spec.prompt_key)
        value = self._cell(row, index, option, key)
        if spec.prompt_type == "plaintext":
            if not isinstance(value, str):
                raise DataError(
                    f"{self._where(index)}: column {key!r} holds a {type(value).__name__}, plaintext needs text"
                )
            return value + (spec.reply_prefix or ""), ()
        if isinstance(value, str):
            return value, self._with_frame([{"role": "user", "content": value}], row)
        if not _is_chat(value):
            raise DataError(
                f"{self._where(index)}: column {key!r} is neither text nor a chat [{{role, content}}]: {value!r:.100}"
            )
        return "", self._with_frame([dict(message) for message in value], row)

    def _with_frame(self, messages: list[dict[str, Any]], row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
        """The chat with its system prompt before and its reply prefix after."""
        spec = self.spec
        system = self._choice(row, spec.system_prompt_key or "", spec.system_prompt or "")
        if system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        if spec.reply_prefix:
            messages = [*messages, {"role": "assistant", "content": spec.reply_prefix}]
        return tuple(messages)

    def _cell(self, row: Mapping[str, Any], index: int, option: str, column: str) -> Any:
        if column not in row:
            raise DataError(f"{self._where(index)}: {self._missing(option, column)}")
        if row[column] is None:
            raise DataError(f"{self._where(index)}: column {column!r} (format.{option}) is empty")
        return row[column]

    @staticmethod
    def _choice(row: Mapping[str, Any], column: str, default: str) -> str:
        return str(row.get(column) or default) if column else default

    def _where(self, index: int) -> str:
        return f"taskset {self.spec.name} ({self.spec.path}), row {index}"

    def _missing(self, option: str, column: str) -> str:
        columns = self.dataset.columns
        similar = nearest(column, columns, 1)
        hint = f"; nearest: {similar[0]!r}" if similar else ""
        key = option if "." in option else f"format.{option}"
        none = "" if option != "response_key" else ' (format.response_key: "" if there are no answers)'
        return (
            f"taskset {self.spec.name} ({self.spec.path}) has no column {column!r}, which {key} names{none}; "
            f"columns: {', '.join(columns)}{hint}"
        )


def truth_text(answer: Any) -> str:
    """A reference answer as text: "72" of "48+24 = 72\\n#### 72", of "72" and of 72; JSON of a list or an object."""
    if not isinstance(answer, str):
        return json.dumps(answer, default=str) if isinstance(answer, (list, dict)) else str(answer)
    return final_answer(answer)


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(isinstance(message, Mapping) and {"role", "content"} <= set(message) for message in value)
    )
