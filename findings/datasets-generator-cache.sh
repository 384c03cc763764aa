#!/usr/bin/env bash
# Expected: Dataset.from_generator calls the generator and returns its rows.
# Happens:  the rows are cached under a hash of the function and its arguments. If the generator reads a file, the hash
#           does not include the file. After the file has changed, the next call returns the old rows without calling
#           the generator, also in a new process. There is no warning.
# Hurts:    scripts that build a dataset from a file: a corrected file changes nothing until the cache is deleted.
# Seen:     datasets 5.2.0, November 2026; load_dataset notices a changed file.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "datasets==5.2.0" || exit 75
cd "$folder"
cat >build.py <<'PYTHON'
import datasets

datasets.disable_progress_bars()


def rows():
    print("the generator runs")
    with open("rows.txt") as file:
        for line in file:
            yield {"text": line.strip()}


print("from_generator:", datasets.Dataset.from_generator(rows, cache_dir="cache")["text"][:])
loaded = datasets.load_dataset("text", data_files="rows.txt", cache_dir="cache", split="train")
print("load_dataset:", loaded["text"][:])
PYTHON
venv/bin/python - <<'PYTHON'
import importlib.metadata
import pathlib
import subprocess
import sys


def build(*lines):
    pathlib.Path("rows.txt").write_text("".join(f"{line}\n" for line in lines))
    return subprocess.run([sys.executable, "build.py"], check=True, stdout=subprocess.PIPE, text=True).stdout


first, second = build("a", "b"), build("a", "corrected", "added")
print("datasets", importlib.metadata.version("datasets"))
print(f"{first}-- the file changes\n{second}", end="")
assert "the generator runs" in first and "from_generator: ['a', 'b']" in first
assert "the generator runs" not in second and "from_generator: ['a', 'b']" in second
assert "load_dataset: ['a', 'corrected', 'added']" in second
PYTHON
