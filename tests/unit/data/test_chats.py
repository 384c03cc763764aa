"""Promises of chats: tasks and supervised rows read the same messages and tools, and nulls are read by their source."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rftdask.config.schema.buffer import FormatConfig, TasksetConfig
from rftdask.data.chats import read_tools
from rftdask.data.datasets import Dataset, RowsDataset, open_dataset
from rftdask.data.supervised import read_examples
from rftdask.data.tasksets import Taskset
from rftdask.errors import DataError

CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Rain?"}, {"type": "image", "image": "a"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "rain", "arguments": {"city": "Oslo"}}},
            {"type": "function", "function": {"name": "clock", "arguments": {"zone": 1}}},
        ],
    },
    {"role": "tool", "content": [{"type": "text", "text": "no"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "No."}]},
]
TOOLS = [
    {"name": "rain", "parameters": {"city": {"type": "string"}}},
    {"name": "clock", "parameters": {"zone": {"type": "integer"}}},
]


def both(dataset: Dataset) -> list[dict[str, Any]]:
    """The chat of row 0 as a task and as a supervised row have it, which are equal."""
    fmt = FormatConfig(messages_key="chat", response_key="")
    task = Taskset(TasksetConfig(name="t", path="t.jsonl", format=fmt), dataset).task(0, 0)
    [example] = read_examples("sft", 0, dataset[0], fmt)
    assert list(task.messages) == list(example.messages) and task.prompt == ""
    return [dict(message) for message in task.messages]


@pytest.mark.parametrize("library", ["pyarrow", "datasets"])
def test_nulls_that_arrow_made_are_not_in_chats(library: str, tmp_path: Path) -> None:
    table = pa.Table.from_pylist([{"chat": CHAT, "tools": TOOLS}])
    assert table["chat"][0].as_py() != CHAT, "Arrow has all keys in each message"
    path = tmp_path / "rows.parquet"
    if library == "pyarrow":
        pq.write_table(table, path)
    else:
        datasets.Dataset(table).save_to_disk(path)
    dataset = open_dataset(str(path))
    assert both(dataset) == CHAT
    assert read_tools(dataset[0], "tools", "row 0") == TOOLS


@pytest.mark.parametrize("as_text", [False, True])
def test_nulls_inside_json_stay(as_text: bool) -> None:
    call = {"type": "function", "id": None, "function": {"name": "rain", "arguments": {"city": None}}}
    chat = [
        {"role": "user", "content": "?", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    tools = [{"name": "rain", "parameters": {"city": {"enum": ["Oslo", None], "default": None}}}]
    row: dict[str, Any] = {"chat": chat, "tools": tools}
    if as_text:
        row = {column: json.dumps(value) for column, value in row.items()}
    messages = both(RowsDataset([[row]], "f"))
    assert messages == [{"role": "user", "content": "?"}, chat[1]], "a null field of a message is a missing one"
    assert read_tools(row, "tools", "row 0") == tools


def test_nulls_in_json_text_of_a_table_stay(tmp_path: Path) -> None:
    call = {"function": {"name": "rain", "arguments": {"city": None}}}
    chat = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    pq.write_table(pa.Table.from_pylist([{"chat": json.dumps(chat)}]), tmp_path / "rows.parquet")
    assert both(open_dataset(str(tmp_path / "rows.parquet"))) == chat


@pytest.mark.parametrize(
    ("text", "arguments"),
    [('{"city": "Oslo"}', {"city": "Oslo"}), ('{"city": null}', {"city": None}), ("", {}), ("{city", "{city")],
)
def test_arguments_of_calls_are_read_from_their_text(text: str, arguments: Any) -> None:
    question = {"role": "user", "content": "?"}

    def asked(value: Any) -> list[dict[str, Any]]:
        calls = [{"type": "function", "id": "1", "function": {"name": "rain", "arguments": value}}]
        bare = [{"name": "rain", "arguments": value}]
        return [question, *({"role": "assistant", "content": "", "tool_calls": c} for c in (calls, bare))]

    assert both(RowsDataset([[{"chat": asked(text)}]], "f")) == asked(arguments)


def test_a_chat_that_cannot_be_read_is_refused() -> None:
    for chat, problem in (
        ('[{"role": "user"', "is not valid JSON"),
        ('[{"content": "?"}]', "has the message"),
        ([{"role": "user", "content": b"?"}], "has the message"),
        ([], "is not a list of messages"),
    ):
        with pytest.raises(DataError, match=problem):
            both(RowsDataset([[{"chat": chat}]], "f"))


def test_reading_a_chat_leaves_its_row_unchanged() -> None:
    row = {"chat": json.loads(json.dumps(CHAT))}
    both(RowsDataset([[row]], "f"))[0]["content"].append("more")
    assert row == {"chat": CHAT}
