#!/usr/bin/env bash
# Expected: JSON distinguishes strings and numbers, so read_json returns strings as strings and numbers as numbers.
# Happens:  pandas converts a column of strings to numbers if all of them can be read as numbers: "007" is 7 and "1.50"
#           is 1.5. It also converts numbers to dates by the name of their column: one that ends in _time or _at, if all
#           its values are above 31,536,000.
# Hurts:    answers, codes and task names that consist of digits, and durations in microseconds or nanoseconds: a column
#           "step_time" of 40 seconds in microseconds holds days in 1971.
# Seen:     pandas 3.1.1, November 2026; dtype=False keeps both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "pandas==3.1.1" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import pathlib

import pandas as pd

rows = [{"answer": "007", "step_time": 40_000_000}, {"answer": "1.50", "step_time": 50_000_000}]
pathlib.Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
by_default = pd.read_json("rows.jsonl", lines=True)
kept = pd.read_json("rows.jsonl", lines=True, dtype=False)
print("pandas", pd.__version__)
print("in the file:", rows)
print("by default: ", by_default.to_dict("records"))
print("kept:       ", kept.to_dict("records"))
assert by_default["answer"].tolist() == [7.0, 1.5]
assert [str(time)[:10] for time in by_default["step_time"]] == ["1971-04-08", "1971-08-02"]
assert kept.to_dict("records") == rows
PYTHON
