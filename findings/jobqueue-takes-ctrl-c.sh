#!/usr/bin/env bash
# Expected: importing a package changes nothing in the process, and works in any thread.
# Happens:  import dask_jobqueue replaces the handler of SIGINT by one that calls sys.exit(). Ctrl-C then raises SystemExit
#           in place of KeyboardInterrupt, also in programs that had a handler of their own, and the exit code of an
#           interrupted program is 0. Imported first in another thread, the package raises ValueError.
# Hurts:    programs that save their work on Ctrl-C, and scripts that ask for the exit code: an interrupted run counts as a
#           complete one.
# Seen:     dask-jobqueue 0.9.0, November 2026.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  "dask-jobqueue==0.9.0" "dask==2026.7.1" "distributed==2026.7.1" || exit 75
cd "$folder"
cat >interrupted.py <<'PYTHON'
import signal
import sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job may have it ignored
if "import" in sys.argv:
    import dask_jobqueue
try:
    signal.raise_signal(signal.SIGINT)
except BaseException as error:
    print(type(error).__name__, flush=True)
    raise
PYTHON
cat >in_thread.py <<'PYTHON'
import importlib
from concurrent.futures import ThreadPoolExecutor

with ThreadPoolExecutor(1) as threads:
    print(repr(threads.submit(importlib.import_module, "dask_jobqueue").exception()))
PYTHON
venv/bin/python - <<'PYTHON'
import importlib.metadata
import subprocess
import sys

def run(*arguments):
    ended = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    return ended.stdout.strip(), ended.returncode

without, imported, in_thread = run("interrupted.py"), run("interrupted.py", "import"), run("in_thread.py")[0]
print("dask-jobqueue", importlib.metadata.version("dask-jobqueue"))
print("interrupted without the import:", *without)
print("interrupted after the import:  ", *imported)
print("imported in a thread:", in_thread)
assert without[0] == "KeyboardInterrupt" and without[1] != 0
assert imported == ("SystemExit", 0)
assert in_thread.startswith("ValueError")
PYTHON
