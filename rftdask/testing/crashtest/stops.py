"""Stops: a process is killed before and after every storage operation of a short run, and between the system calls that
each is made of; every time a new process goes on.

A first run without a crash names the places. Invariant: every run of one seed passes the same places until a crash,
since all roles take turns in one process, with names drawn from the seed.
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
from rftdask.testing.storage_faults import FaultyStorage, PlaceCounter, SteppedPosix

_DEADLINE_S = 120.0


def stop_everywhere(folder: Path, plan: Plan, seed: int, *, every: int = 1) -> Figures:
    """Kill a process at every `every`-th place and at the last, finish the run in another, and check it.

    folder: where it works; made by it.
    """
    began = time.monotonic()
    figures = Figures("stops", "places before, in and after each storage operation; SIGKILL at each")
    undisturbed = run_undisturbed(plan)
    # Listed in a folder of its own, which is as deep as those of the killed runs: another depth has other places.
    counted = folder / "counted"
    places = list_places(counted, plan, seed)
    shutil.rmtree(counted)
    figures.num_operations = sum(place.startswith("after ") for place in places)  # only verbs have an "after"
    # The last place, too, however thinly they are tried: there a list that is too long would show.
    for number in sorted({*range(0, len(places), every), len(places) - 1}):
        life_folder = folder / f"place-{number + 1}"
        life_folder.mkdir(parents=True)
        witness = Witness(life_folder / "witness.txt")
        figures.num_tried += 1
        try:
            _kill_at(places[number], life_folder, plan, witness, seed)
            figures.num_kills += 1
            ending = finish(life_folder, plan, witness, undisturbed, seed + 1)  # another writer, with other names
        except RoleError as error:
            ending = Ending([str(error)])
        figures.num_trained_again += witness.num_trained_again()
        figures.add(f"killed {places[number]}, {number + 1} of {len(places)}", ending)
        shutil.rmtree(life_folder)
    figures.duration_s = time.monotonic() - began
    return figures


def list_places(folder: Path, plan: Plan, seed: int) -> list[str]:
    """Run undisturbed in `folder`; the names of the places that were passed, which are the same in every folder.

    Their order is that of the run, but for reads that threads make at once.
    """
    folder.mkdir(parents=True, exist_ok=True)  # else the run makes it, which is a place that no killed run passes
    counter = PlaceCounter(folder)
    run_all(lambda: _storage(folder, counter), plan, Parts(), Witness(), seed)
    return counter.places


def _storage(folder: Path, counter: PlaceCounter) -> Storage:
    return FaultyStorage(LocalStorage(folder / "run", SteppedPosix(counter.at_call)), counter.at_verb)


def _kill_at(place: str, folder: Path, plan: Plan, witness: Witness, seed: int) -> None:
    """Raises: RoleError: the process ended without passing `place`."""

    def live() -> None:
        counter = PlaceCounter(folder, place, kill_myself)
        run_all(lambda: _storage(folder, counter), plan, Parts(), witness, seed)

    life = start_life(live, folder)
    if life.wait(_DEADLINE_S) != -signal.SIGKILL:
        raise RoleError(f"was to be killed, and ended with status {life.status}: {life.error()}")


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
