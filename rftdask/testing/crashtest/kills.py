"""Kills: writers and a trainer as processes of their own, racing, and killed with signal 9 at random moments.

Whoever is killed is replaced at once. The trainer is mostly killed after it has trained something, since a trainer that
dies at its start every time would prove nothing; so the batches that were trained again are counted and must not be
none. A run that has ended is checked, and the next begins, until there were enough kills.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

from rftdask.errors import RoleError
from rftdask.storage.local import LocalStorage
from rftdask.testing.crashtest.ending import Ending, Undisturbed, run_undisturbed
from rftdask.testing.crashtest.figures import Figures
from rftdask.testing.crashtest.lives import Life, start_life, stop_if_alone
from rftdask.testing.crashtest.stops import finish
from rftdask.testing.crashtest.workload import Parts, Plan, Witness, Writer, train

_NUM_WRITERS = 3
_VICTIMS = ("writer", "writer", "trainer", "trainer", "both")
_MAX_PROGRESS = 9
"""Batches that a trainer may train before it is killed: drawn from 0 to this."""
_MAX_PAUSE_S = 0.02
_POLL_S = 0.005
_RUN_DEADLINE_S = 300.0


def kill_at_random(folder: Path, plan: Plan, num_kills: int, seed: int) -> Figures:
    """At least `num_kills` kills in as many runs of `plan` as it takes. Works below `folder`."""
    began = time.monotonic()
    figures = Figures("kills", f"runs of {_NUM_WRITERS} writers and a trainer, SIGKILL at random moments")
    undisturbed = run_undisturbed(plan)
    rng = random.Random(seed)
    by_role = dict.fromkeys(("writer", "trainer"), 0)
    while figures.num_kills < num_kills:
        figures.num_tried += 1
        place = folder / f"run-{figures.num_tried}"
        place.mkdir(parents=True)
        run = _Run(place, plan, rng)
        try:
            ending = run.live(num_kills - figures.num_kills, undisturbed)
        except RoleError as error:
            ending = Ending([str(error)])
        finally:
            run.end()
        for role, count in run.num_killed.items():
            by_role[role] += count
            figures.num_kills += count
        figures.num_trained_again += run.witness.num_trained_again()
        figures.add(f"run {figures.num_tried} (seed {seed})", ending)
        shutil.rmtree(place)
        if not run.num_killed["trainer"] + run.num_killed["writer"]:
            break  # a run in which nobody can be killed would go on for ever
    if not figures.num_trained_again:
        figures.problems.append("no batch was trained again: the trainer never got far enough to lose anything")
    figures.notes.append(f"{by_role['writer']} kills of writers, {by_role['trainer']} of the trainer")
    figures.duration_s = time.monotonic() - began
    return figures


class _Run:
    """One run, from an empty folder to its end, whose processes are killed and replaced."""

    def __init__(self, place: Path, plan: Plan, rng: random.Random) -> None:
        self.witness = Witness(place / "witness.txt")
        self.num_killed = {"writer": 0, "trainer": 0}
        self._place = place
        self._plan = plan
        self._rng = rng
        self._deadline = time.monotonic() + _RUN_DEADLINE_S
        self._writers = [self._start_writer() for _ in range(_NUM_WRITERS)]
        self._trainer = self._start_trainer()

    def live(self, max_kills: int, undisturbed: Undisturbed) -> Ending:
        """Kill until the run has ended, or often enough; then let it end, and check it. Raises: RoleError."""
        while sum(self.num_killed.values()) < max_kills and self._trainer.poll() is None:
            self._kill(self._rng.choice(_VICTIMS))
            self._check()
        while self._trainer.poll() is None:
            time.sleep(_POLL_S)
            self._check()
        self._check()
        self.end()
        return finish(self._place, self._plan, self.witness, undisturbed, seed=self._rng.randrange(1 << 30))

    def end(self) -> None:
        """Kill who is left; that does not count."""
        for life in (*self._writers, self._trainer):
            life.kill()

    def _kill(self, victim: str) -> None:
        if victim != "writer":
            # A trainer that dies before it has trained anything would prove nothing.
            num_batches = self._rng.randint(0, _MAX_PROGRESS)
            while len(self.witness.steps_trained(self._trainer.pid)) < num_batches and self._trainer.poll() is None:
                time.sleep(_POLL_S)
                self._check()
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

    def _check(self) -> None:
        """Raises: RoleError: somebody ended who was not killed, or the run takes too long."""
        for life in (*self._writers, self._trainer):
            if life.poll() and (text := life.error()):
                raise RoleError(f"a process ended by itself: {text}")
        if time.monotonic() > self._deadline:
            raise RoleError(f"the run did not end in {_RUN_DEADLINE_S:.0f} s")

    def _start_writer(self) -> Life:
        parent, seed = os.getpid(), self._rng.randrange(1 << 30)

        def live() -> None:
            rng = random.Random(seed)
            writer = Writer(LocalStorage(self._place / "run"), self._plan, Parts(), self.witness, rng)
            while True:
                stop_if_alone(parent)
                time.sleep(rng.uniform(0, 0.004) if writer.work() else 0.02)

        return start_life(live, self._place)

    def _start_trainer(self) -> Life:
        parent = os.getpid()

        def look() -> bool:
            stop_if_alone(parent)
            return False

        return start_life(
            lambda: train(LocalStorage(self._place / "run"), self._plan, Parts(), self.witness, look), self._place
        )
