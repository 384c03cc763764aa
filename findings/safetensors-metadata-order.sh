#!/usr/bin/env bash
# Expected: saving the same tensors with the same metadata twice gives the same bytes.
# Happens:  the entries of the metadata are written in a random order that changes from process to process. With one
#           entry, such as that of transformers, the files are equal; with several they differ.
# Hurts:    caches, mirrors and checks that compare files by their hash: a checkpoint that nobody changed is stored and
#           sent again.
# Seen:     safetensors 0.8.0, November 2026.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "safetensors==0.8.0" "numpy" || exit 75
cd "$folder"
cat >hash.py <<'PYTHON'
import hashlib
import sys

import numpy
import safetensors.numpy

metadata = {f"key{number}": "value" for number in range(int(sys.argv[1]))}
print(hashlib.sha256(safetensors.numpy.save({"weight": numpy.zeros(4)}, metadata)).hexdigest())
PYTHON
venv/bin/python - <<'PYTHON'
import importlib.metadata
import subprocess
import sys


def num_hashes(num_entries):
    command = [sys.executable, "hash.py", str(num_entries)]
    return len({subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout for _ in range(5)})


seen = {entries: num_hashes(entries) for entries in (0, 1, 8)}
print("safetensors", importlib.metadata.version("safetensors"))
for entries, hashes in seen.items():
    print(f"five files with {entries} entries of metadata have {hashes} different hashes")
assert seen[0] == seen[1] == 1 and seen[8] > 1
PYTHON
