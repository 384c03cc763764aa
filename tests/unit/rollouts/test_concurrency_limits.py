"""Promises of places that several work units share: what one leaves free the next takes, in the order in which they
entered; every place is given back, also of a rollout that never began."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rftdask.buffer.log.schema import Status
from rftdask.config.schema.explorer import OverRolloutConfig
from rftdask.data.task import Task
from rftdask.rollouts.concurrency_limits import SLOT, KvCacheBudget, SharedSlots, slots_by_memory
from rftdask.rollouts.runner import SharedLoop, TextEngine, UnitOutcome, run_work_unit
from rftdask.rollouts.workflows.base import PolicyModel
from rftdask.rollouts.workflows.registry import workflow
from rftdask.synchronizer.published import Published
from tests.unit.rollouts.rollout_cases import VERSION, CharTokenizer, replies, settings, task


def test_who_enters_later_is_admitted_when_somebody_leaves() -> None:
    places, admitted = SharedSlots({SLOT: 2}), list[str]()
    for unit, key in (("one", "a"), ("one", "b"), ("two", "a"), ("two", "b")):
        places.enter((unit, key), (SLOT,), admit=lambda name=f"{unit}/{key}": admitted.append(name))
    assert admitted == ["one/a", "one/b"]
    places.leave(("one", "b"))
    assert admitted[2:] == ["two/a"]
    places.leave(("two", "b"))  # it never began, and does not
    places.leave(("two", "b"))
    places.leave(("one", "a"))
    assert admitted[3:] == []
    assert places.wait_for_slot(SLOT, 60)
    places.enter("another", (SLOT,), admit=lambda: None)
    assert not places.wait_for_slot(SLOT, 0.01), "two has one, and another the other"


def test_a_limit_that_comes_later_limits_what_comes_after_it_and_changes_no_other() -> None:
    places, admitted = SharedSlots({SLOT: 1}), list[str]()
    places.limit({SLOT: 5, "game": 1})
    for key, kinds in (("a", (SLOT,)), ("b", (SLOT,)), ("c", ("game",)), ("d", ("game",))):
        places.enter(key, kinds, admit=lambda key=key: admitted.append(key))
    assert admitted == ["a", "c"]


class Gate:
    """A workflow whose rollouts wait until the test lets them end, by the index of their task."""

    def __init__(self) -> None:
        self.running: list[int] = []
        self.open: dict[int, asyncio.Event] = {}

        async def gated(task: Task, model: PolicyModel) -> float:
            self.running.append(task.index)
            try:
                await model.generate("p")
                await self.open.setdefault(task.index, asyncio.Event()).wait()
            finally:
                self.running.remove(task.index)
            return 1.0

        self.name = f"test_places_{id(self)}"
        workflow(self.name, in_process=True)(gated)

    def end(self, *indices: int) -> None:
        for index in indices:
            self.open.setdefault(index, asyncio.Event()).set()

    async def until_running(self, *indices: int) -> None:
        async with asyncio.timeout(30):
            while sorted(self.running) != sorted(indices):
                await asyncio.sleep(0.001)


def unit(
    gate: Gate, indices: range, places: SharedSlots, on_admitted: Callable[[], None], **changes: Any
) -> Coroutine[Any, Any, UnitOutcome]:
    return run_work_unit(
        [task(index, gate.name) for index in indices],
        repeat_times=1,
        explore_step=1,
        policy=TextEngine(replies("4"), CharTokenizer()),
        **settings(**changes),
        weights=Published(VERSION, "", "hash7"),
        shared_slots=places,
        on_admitted=on_admitted,
    )


def test_a_unit_takes_the_slots_that_the_one_before_it_leaves_free() -> None:
    async def story() -> list[str]:
        gate, places, events = Gate(), SharedSlots({SLOT: 3}), list[str]()
        first = asyncio.create_task(unit(gate, range(3), places, lambda: events.append("first has its slots")))
        await gate.until_running(0, 1, 2)
        second = asyncio.create_task(unit(gate, range(3, 6), places, lambda: events.append("second has its slots")))
        gate.end(0, 1)
        await gate.until_running(2, 3, 4)
        assert events == ["first has its slots"]
        gate.end(3, 4)  # the tail of the first is still there
        await gate.until_running(2, 5)
        gate.end(5)
        assert [each.status for each in (await second).experiences] == [Status.OK] * 3
        assert not first.done()
        gate.end(2)
        assert len((await first).experiences) == 3
        return events

    assert asyncio.run(story()) == ["first has its slots", "second has its slots"]


def test_a_unit_that_is_cancelled_gives_all_its_places_back() -> None:
    async def story() -> None:
        gate, places = Gate(), SharedSlots({SLOT: 2})
        first = asyncio.create_task(unit(gate, range(4), places, lambda: None))
        await gate.until_running(0, 1)
        second = asyncio.create_task(unit(gate, range(4, 6), places, lambda: None))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await gate.until_running(4, 5)
        gate.end(4, 5)
        await second

    asyncio.run(story())


def test_rollouts_that_wait_for_others_slots_are_not_called_off_for_it() -> None:
    async def story() -> list[Status]:
        gate, places = Gate(), SharedSlots({SLOT: 2})
        first = asyncio.create_task(unit(gate, range(1), places, lambda: None))
        await gate.until_running(0)
        over = OverRolloutConfig(ratio=0.5, wait_after_min=0.0)
        second = asyncio.create_task(unit(gate, range(1, 3), places, lambda: None, over_rollout=over))
        await gate.until_running(0, 1)
        gate.end(1, 2)  # half of the second is done while its other half waits for a slot
        outcome = await second
        gate.end(0)
        await first
        return [each.status for each in outcome.experiences]

    assert asyncio.run(story())[0] is Status.OK


def test_units_on_a_shared_loop_run_side_by_side() -> None:
    gate, places, loop = Gate(), SharedSlots({SLOT: 1}), SharedLoop()
    admitted = [threading.Event(), threading.Event()]
    first, second = (loop.submit(unit(gate, range(n, n + 1), places, admitted[n].set)) for n in range(2))
    assert admitted[0].wait(30) and not admitted[1].is_set()
    gate.end(0)  # before anybody waits for it, or after
    loop.submit(asyncio.sleep(0)).result(30)
    gate.end(1)
    assert [len(each.result(30).experiences) for each in (first, second)] == [1, 1]
    assert admitted[1].is_set()
    ended = threading.Event()

    async def left_over() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    loop.submit(left_over())
    loop.submit(asyncio.sleep(0)).result(30)
    loop.close()
    assert ended.wait(30), "what is left is cancelled"


def test_an_engine_has_slots_for_what_its_memory_holds_of_rollouts_of_mean_length() -> None:
    assert [slots_by_memory(1000, mean, fewest=8) for mean in (10.0, 30.0, 124.9, 125.1, 5000.0, 0.0)] == [
        100,
        33,
        8,
        8,
        8,
        1000,
    ]


def test_more_places_admit_who_waits_and_fewer_are_given_up_by_those_who_leave() -> None:
    places, admitted = SharedSlots({SLOT: 1}), list[str]()
    for key in "abcdef":
        places.enter(key, (SLOT,), admit=lambda key=key: admitted.append(key))
    places.change(SLOT, 2)
    assert admitted == ["a", "b", "c"]
    places.change(SLOT, -2)
    for key in "abc":
        assert not places.wait_for_slot(SLOT, 0)
        places.leave(key)
    assert admitted == ["a", "b", "c", "d"]


def test_an_engine_has_room_for_what_its_memory_holds_and_for_one_by_itself() -> None:
    room = KvCacheBudget(100)
    room.take(60)
    assert [room.has_room(needed) for needed in (40, 41)] == [True, False] and room.missing(50) == 10
    room.give(60)
    assert room.has_room(300)
    unknown = KvCacheBudget(None)
    unknown.take(10**9)
    assert unknown.has_room(10**9)
