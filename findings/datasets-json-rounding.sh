#!/usr/bin/env bash
# Expected: numbers that to_json writes are the numbers that load_dataset reads.
# Happens:  datasets writes JSON with pandas, which rounds to ten decimals by default. Ten decimals are not ten digits:
#           a log probability of -1.2e-11 becomes -0.0, and a learning rate of 3.333333333333333e-07 becomes 3.333e-07.
#           to_csv and to_parquet keep all digits.
# Hurts:    datasets that store log probabilities or hyperparameters: ratios of small numbers change, and a check for 0
#           finds it. Values near 1 keep ten digits, so the file looks right.
# Seen:     datasets 5.2.0 with pandas 3.1.1, November 2026; to_json(path, double_precision=15) also has 15 decimals
#           only.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "datasets==5.2.0" "pandas==3.1.1" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import pathlib

import datasets
import pandas

datasets.disable_progress_bars()
row = {"logprob": -1.23456789e-11, "rate": 1e-6 / 3, "loss": 1 / 3}
table = datasets.Dataset.from_list([row])
table.to_json("rows.jsonl")
table.to_json("precise.jsonl", double_precision=15)
table.to_csv("rows.csv")
default, precise = (json.loads(pathlib.Path(name).read_text()) for name in ("rows.jsonl", "precise.jsonl"))
csv = {name: float(text) for name, text in zip(*(line.split(",") for line in open("rows.csv")))}
print("datasets", datasets.__version__, "pandas", pandas.__version__)
print("row:                 ", row)
print("to_json:             ", default)
print("double_precision=15: ", precise)
print("to_csv:              ", list(csv.values()))
assert default == {"logprob": -0.0, "rate": 3.333e-07, "loss": 0.3333333333}
assert precise["logprob"] != row["logprob"] and abs(precise["logprob"] / row["logprob"] - 1) > 1e-6
assert list(csv.values()) == list(row.values())
PYTHON
