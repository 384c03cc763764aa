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
from rftdask.testing.storage_faults import FaultyStorage, PlaceCounter

Wrap = Callable[[Storage], Storage]


def meet_rivals(
    plan: Plan, seeds: range, *, every: int = 1, where: str = ".*", wrap: Wrap = lambda storage: storage
) -> Figures:
    """Hold a trainer at every `every`-th operation among those like `where`, while another one trains to the end.

    where: a pattern for "before put weights/1/MANIFEST.json (1)". wrap: what stands between the first trainer and its
    storage; a protection can be taken away there.
    """
    began = time.monotonic()
    figures = Figures("rivals", "trainers held at each operation while another one trained to the end")
    undisturbed = run_undisturbed(plan)
    num_fenced = 0
    for seed in seeds:
        places = _list_places(plan, seed, wrap)
        figures.num_operations += len(places) // 2
        chosen = [place for place in places if re.fullmatch(where, place)]
        for place in chosen[::every]:
            witness = Witness()
            was_fenced, ending = _meet(plan, place, seed, wrap, witness, undisturbed)
            num_fenced += was_fenced
            figures.num_tried += 1
            figures.num_trained_again += witness.num_trained_again()
            figures.add(f"held {place}, seed {seed}", ending)
    figures.notes.append(f"{num_fenced} of {figures.num_tried} stopped because they were fenced, the others agreed")
    figures.duration_s = time.monotonic() - began
    return figures


def _list_places(plan: Plan, seed: int, wrap: Wrap) -> list[str]:
    counter = PlaceCounter()
    storage = wrap(FaultyStorage(new_memory(), counter.at_verb))
    run_all(lambda: storage, plan, Parts(), Witness(), seed)
    return counter.places


def _meet(
    plan: Plan, place: str, seed: int, wrap: Wrap, witness: Witness, undisturbed: Undisturbed
) -> tuple[bool, Ending]:
    """Hold the first trainer at `place`: (whether it was fenced, what came of the run)."""
    memory, parts = new_memory(), Parts()

    def rival() -> None:
        writer = Writer(memory, plan, parts, witness, random.Random(seed))
        for _ in range(2):
            writer.work()  # so that the rival finds more than the first did
        run_all(lambda: memory, plan, parts, witness, seed + 1)

    counter = PlaceCounter("", place, rival)
    storage = wrap(FaultyStorage(memory, counter.at_verb))
    was_fenced = False
    try:
        run_all(lambda: storage, plan, parts, witness, seed)
    except FencedError:
        was_fenced = True
    except NotFoundError:
        pass  # what it was about to read is gone: the other one has tidied up
    if not counter.has_acted:
        return was_fenced, Ending(["the first trainer never came to this place"])
    failed = try_to_end(lambda: run_all(lambda: memory, plan, parts, witness, seed + 2))
    return was_fenced, failed or check_ending(memory, plan, witness, undisturbed)
