"""Kills: processes that are killed with signal 9, before, in and after every storage operation of a short run
(`stop_everywhere`), and at random moments of longer ones while writers and a trainer race (`kill_at_random`).

They are forked from this process, which has everything imported already, so a life costs some milliseconds. Fork only
from a process without threads: the command line and tests run the harness in a process of its own. Invariants: a life
that outlives this process ends by itself; what a life raises is told, never lost; every run of one seed passes the same
places until a crash, since all roles of a short run take turns in one process, with names drawn from the seed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rftdask.errors import RoleError
from rftdask.storage import Storage
from rftdask.storage.local import LocalStorage
from rftdask.testing.crashtest.ending import Ending, go_on, run_undisturbed
from rftdask.testing.crashtest.figures import Figures
from rftdask.testing.crashtest.workload import Parts, Plan, Witness, Writer, run_all, train
from rftdask.testing.storage_faults import FaultyStorage, PlaceCounter, SteppedPosix

_LIFE_DEADLINE_S = 120.0
_NUM_WRITERS = 3
_VICTIMS = ("writer", "writer", "trainer", "trainer", "both")
_MAX_PROGRESS = 9
"""Batches that a trainer may train before it is killed: drawn from 0 to this."""
_MAX_PAUSE_S = 0.02
_POLL_S = 0.005
_RUN_DEADLINE_S = 300.0


class Life:
    """One process, forked from this one. What it raises goes to a file in `folder`."""

    def __init__(self, job: Callable[[], None], folder: Path) -> None:
        parent = os.getpid()

        def live() -> None:
            try:
                job()
            except BaseException:
                # An orphan's parent has removed the folder, or is about to.
                if os.getppid() == parent:
                    (folder / f"error-{os.getpid()}.txt").write_text(traceback.format_exc())
                raise SystemExit(1) from None

        # Not a new interpreter: importing pyarrow takes a second, and there are thousands of lives.
        self.process = multiprocessing.get_context("fork").Process(target=live, daemon=True)
        self.process.start()
        self.pid = self.process.pid
        self._error_file = folder / f"error-{self.pid}.txt"

    @property
    def status(self) -> int | None:
        """None while it runs, its exit code when it has ended, minus the signal if killed."""
        return self.process.exitcode

    def wait(self) -> int:
        """Wait for its end; the status. Raises: RoleError: it did not end in time, and was killed."""
        self.process.join(_LIFE_DEADLINE_S)
        if (status := self.status) is None:
            self.kill()
            raise RoleError(f"process {self.pid} did not end in {_LIFE_DEADLINE_S:.0f} s")
        return status

    def kill(self) -> bool:
        """SIGKILL, and wait until it is gone; whether it was that which ended it."""
        self.process.kill()
        self.process.join()
        return self.status == -signal.SIGKILL

    def error(self) -> str:
        """Read what it raised, in one line; "" if nothing."""
        text = self._error_file.read_text() if self._error_file.exists() else ""
        return text.strip().rpartition("\n")[2]


def stop_everywhere(folder: Path, plan: Plan, seed: int, *, every: int = 1) -> Figures:
    """Kill a process at every `every`-th place and at the last, finish the run in another, and check it.

    folder: where it works; made by it.
    """

    def kill_myself() -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # the signal is on its way

    figures = Figures("stops", "places before, in and after each storage operation; SIGKILL at each")
    run_undisturbed(plan)  # here, not once in every life
    # Listed in a folder of its own, which is as deep as those of the killed runs: another depth has other places.
    counted = folder / "counted"
    places = list_places(counted, plan, seed)
    shutil.rmtree(counted)
    figures.num_operations = sum(place.startswith("after ") for place in places)  # only verbs have an "after"
    # The last place, too, however thinly they are tried: there a list that is too long would show.
    for number in sorted({*range(0, len(places), every), len(places) - 1}):
        life_folder = folder / f"place-{number + 1}"
        life_folder.mkdir(parents=True)
        # In a file: what the killed life has seen is to outlive it.
        witness = Witness(life_folder / "witness.txt")
        counter = PlaceCounter(life_folder, places[number], kill_myself)
        storages = partial(_storage, life_folder, counter)
        life = Life(partial(run_all, storages, plan, Parts(), witness, seed), life_folder)
        try:
            if life.wait() != -signal.SIGKILL:
                raise RoleError(f"was to be killed, and ended with status {life.status}: {life.error()}")
            figures.num_kills += 1
            ending = _finish(life_folder, plan, witness, seed + 1)  # another writer, with other names
        except RoleError as error:
            ending = Ending([str(error)])
        figures.add(f"killed {places[number]}, {number + 1} of {len(places)}", ending, witness)
        shutil.rmtree(life_folder)
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


def _finish(folder: Path, plan: Plan, witness: Witness, seed: int) -> Ending:
    """Let a new process go on with the run in `folder` to its end, and check it there. Raises: RoleError."""

    def live() -> None:
        ending = go_on(lambda: LocalStorage(folder / "run"), plan, witness, seed)
        (folder / "ending.json").write_text(json.dumps(asdict(ending)))

    life = Life(live, folder)
    if life.wait():
        return Ending([f"the next process ended with status {life.status}: {life.error()}"])
    return Ending(**json.loads((folder / "ending.json").read_text()))


def kill_at_random(folder: Path, plan: Plan, num_kills: int, seed: int) -> Figures:
    """At least `num_kills` kills in as many runs of `plan` as it takes. Works below `folder`.

    Whoever is killed is replaced at once. A run that has ended is checked, and the next begins.
    """
    figures = Figures("kills", f"runs of {_NUM_WRITERS} writers and a trainer, SIGKILL at random moments")
    run_undisturbed(plan)  # here, not once in every life
    rng = random.Random(seed)
    killed: Counter[str] = Counter()
    while figures.num_kills < num_kills:
        place = folder / f"run-{figures.num_tried + 1}"
        place.mkdir(parents=True)
        run = _Race(place, plan, rng)
        try:
            ending = run.live(num_kills - figures.num_kills)
        except RoleError as error:
            ending = Ending([str(error)])
        finally:
            run.end()
        killed += run.num_killed
        figures.num_kills = killed.total()
        figures.add(f"run {figures.num_tried + 1} (seed {seed})", ending, run.witness)
        shutil.rmtree(place)
        if not run.num_killed.total():
            break  # a run in which nobody can be killed would go on for ever
    if not figures.num_trained_again:
        figures.problems.append("no batch was trained again: the trainer never got far enough to lose anything")
    figures.notes.append(f"{killed['writer']} kills of writers, {killed['trainer']} of the trainer")
    return figures


class _Race:
    """One run, from an empty folder to its end, whose processes are killed and replaced."""

    def __init__(self, place: Path, plan: Plan, rng: random.Random) -> None:
        self.witness = Witness(place / "witness.txt")
        self.num_killed: Counter[str] = Counter()
        self._parent = os.getpid()
        self._place = place
        self._plan = plan
        self._rng = rng
        self._deadline = time.monotonic() + _RUN_DEADLINE_S
        self._writers = [self._start_writer() for _ in range(_NUM_WRITERS)]
        self._trainer = self._start_trainer()

    def live(self, max_kills: int) -> Ending:
        """Kill until the run has ended, or often enough; then let it end, and check it. Raises: RoleError."""
        while self.num_killed.total() < max_kills and self._trainer.status is None:
            self._kill(self._rng.choice(_VICTIMS))
            self._check()
        self._wait(lambda: False)
        self.end()
        return _finish(self._place, self._plan, self.witness, seed=self._rng.randrange(1 << 30))

    def end(self) -> None:
        """Kill who is left; that does not count."""
        for life in (*self._writers, self._trainer):
            life.kill()

    def _kill(self, victim: str) -> None:
        if victim != "writer":
            # A trainer that dies before it has trained anything would prove nothing.
            num_batches = self._rng.randint(0, _MAX_PROGRESS)
            self._wait(lambda: len(self.witness.steps_trained(self._trainer.pid)) >= num_batches)
        time.sleep(self._rng.uniform(0, _MAX_PAUSE_S))
        if victim != "writer":
            self.num_killed["trainer"] += self._trainer.kill()
        if victim != "trainer":
            for number in self._rng.sample(range(_NUM_WRITERS), self._rng.randint(1, _NUM_WRITERS)):
                self.num_killed["writer"] += self._writers[number].kill()
                self._writers[number] = self._start_writer()
        # Last, so that in "both" nobody is alive for a moment; a trainer that has ended well (0) is not replaced.
        if victim != "writer" and self._trainer.status:
            self._trainer = self._start_trainer()

    def _wait(self, enough: Callable[[], bool]) -> None:
        """Until it is enough, or the trainer has ended. Raises: RoleError."""
        while not enough() and self._trainer.status is None:
            time.sleep(_POLL_S)
            self._check()
        self._check()

    def _check(self) -> None:
        """Raises: RoleError: somebody ended who was not killed, or the run takes too long."""
        for life in (*self._writers, self._trainer):
            if life.status and (text := life.error()):
                raise RoleError(f"a process ended by itself: {text}")
        if time.monotonic() > self._deadline:
            raise RoleError(f"the run did not end in {_RUN_DEADLINE_S:.0f} s")

    def _start_writer(self) -> Life:
        seed = self._rng.randrange(1 << 30)

        def live() -> None:
            rng = random.Random(seed)
            writer = Writer(LocalStorage(self._place / "run"), self._plan, Parts(), self.witness, rng)
            while True:
                self._stop_if_alone()
                time.sleep(rng.uniform(0, 0.004) if writer.work() else 0.02)

        return Life(live, self._place)

    def _start_trainer(self) -> Life:
        def live() -> None:
            train(LocalStorage(self._place / "run"), self._plan, Parts(), self.witness, self._stop_if_alone)

        return Life(live, self._place)

    def _stop_if_alone(self) -> bool:
        """False, in the loops of a life. Raises: RoleError: the process that forked it is gone."""
        if os.getppid() != self._parent:
            raise RoleError("the crash test has ended")
        return False
