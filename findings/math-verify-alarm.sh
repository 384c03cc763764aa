#!/usr/bin/env bash
# Expected: comparing two answers does not change timers that the caller has set.
# Happens:  parse and verify limit their time with SIGALRM, of which a process has one. They restore the handler of the
#           caller and not its timer: after one call, the caller's alarm is off and never rings.
# Hurts:    scoring inside a time limit made with signal.alarm or setitimer: the first reward switches the limit off,
#           and a later endless loop is not interrupted.
# Seen:     math-verify 0.9.0, November 2026; with the two timeouts set to None, the timer runs on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "math-verify==0.9.0" || exit 75
cd "$folder"
venv/bin/python - 2>/dev/null <<'PYTHON'
import importlib.metadata
import signal

from math_verify import parse, verify

signal.signal(signal.SIGALRM, lambda number, frame: None)
half = parse("$1/2$", parsing_timeout=None)


def seconds_left(call):
    signal.setitimer(signal.ITIMER_REAL, 60)
    call()
    return round(signal.setitimer(signal.ITIMER_REAL, 0)[0])


seen = {
    "nothing": seconds_left(lambda: None),
    "parse": seconds_left(lambda: parse("$1/2$")),
    "verify": seconds_left(lambda: verify(half, half)),
    "parse without timeout": seconds_left(lambda: parse("$1/2$", parsing_timeout=None)),
    "verify without timeout": seconds_left(lambda: verify(half, half, timeout_seconds=None)),
}
print("math-verify", importlib.metadata.version("math-verify"))
print("seconds left of 60:", seen)
assert seen["parse"] == seen["verify"] == 0
assert all(seconds > 30 for name, seconds in seen.items() if name not in ("parse", "verify"))
PYTHON
