#!/usr/bin/env bash
# Expected: the score of the right answer does not depend on a blank before it or a period after it.
# Happens:  it depends on the task. The common scorer divides the length of the answer by that of the response, so "-4"
#           with a leading blank earns 0.67 in one arithmetic task and 1 in another, and a one-letter answer 0.5. A
#           response that is no expression at all earns 0.01 in countdown.
# Hurts:    rollouts of models whose tokens begin with a blank: right answers get unequal rewards, so a group of right
#           answers has an advantage that rewards the format.
# Seen:     reasoning-gym 0.1.19, November 2026.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "reasoning-gym==0.1.19" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import importlib.metadata

import reasoning_gym

def score(task, change):
    dataset = reasoning_gym.create_dataset(task, size=1, seed=1)
    return round(dataset.score_answer(change(dataset[0]["answer"]), dataset[0]), 2)

tasks = ("basic_arithmetic", "chain_sum", "letter_counting", "spell_backward")
bare, blank = ([score(task, change) for task in tasks] for change in (str, " {}".format))
words = score("countdown", lambda answer: "I do not know")
print("reasoning-gym", importlib.metadata.version("reasoning-gym"))
print("tasks:         ", tasks)
print("right:         ", bare)
print("right, a blank:", blank)
print("countdown, words:", words)
assert bare == [1.0, 1.0, 1.0, 1.0]
assert blank == [0.67, 1.0, 0.5, 0.14]
assert words == 0.01
PYTHON
