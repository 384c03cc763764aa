#!/usr/bin/env bash
# Expected: rm of the name that ls returned removes that file, and cat returns its content.
# Happens:  these calls also accept patterns, and take brackets for one even if a file has exactly that name. rm of
#           "run[1].json" removes "run1.json" and keeps the file it was called with. cat returns the content of
#           "run1.json". cat_file, rm_file and info use the name as it is.
# Hurts:    names made of settings, such as "layers=[1,2]": cleaning up removes files of another run. The local file
#           system has an rm of its own that removes the right file, but its cat returns the wrong one.
# Seen:     fsspec 2026.9.0, November 2026; the rm of the memory file system is the one that most others inherit.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "fsspec==2026.9.0" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import os

import fsspec

print("fsspec", fsspec.__version__)
left = {}
for protocol in ("memory", "file"):
    files = fsspec.filesystem(protocol)
    folder = f"{os.getcwd()}/{protocol}"
    files.mkdir(folder)
    for name in ("run[1].json", "run1.json"):
        files.pipe_file(f"{folder}/{name}", name.encode())
    path = f"{folder}/run[1].json"
    contents = [data.decode() for data in files.cat(path).values()]
    exact = files.cat_file(path).decode()
    files.rm(path)
    left[protocol] = [os.path.basename(path) for path in files.ls(folder, detail=False)]
    print(f"{protocol}: cat reads {contents}, cat_file {exact!r}; after rm {left[protocol]}")
    assert contents == ["run1.json"] and exact == "run[1].json"
assert left == {"memory": ["run[1].json"], "file": ["run1.json"]}
PYTHON
