"""Kills: processes are killed with SIGKILL before, in and after every storage operation of a short run
(`stop_everywhere`), and at random moments of longer runs while writers and a trainer race (`kill_at_random`).

Processes are forked from this one, which has imported everything, so each costs some milliseconds. Fork only from a
process without threads: the command line and tests run the harness in a separate process.

Invariants: a process that outlives this one exits on its own; every error of a process is reported; all runs of one
seed pass the same places until a crash, since the roles of a short run take turns in one process, with names drawn from
the seed.
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
"""Maximum number of batches, drawn from 0, that a trainer trains before it is killed."""
_MAX_PAUSE_S = 0.02
_POLL_S = 0.005
_RUN_DEADLINE_S = 300.0


class Life:
    """Process forked from this one. Its error goes to a file in `folder`."""

    def __init__(self, job: Callable[[], None], folder: Path) -> None:
        parent = os.getpid()

        def live() -> None:
            try:
                job()
            except BaseException:
                # The parent of an orphan has removed the folder or is about to.
                if os.getppid() == parent:
                    (folder / f"error-{os.getpid()}.txt").write_text(traceback.format_exc())
                raise SystemExit(1) from None

        # Not a new interpreter: importing pyarrow takes a second, and there are thousands of processes.
        self.process = multiprocessing.get_context("fork").Process(target=live, daemon=True)
        self.process.start()
        self.pid = self.process.pid
        self._error_file = folder / f"error-{self.pid}.txt"

    @property
    def status(self) -> int | None:
        """Exit code, or minus the signal number if killed. None: still running."""
        return self.process.exitcode

    def wait(self) -> int:
        """Wait for the end and return the status. Raises: RoleError: it did not end in time and was killed."""
        self.process.join(_LIFE_DEADLINE_S)
        if (status := self.status) is None:
            self.kill()
            raise RoleError(f"process {self.pid} did not end in {_LIFE_DEADLINE_S:.0f} s")
        return status

    def kill(self) -> bool:
        """Send SIGKILL and wait for the end. True if the signal ended the process."""
        self.process.kill()
        self.process.join()
        return self.status == -signal.SIGKILL

    def error(self) -> str:
        """Error of the process in one line; "" if none."""
        text = self._error_file.read_text() if self._error_file.exists() else ""
        return text.strip().rpartition("\n")[2]


def stop_everywhere(folder: Path, plan: Plan, seed: int, *, every: int = 1) -> Figures:
    """Kill a process at every `every`-th place and at the last, finish the run in another process, and check it.

    folder: working folder; created here.
    """

    def kill_myself() -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # the signal is on its way

    figures = Figures("stops", "places before, in and after each storage operation; SIGKILL at each")
    run_undisturbed(plan)  # imported once here, not in every process
    # Listed in a folder as deep as those of the killed runs, since another depth has other places.
    counted = folder / "counted"
    places = list_places(counted, plan, seed)
    shutil.rmtree(counted)
    figures.num_operations = sum(place.startswith("after ") for place in places)  # only storage verbs have an "after"
    # Always including the last place, which reveals a list that is too long.
    for number in sorted({*range(0, len(places), every), len(places) - 1}):
        life_folder = folder / f"place-{number + 1}"
        life_folder.mkdir(parents=True)
        # In a file, so that the record survives the kill.
        witness = Witness(life_folder / "witness.txt")
        counter = PlaceCounter(life_folder, places[number], kill_myself)
        storages = partial(_storage, life_folder, counter)
        life = Life(partial(run_all, storages, plan, Parts(), witness, seed), life_folder)
        try:
            if life.wait() != -signal.SIGKILL:
                raise RoleError(f"should have been killed but ended with status {life.status}: {life.error()}")
            figures.num_kills += 1
            ending = _finish(life_folder, plan, witness, seed + 1)  # another writer, with other names
        except RoleError as error:
            ending = Ending([str(error)])
        figures.add(f"killed {places[number]}, {number + 1} of {len(places)}", ending, witness)
        shutil.rmtree(life_folder)
    return figures


def list_places(folder: Path, plan: Plan, seed: int) -> list[str]:
    """Run undisturbed in `folder` and return the names of the passed places, which are the same in every folder.

    They are in the order of the run, except for concurrent reads of threads.
    """
    folder.mkdir(parents=True, exist_ok=True)  # otherwise creating it would be a place that no killed run passes
    counter = PlaceCounter(folder)
    run_all(lambda: _storage(folder, counter), plan, Parts(), Witness(), seed)
    return counter.places


def _storage(folder: Path, counter: PlaceCounter) -> Storage:
    return FaultyStorage(LocalStorage(folder / "run", SteppedPosix(counter.at_call)), counter.at_verb)


def _finish(folder: Path, plan: Plan, witness: Witness, seed: int) -> Ending:
    """Finish the run in `folder` in a new process and check it. Raises: RoleError."""

    def live() -> None:
        ending = go_on(lambda: LocalStorage(folder / "run"), plan, witness, seed)
        (folder / "ending.json").write_text(json.dumps(asdict(ending)))

    life = Life(live, folder)
    if life.wait():
        return Ending([f"the next process ended with status {life.status}: {life.error()}"])
    return Ending(**json.loads((folder / "ending.json").read_text()))


def kill_at_random(folder: Path, plan: Plan, num_kills: int, seed: int) -> Figures:
    """Kill processes at random at least `num_kills` times, over as many runs of `plan` as needed, below `folder`.

    A killed process is replaced at once. A finished run is checked before the next begins.
    """
    figures = Figures("kills", f"runs of {_NUM_WRITERS} writers and a trainer, SIGKILL at random moments")
    run_undisturbed(plan)  # imported once here, not in every process
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
            break  # a run in which no process can be killed would never end
    if not figures.num_trained_again:
        figures.problems.append("no batch was trained again: the trainer never got far enough to lose anything")
    figures.notes.append(f"{killed['writer']} kills of writers, {killed['trainer']} of the trainer")
    return figures


class _Race:
    """Run from an empty folder to its end, whose processes are killed and replaced."""

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
        """Kill until the run ends or there were enough kills; then finish and check the run. Raises: RoleError."""
        while self.num_killed.total() < max_kills and self._trainer.status is None:
            self._kill(self._rng.choice(_VICTIMS))
            self._check()
        self._wait(lambda: False)
        self.end()
        return _finish(self._place, self._plan, self.witness, seed=self._rng.randrange(1 << 30))

    def end(self) -> None:
        """Kill the remaining processes. These kills are not counted."""
        for life in (*self._writers, self._trainer):
            life.kill()

    def _kill(self, victim: str) -> None:
        if victim != "writer":
            # Killing a trainer that has not trained anything would prove nothing.
            num_batches = self._rng.randint(0, _MAX_PROGRESS)
            self._wait(lambda: len(self.witness.steps_trained(self._trainer.pid)) >= num_batches)
        time.sleep(self._rng.uniform(0, _MAX_PAUSE_S))
        if victim != "writer":
            self.num_killed["trainer"] += self._trainer.kill()
        if victim != "trainer":
            for number in self._rng.sample(range(_NUM_WRITERS), self._rng.randint(1, _NUM_WRITERS)):
                self.num_killed["writer"] += self._writers[number].kill()
                self._writers[number] = self._start_writer()
        # Last, so that with "both" no process is alive for a moment. A trainer that ended with 0 is not replaced.
        if victim != "writer" and self._trainer.status:
            self._trainer = self._start_trainer()

    def _wait(self, enough: Callable[[], bool]) -> None:
        """Wait for enough progress or the end of the trainer. Raises: RoleError."""
        while not enough() and self._trainer.status is None:
            time.sleep(_POLL_S)
            self._check()
        self._check()

    def _check(self) -> None:
        """Raises: RoleError: a process ended without being killed, or the run takes too long."""
        for life in (*self._writers, self._trainer):
            if life.status and (text := life.error()):
                raise RoleError(f"a process ended without being killed: {text}")
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
        """Stop condition for loops of a forked process: always False. Raises: RoleError: its parent is gone."""
        if os.getppid() != self._parent:
            raise RoleError("the crash test has ended")
        return False
