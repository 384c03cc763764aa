"""Stops: a process is killed before and after every storage operation of a short run, and between the system calls that
each is made of; every time a new process goes on.

A first run without a crash numbers the places. Invariant: the n-th place is the same in every run until a crash, since
all roles take turns in one process, with names drawn from the seed.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from dataclasses import asdict
from pathlib import Path

from rftdask.errors import RoleError
from rftdask.storage import Storage
from rftdask.storage.local import LocalStorage
from rftdask.testing.crashtest.ending import Ending, Undisturbed, check_ending, run_undisturbed
from rftdask.testing.crashtest.figures import Figures
from rftdask.testing.crashtest.lives import kill_myself, start_life
from rftdask.testing.crashtest.workload import Parts, Plan, Witness, run_all
from rftdask.testing.storage_faults import FaultyStorage, SteppedPosix

_DEADLINE_S = 120.0


class _Counter:
    """Counts places and dies at one of them; 0: at none."""

    def __init__(self, die_at: int = 0) -> None:
        self.places: list[str] = []
        self.num_operations = 0
        self._die_at = die_at

    def at_verb(self, verb: str, path: str, stage: str) -> None:
        self.num_operations += stage == "before"
        self._pass(f"{stage} {verb} {path}")

    def at_call(self, call: str, path: str) -> None:
        self._pass(f"before {call} {path}")

    def storage(self, folder: Path) -> Storage:
        return FaultyStorage(LocalStorage(folder, SteppedPosix(self.at_call)), self.at_verb)

    def _pass(self, place: str) -> None:
        self.places.append(place)
        if len(self.places) == self._die_at:
            kill_myself()


def stop_everywhere(folder: Path, plan: Plan, seed: int, *, every: int = 1) -> Figures:
    """Kill a process at every `every`-th place, finish the run in another, and check it. Works below `folder`."""
    began = time.monotonic()
    figures = Figures("stops", "places before, in and after each storage operation; SIGKILL at each")
    undisturbed = run_undisturbed(plan)
    counter = _Counter()
    counted = folder / "counted"
    run_all(lambda: counter.storage(counted / "run"), plan, Parts(), Witness(), seed)
    shutil.rmtree(counted)
    figures.num_operations = counter.num_operations
    for number in range(1, len(counter.places) + 1, every):
        place = folder / f"place-{number}"
        place.mkdir(parents=True)
        where = f"killed at place {number} ({counter.places[number - 1]})"
        witness = Witness(place / "witness.txt")
        figures.num_tried += 1
        try:
            figures.num_kills += _kill_at(number, place, plan, witness, seed)
            ending = finish(place, plan, witness, undisturbed, seed + 1)
        except RoleError as error:
            ending = Ending([str(error)])
        figures.num_trained_again += witness.num_trained_again()
        figures.add(where, ending)
        shutil.rmtree(place)
    figures.duration_s = time.monotonic() - began
    return figures


def _kill_at(number: int, place: Path, plan: Plan, witness: Witness, seed: int) -> bool:
    def live() -> None:
        counter = _Counter(die_at=number)
        run_all(lambda: counter.storage(place / "run"), plan, Parts(), witness, seed)

    life = start_life(live, place)
    if life.wait(_DEADLINE_S) != -signal.SIGKILL:
        raise RoleError(f"was to be killed, and ended with status {life.status}: {life.error()}")
    return True


def finish(place: Path, plan: Plan, witness: Witness, undisturbed: Undisturbed, seed: int) -> Ending:
    """Let a new process go on with the run in `place` to its end, and check it there."""

    def live() -> None:
        run_all(lambda: LocalStorage(place / "run"), plan, Parts(), witness, seed)
        ending = check_ending(LocalStorage(place / "run"), plan, witness, undisturbed)
        (place / "ending.json").write_text(json.dumps(asdict(ending)))

    life = start_life(live, place)
    if life.wait(_DEADLINE_S):
        return Ending([f"the next process ended with status {life.status}: {life.error()}"])
    return Ending(**json.loads((place / "ending.json").read_text()))
