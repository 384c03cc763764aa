#!/usr/bin/env bash
# Expected: a game that is reset with a seed repeats itself, whatever else runs in the process.
# Happens:  reset(seed=7) seeds Python's global random, from which all games draw. Two games that take turns draw each
#           other's dice, and a reset gives the program around it the random numbers of the game's seed again.
# Hurts:    rollouts of one task that share a process: those of one seed see different games, an evaluation cannot be
#           repeated, and a program that samples after each reset samples the same.
# Seen:     textarena 0.7.4, November 2026.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 75
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "textarena==0.7.4" || exit 75
cd "$folder"
venv/bin/python - <<'PYTHON'
import importlib.metadata
import random
import re

import textarena

def new_game():
    game = textarena.make("PigDice-v0-raw")
    game.reset(num_players=2, seed=7)
    return game

def roll(game):
    """Roll once; return the rolls of this turn so far, as the game shows them."""
    game.step("[roll]")
    text = game.get_observation()[1][-1][1]
    return [int(number) for number in re.findall(r"'(\d+)'", text.partition("history")[2].partition("\n")[0])]

game = new_game()
alone = [roll(game) for _ in range(2)][-1]
game, other = new_game(), new_game()
taking_turns = [(roll(game), roll(other)) for _ in range(2)][-1]
samples = []
for _ in range(2):
    new_game()
    samples.append(random.random())
print("textarena", importlib.metadata.version("textarena"))
print("two rolls of a game with seed 7:", alone)
print("two rolls of two such games:", *taking_turns)
print("random.random() after each of two resets:", samples)
assert len(alone) == 2 and len(taking_turns[0]) == 2
assert taking_turns[0] != alone and taking_turns[1] != alone
assert samples[0] == samples[1]
PYTHON
