#!/usr/bin/env bash
# Expected: an answer equals itself, and a number is read as it is usually written.
# Happens:  outside of dollar signs nothing is found in a pair, a set or an interval, so "(1,2)" does not equal "(1,2)";
#           "1 1/2" is read as 1 and "1e2" as 1; 1/3 equals 0.333333 but not 0.333; "50%" is a half, "50\\%" is 50.
# Hurts:    answers of datasets are plain text: a right answer gets reward 0, and "1" is right for "1 1/2".
# Seen:     math-verify 0.9.0, November 2026.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "math-verify==0.9.0" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import importlib.metadata

from math_verify import parse, verify

def equal(gold, answer):
    return verify(parse(gold), parse(answer))

seen = {
    pair: equal(*pair)
    for pair in [
        ("(1,2)", "(1,2)"), ("$(1,2)$", "$(1,2)$"), ("1 1/2", "1.5"), ("1 1/2", "1"), ("1e2", "100"), ("1e2", "1"),
        ("1/3", "0.333333"), ("1/3", "0.333"), ("50%", "0.5"), ("50\\%", "0.5"),
    ]
}
print("math-verify", importlib.metadata.version("math-verify"))
for pair, verdict in seen.items():
    print(pair, verdict)
assert list(seen.values()) == [False, True, False, True, False, True, True, False, True, False]
PYTHON
