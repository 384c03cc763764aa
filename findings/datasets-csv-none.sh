#!/usr/bin/env bash
# Expected: a column of answers in a CSV file keeps its text; only an empty field may become null.
# Happens:  the CSV reader of datasets uses pandas, which reads a list of words as missing values. The answers None, NA,
#           N/A, null and nan become null; "none" stays text. NA is also the country code of Namibia.
# Hurts:    multiple-choice questions with the option "None", and questions whose answer is a code. No response equals
#           null, so every reward of these questions is 0.
# Seen:     datasets 5.2.0 with pandas 3.1.1, November 2026; keep_default_na=False keeps the text.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "datasets==5.2.0" "pandas==3.1.1" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import pathlib

import datasets
import pandas

datasets.disable_progress_bars()
words = ["None", "NA", "N/A", "null", "nan", "none", "Paris"]
pathlib.Path("tasks.csv").write_text("question,answer\n" + "".join(f"Which?,{word}\n" for word in words))


def answers(**settings):
    table = datasets.load_dataset("csv", data_files="tasks.csv", cache_dir="cache", split="train", **settings)
    return table["answer"][:]


by_default, kept = answers(), answers(keep_default_na=False)
print("datasets", datasets.__version__, "pandas", pandas.__version__)
print("in the file:          ", words)
print("by default:           ", by_default)
print("keep_default_na=False:", kept)
assert by_default == [None] * 5 + ["none", "Paris"]
assert kept == words
PYTHON
