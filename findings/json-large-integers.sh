#!/usr/bin/env bash
# Expected: a parser of JSON returns an integer as an integer, or fails if it is too large.
# Happens:  json and msgspec return integers of any size. orjson, datasets and DuckDB return the nearest float for
#           integers beyond 64 bits, without a warning. pandas raises an error.
# Hurts:    answers of mathematical tasks, such as factorials and powers: 2**70 + 1 and 2**70 are the same answer, and
#           its text is 1.1805916207174113e+21, which no response equals.
# Seen:     orjson 3.13.0, msgspec 0.23.0, datasets 5.2.0, duckdb 2.0.0 and pandas 3.1.1, November 2026.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  "orjson==3.13.0" "msgspec==0.23.0" "datasets==5.2.0" "duckdb==2.0.0" "pandas==3.1.1" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import pathlib

import datasets
import duckdb
import msgspec
import orjson
import pandas as pd

datasets.disable_progress_bars()
number = 2**70 + 1
line = json.dumps({"answer": number})
pathlib.Path("tasks.jsonl").write_text(line + "\n")


def by_datasets():
    return datasets.load_dataset("json", data_files="tasks.jsonl", cache_dir="cache", split="train")[0]["answer"]


readers = {
    "json": lambda: json.loads(line)["answer"],
    "msgspec": lambda: msgspec.json.decode(line)["answer"],
    "orjson": lambda: orjson.loads(line)["answer"],
    "datasets": by_datasets,
    "duckdb": lambda: duckdb.sql("select answer from 'tasks.jsonl'").fetchall()[0][0],
    "pandas": lambda: pd.read_json("tasks.jsonl", lines=True)["answer"][0],
}
seen = {}
for name, read in readers.items():
    try:
        seen[name] = read()
    except ValueError as error:
        seen[name] = type(error)
    print(f"{name}: {seen[name]!r}")
assert all(seen[name] == number and isinstance(seen[name], int) for name in ("json", "msgspec"))
assert all(seen[name] == float(number) and isinstance(seen[name], float) for name in ("orjson", "datasets", "duckdb"))
assert seen["pandas"] is ValueError
PYTHON
