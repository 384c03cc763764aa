#!/usr/bin/env bash
# Expected: a row that goes into a dataset comes out equal, and two ways to load the same rows give the same rows.
# Happens:  Dataset.from_list gives the arguments of all tool calls one type with the fields of all tools. A call
#           add(a=1) is returned as add(a=1, city=None) if another row calls weather(city=...). load_dataset of the same
#           rows as JSON lines returns them unchanged.
# Hurts:    training on chats with tools: the template renders the nulls, and the model learns to call each tool with
#           the arguments of all others.
# Seen:     datasets 5.2.0, November 2026.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "datasets==5.2.0" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import pathlib

import datasets

datasets.disable_progress_bars()


def chat(tool, arguments):
    call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
    return {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}


def arguments_of(table):
    return [row["messages"][0]["tool_calls"][0]["function"]["arguments"] for row in table]


rows = [chat("add", {"a": 1}), chat("weather", {"city": "Oslo"})]
pathlib.Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
from_list = arguments_of(datasets.Dataset.from_list(rows))
from_file = arguments_of(datasets.load_dataset("json", data_files="chats.jsonl", cache_dir="cache", split="train"))
print("datasets", datasets.__version__)
print("rows:     ", arguments_of(rows))
print("from_list:", from_list)
print("from_file:", from_file)
assert from_list == [{"a": 1, "city": None}, {"a": None, "city": "Oslo"}]
assert from_file == arguments_of(rows)
PYTHON
