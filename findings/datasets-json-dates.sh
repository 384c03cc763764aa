#!/usr/bin/env bash
# Expected: a column of strings in a JSON lines file stays a column of strings.
# Happens:  if every string looks like a date, the JSON reader of datasets makes it a timestamp. The text of the answer
#           is then "2024-05-01 00:00:00", which no response equals.
# Hurts:    training on questions whose answers are dates; every reward is 0 and nothing warns. One answer of another
#           form in the file ("May 1") keeps all of them strings, so a small sample may look right.
# Seen:     datasets 5.2.0 with pyarrow 26.0.1, November 2026.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "datasets==5.2.0" "pyarrow==26.0.1" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import pathlib

import datasets

datasets.disable_progress_bars()


def answers(*values):
    path = pathlib.Path(f"{len(list(pathlib.Path().glob('*.jsonl')))}.jsonl")
    path.write_text("".join(json.dumps({"question": "When?", "answer": value}) + "\n" for value in values))
    table = datasets.load_dataset("json", data_files=str(path), cache_dir="cache", split="train")
    return [str(row["answer"]) for row in table]

print("datasets", datasets.__version__)
dates = answers("2024-05-01", "1999-12-31")
mixed = answers("2024-05-01", "May 1")
print("all dates:  ", dates)
print("one is not: ", mixed)
assert dates == ["2024-05-01 00:00:00", "1999-12-31 00:00:00"]
assert mixed == ["2024-05-01", "May 1"]
PYTHON
