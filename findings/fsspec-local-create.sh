#!/usr/bin/env bash
# Expected: put_file and put with mode="create" raise FileExistsError if the target exists, on each file system.
# Happens:  the local file system accepts the argument and ignores it: the target is overwritten without an error. The
#           memory file system raises. pipe_file with mode="create" raises on both.
# Hurts:    programs that claim a name or publish a version by creating a file: their tests pass in memory, and in a
#           shared folder two writers both win.
# Seen:     fsspec 2026.9.0, November 2026.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "fsspec==2026.9.0" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import os
import pathlib

import fsspec

pathlib.Path("new").write_text("new")


def create(protocol, call):
    files = fsspec.filesystem(protocol)
    target = f"{os.getcwd()}/target"
    files.pipe_file(target, b"old")
    try:
        if call == "pipe_file":
            files.pipe_file(target, b"new", mode="create")
        else:
            getattr(files, call)(os.path.abspath("new"), target, mode="create")
        error = "no error"
    except FileExistsError as raised:
        error = type(raised).__name__
    return error, files.cat_file(target).decode()


print("fsspec", fsspec.__version__)
for call in ("pipe_file", "put_file", "put"):
    memory, local = create("memory", call), create("file", call)
    print(f"{call}: memory {memory}, local {local}")
    assert memory == ("FileExistsError", "old")
    assert local == (("FileExistsError", "old") if call == "pipe_file" else ("no error", "new"))
PYTHON
