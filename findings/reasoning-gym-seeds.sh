#!/usr/bin/env bash
# Expected: two datasets of one task with different seeds have different questions.
# Happens:  the question at position i is generated from the seed seed + i. The dataset of seed 43 is that of seed 42
#           without its first question. With 1000 questions of seed 42, all 100 questions of seed 43 are among them.
# Hurts:    evaluation on a second dataset with the next seed: every question was trained on. Averages over the seeds 1,
#           2 and 3 are averages over nearly the same questions.
# Seen:     reasoning-gym 0.1.25, November 2026; a seed that is further away than the size of the dataset has no
#           overlap.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "reasoning-gym==0.1.25" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import importlib.metadata

import reasoning_gym


def questions(task, seed, size):
    return [row["question"] for row in reasoning_gym.create_dataset(task, seed=seed, size=size)]


print("reasoning-gym", importlib.metadata.version("reasoning-gym"))
for task in ("basic_arithmetic", "countdown", "syllogism"):
    trained, next_seed, far = questions(task, 42, 1000), questions(task, 43, 100), questions(task, 10_000, 100)
    repeated, repeated_far = (sum(question in trained for question in rows) for rows in (next_seed, far))
    print(f"{task}: of 100 questions, seed 43 shares {repeated} and seed 10000 shares {repeated_far} with seed 42")
    assert next_seed == trained[1:101] and repeated == 100
    assert repeated_far < 50
PYTHON
