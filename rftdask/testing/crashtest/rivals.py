"""Rivals: a trainer is paused at each of its storage operations, another one trains to the end, and the first
continues. This happens after a long pause of a process or two starts of one run.

The first trainer may only agree or stop with a typed error. In either case a third process must find a run in which
nothing was trained twice. Runs in memory, in one process, in a fixed order.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from rftdask.errors import FencedError, NotFoundError
from rftdask.storage import Storage
from rftdask.testing.crashtest.ending import Ending, go_on, new_memory
from rftdask.testing.crashtest.figures import Figures
from rftdask.testing.crashtest.workload import Parts, Plan, Witness, Writer, run_all
from rftdask.testing.storage_faults import FaultyStorage, PlaceCounter

Wrap = Callable[[Storage], Storage]


def meet_rivals(
    plan: Plan, seeds: range, *, every: int = 1, where: str = ".*", wrap: Wrap = lambda storage: storage
) -> Figures:
    """Pause a trainer at every `every`-th operation that matches `where`, while another one trains to the end.

    where: pattern for places such as "before put weights/1/MANIFEST.json (1)". wrap: wrapper of the first trainer's
    storage, to disable a protection.
    """
    figures = Figures("rivals", "trainers paused at each operation while another one trained to the end")
    num_fenced = 0
    for seed in seeds:
        places = _list_places(plan, seed, wrap)
        figures.num_operations += len(places) // 2  # each has a "before" and an "after"
        for place in [place for place in places if re.fullmatch(where, place)][::every]:
            witness = Witness()
            was_fenced, ending = _meet(plan, place, seed, wrap, witness)
            num_fenced += was_fenced
            figures.add(f"paused {place}, seed {seed}", ending, witness)
    figures.notes.append(f"{num_fenced} of {figures.num_tried} stopped because they were fenced, the others agreed")
    return figures


def _list_places(plan: Plan, seed: int, wrap: Wrap) -> list[str]:
    counter = PlaceCounter()
    storage = wrap(FaultyStorage(new_memory(), counter.at_verb))
    run_all(lambda: storage, plan, Parts(), Witness(), seed)
    return counter.places


def _meet(plan: Plan, place: str, seed: int, wrap: Wrap, witness: Witness) -> tuple[bool, Ending]:
    """Pause the first trainer at `place`. Returns (True if it was fenced, ending of the run)."""
    memory, parts = new_memory(), Parts()

    def rival() -> None:
        writer = Writer(memory, plan, parts, witness, random.Random(seed))
        for _ in range(2):
            writer.work()  # so that the rival sees more than the first trainer
        run_all(lambda: memory, plan, parts, witness, seed + 1)

    counter = PlaceCounter("", place, rival)
    # Both use one memory; the counter of the first trainer runs the rival at the place.
    held = wrap(FaultyStorage(memory, counter.at_verb))
    was_fenced = False
    try:
        run_all(lambda: held, plan, parts, witness, seed)
    except FencedError:
        was_fenced = True
    except NotFoundError:
        pass  # the rival has removed the file that it was about to read
    if not counter.has_acted:
        return was_fenced, Ending(["the first trainer never reached this place"])
    # The run must end as if there had been one trainer.
    return was_fenced, go_on(lambda: memory, plan, witness, seed + 2)
