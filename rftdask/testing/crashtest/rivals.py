"""Rivals: a trainer is held at each of its storage operations, another one starts and trains to the end, and the first
goes on. It is what a long pause of a process, or two starts of one run, come to.

The first may only agree, or stop with a typed error; whatever it does, a third life must find a run in which nothing
was trained twice. Runs in memory, in one process: who runs when is decided, not raced for.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable

from rftdask.errors import FencedError, NotFoundError
from rftdask.storage import Storage
from rftdask.testing.crashtest.ending import Ending, Undisturbed, check_ending, new_memory, run_undisturbed, try_to_end
from rftdask.testing.crashtest.figures import Figures
from rftdask.testing.crashtest.workload import Parts, Plan, Witness, Writer, run_all
from rftdask.testing.storage_faults import FaultyStorage

Wrap = Callable[[Storage], Storage]


class _Pause:
    """Runs `meanwhile` once, at the n-th operation it sees; 0: only counts."""

    def __init__(self, at: int, meanwhile: Callable[[], None]) -> None:
        self.places: list[str] = []
        self._at = at
        self._meanwhile = meanwhile

    def hook(self, verb: str, path: str, stage: str) -> None:
        self.places.append(f"{stage} {verb} {path}")
        if len(self.places) == self._at:
            self._meanwhile()


def meet_rivals(
    plan: Plan, seeds: range, *, every: int = 1, where: str = ".*", wrap: Wrap = lambda storage: storage
) -> Figures:
    """At every `every`-th operation among those like `where`, a pattern for "before put weights/1/MANIFEST.json".
    `wrap`: what stands between the first trainer and its storage; a protection can be taken away there.
    """
    began = time.monotonic()
    figures = Figures("rivals", "trainers held at each operation while another one trained to the end")
    undisturbed = run_undisturbed(plan)
    num_fenced = 0
    for seed in seeds:
        places = _places(plan, seed, wrap)
        figures.num_operations += len(places) // 2
        chosen = [number for number, place in enumerate(places, 1) if re.fullmatch(where, place)]
        for number in chosen[::every]:
            witness = Witness()
            was_fenced, ending = _meet(plan, number, seed, wrap, witness, undisturbed)
            num_fenced += was_fenced
            figures.num_tried += 1
            figures.num_trained_again += witness.num_trained_again()
            figures.add(f"held {places[number - 1]}, seed {seed}", ending)
    figures.notes.append(f"{num_fenced} of {figures.num_tried} stopped because they were fenced, the others agreed")
    figures.duration_s = time.monotonic() - began
    return figures


def _places(plan: Plan, seed: int, wrap: Wrap) -> list[str]:
    pause = _Pause(0, lambda: None)
    storage = wrap(FaultyStorage(new_memory(), pause.hook))
    run_all(lambda: storage, plan, Parts(), Witness(), seed)
    return pause.places


def _meet(
    plan: Plan, number: int, seed: int, wrap: Wrap, witness: Witness, undisturbed: Undisturbed
) -> tuple[bool, Ending]:
    """(whether the first was fenced, what came of the run)."""
    memory, parts = new_memory(), Parts()

    def rival() -> None:
        writer = Writer(memory, plan, parts, witness, random.Random(seed))
        for _ in range(2):
            writer.work()  # so that the rival finds more than the first did
        run_all(lambda: memory, plan, parts, witness, seed + 1)

    storage = wrap(FaultyStorage(memory, _Pause(number, rival).hook))
    was_fenced = False
    try:
        run_all(lambda: storage, plan, parts, witness, seed)
    except FencedError:
        was_fenced = True
    except NotFoundError:
        pass  # what it was about to read is gone: the other one has tidied up
    failed = try_to_end(lambda: run_all(lambda: memory, plan, parts, witness, seed + 2))
    return was_fenced, failed or check_ending(memory, plan, witness, undisturbed)
