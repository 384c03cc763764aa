"""Rivals: a trainer is held at each of its storage operations, another one starts and trains to the end, and the first
goes on. It is what a long pause of a process, or two starts of one run, come to.

The first may only agree, or stop with a typed error; whatever it does, a third life must find a run in which nothing
was trained twice. Runs in memory, in one process: who runs when is decided, not raced for.
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
    """Hold a trainer at every `every`-th operation among those like `where`, while another one trains to the end.

    where: a pattern for "before put weights/1/MANIFEST.json (1)". wrap: what stands between the first trainer and its
    storage; a protection can be taken away there.
    """
    figures = Figures("rivals", "trainers held at each operation while another one trained to the end")
    num_fenced = 0
    for seed in seeds:
        places = _list_places(plan, seed, wrap)
        figures.num_operations += len(places) // 2  # each has a "before" and an "after"
        for place in [place for place in places if re.fullmatch(where, place)][::every]:
            witness = Witness()
            was_fenced, ending = _meet(plan, place, seed, wrap, witness)
            num_fenced += was_fenced
            figures.add(f"held {place}, seed {seed}", ending, witness)
    figures.notes.append(f"{num_fenced} of {figures.num_tried} stopped because they were fenced, the others agreed")
    return figures


def _list_places(plan: Plan, seed: int, wrap: Wrap) -> list[str]:
    counter = PlaceCounter()
    storage = wrap(FaultyStorage(new_memory(), counter.at_verb))
    run_all(lambda: storage, plan, Parts(), Witness(), seed)
    return counter.places


def _meet(plan: Plan, place: str, seed: int, wrap: Wrap, witness: Witness) -> tuple[bool, Ending]:
    """Hold the first trainer at `place`: (whether it was fenced, what came of the run)."""
    memory, parts = new_memory(), Parts()

    def rival() -> None:
        writer = Writer(memory, plan, parts, witness, random.Random(seed))
        for _ in range(2):
            writer.work()  # so that the rival finds more than the first did
        run_all(lambda: memory, plan, parts, witness, seed + 1)

    counter = PlaceCounter("", place, rival)
    # Both work on one memory; the first sees it through the counter, which lets the rival run at the place.
    held = wrap(FaultyStorage(memory, counter.at_verb))
    was_fenced = False
    try:
        run_all(lambda: held, plan, parts, witness, seed)
    except FencedError:
        was_fenced = True
    except NotFoundError:
        pass  # what it was about to read is gone: the other one has tidied up
    if not counter.has_acted:
        return was_fenced, Ending(["the first trainer never came to this place"])
    # Whoever came last, the run must end as if it had been alone.
    return was_fenced, go_on(lambda: memory, plan, witness, seed + 2)
