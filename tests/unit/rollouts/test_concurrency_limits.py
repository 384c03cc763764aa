"""Slots that several work units share: they are taken in the order of entry, and every slot is freed."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Hashable
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftdask.buffer.log.schema import Status
from rftdask.config.schema.explorer import OverRolloutConfig
from rftdask.data.task import Task
from rftdask.rollouts.concurrency_limits import SLOT, SharedSlots, slots_by_memory
from rftdask.rollouts.runner import SharedLoop, TextEngine, UnitOutcome, run_work_unit
from rftdask.rollouts.workflows.base import PolicyModel
from rftdask.synchronizer.published import Published
from tests.unit.rollouts.rollout_cases import VERSION, CharTokenizer, named, replies, settings, task


class Admissions:
    """Slots whose admitted keys are recorded in order."""

    def __init__(self, limits: dict[str, int]) -> None:
        self.slots, self.admitted = SharedSlots(limits), list[Hashable]()

    def enter(self, key: Hashable, *kinds: str) -> None:
        self.slots.enter(key, kinds, lambda: self.admitted.append(key))


def test_admission_is_in_order_and_kinds_are_independent() -> None:
    limited = Admissions({"sandbox": 1, "game": 1})
    for key, *kinds in (("a", "game", "sandbox"), ("b", "sandbox"), ("c", "math"), ("d", "game")):
        limited.enter(key, *kinds)
    assert limited.admitted == ["a", "c"]
    limited.slots.leave("c")
    assert limited.admitted == ["a", "c"]
    for _ in range(2):
        limited.slots.leave("a")
        assert limited.admitted == ["a", "c", "b", "d"]


@given(st.lists(st.sampled_from([("x",), ("y",), ("x", "y"), ("z",)]), max_size=20), st.randoms())
def test_admission_runs_all_and_never_more_than_its_limits(kinds: list[tuple[str, ...]], random: Random) -> None:
    limits = {"x": 2, "y": 1}
    limited, ended = Admissions(limits), set[Hashable]()
    for number, rollout_kinds in enumerate(kinds):
        limited.enter(number, *rollout_kinds)
    while running := [key for key in limited.admitted if key not in ended]:
        for kind, most in limits.items():
            assert sum(kind in kinds[int(str(number))] for number in running) <= most
        key = random.choice(running)
        ended.add(key)
        limited.slots.leave(key)
    assert sorted(map(str, limited.admitted)) == sorted(map(str, range(len(kinds))))


def test_later_keys_are_admitted_when_earlier_ones_leave() -> None:
    limited = Admissions({SLOT: 2})
    slots, admitted = limited.slots, limited.admitted
    for key in ("one/a", "one/b", "two/a", "two/b"):
        limited.enter(key, SLOT)
    assert admitted == ["one/a", "one/b"]
    slots.leave("one/b")
    assert admitted[2:] == ["two/a"]
    slots.leave("two/b")  # it never began, and does not
    slots.leave("two/b")
    slots.leave("one/a")
    assert admitted[3:] == []
    assert slots.wait_for_slot(SLOT, 60)
    limited.enter("another", SLOT)
    assert not slots.wait_for_slot(SLOT, 0.01), "two/a and another have the slots"


def test_a_later_limit_changes_no_existing_limit() -> None:
    limited = Admissions({SLOT: 1})
    limited.slots.limit({SLOT: 5, "game": 1})
    for key, kind in (("a", SLOT), ("b", SLOT), ("c", "game"), ("d", "game")):
        limited.enter(key, kind)
    assert limited.admitted == ["a", "c"]


class Gate:
    """A workflow whose rollouts wait until the test ends them, by the index of their task."""

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

        self.name = named(gated)

    def end(self, *indices: int) -> None:
        for index in indices:
            self.open.setdefault(index, asyncio.Event()).set()

    async def until_running(self, *indices: int) -> None:
        async with asyncio.timeout(30):
            while sorted(self.running) != sorted(indices):
                await asyncio.sleep(0.001)


def unit(
    gate: Gate, indices: range, slots: SharedSlots, on_admitted: Callable[[], None], **changes: Any
) -> Coroutine[Any, Any, UnitOutcome]:
    return run_work_unit(
        [task(index, gate.name) for index in indices],
        repeat_times=1,
        explore_step=1,
        policy=TextEngine(replies("4"), CharTokenizer()),
        **settings(**changes),
        weights=Published(VERSION, "", "hash7"),
        shared_slots=slots,
        on_admitted=on_admitted,
    )


def test_a_unit_takes_slots_that_the_previous_one_leaves_free() -> None:
    async def story() -> list[str]:
        gate, slots, events = Gate(), SharedSlots({SLOT: 3}), list[str]()
        first = asyncio.create_task(unit(gate, range(3), slots, lambda: events.append("first has its slots")))
        await gate.until_running(0, 1, 2)
        second = asyncio.create_task(unit(gate, range(3, 6), slots, lambda: events.append("second has its slots")))
        gate.end(0, 1)
        await gate.until_running(2, 3, 4)
        assert events == ["first has its slots"]
        gate.end(3, 4)  # the first unit still runs
        await gate.until_running(2, 5)
        gate.end(5)
        assert [each.status for each in (await second).experiences] == [Status.OK] * 3
        assert not first.done()
        gate.end(2)
        assert len((await first).experiences) == 3
        return events

    assert asyncio.run(story()) == ["first has its slots", "second has its slots"]


def test_a_cancelled_unit_frees_all_its_slots() -> None:
    async def story() -> None:
        gate, slots = Gate(), SharedSlots({SLOT: 2})
        first = asyncio.create_task(unit(gate, range(4), slots, lambda: None))
        await gate.until_running(0, 1)
        second = asyncio.create_task(unit(gate, range(4, 6), slots, lambda: None))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await gate.until_running(4, 5)
        gate.end(4, 5)
        await second

    asyncio.run(story())


def test_rollouts_that_wait_for_slots_are_not_cancelled() -> None:
    async def story() -> list[Status]:
        gate, slots = Gate(), SharedSlots({SLOT: 2})
        first = asyncio.create_task(unit(gate, range(1), slots, lambda: None))
        await gate.until_running(0)
        over = OverRolloutConfig(ratio=0.5, wait_after_min=0.0)
        second = asyncio.create_task(unit(gate, range(1, 3), slots, lambda: None, over_rollout=over))
        await gate.until_running(0, 1)
        gate.end(1, 2)  # half of the second is done while its other half waits for a slot
        outcome = await second
        gate.end(0)
        await first
        return [each.status for each in outcome.experiences]

    assert asyncio.run(story())[0] is Status.OK


def test_units_on_a_shared_loop_run_concurrently() -> None:
    gate, slots, loop = Gate(), SharedSlots({SLOT: 1}), SharedLoop()
    admitted = [threading.Event(), threading.Event()]
    first, second = (loop.submit(unit(gate, range(n, n + 1), slots, admitted[n].set)) for n in range(2))
    assert admitted[0].wait(30) and not admitted[1].is_set()
    gate.end(0)  # before its rollout waits for it, or after
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
    assert ended.wait(30), "remaining tasks are cancelled"


def test_slots_by_memory_follow_the_mean_length_of_rollouts() -> None:
    slots = {10.0: 100, 30.0: 33, 124.9: 8, 125.1: 8, 5000.0: 8, 0.0: 1000}
    assert {mean: slots_by_memory(1000, mean, fewest=8) for mean in slots} == slots


def test_added_slots_admit_and_removed_ones_go_as_holders_leave() -> None:
    limited = Admissions({SLOT: 1})
    slots, admitted = limited.slots, limited.admitted
    for key in "abcdef":
        limited.enter(key, SLOT)
    slots.change(SLOT, 2)
    assert admitted == ["a", "b", "c"]
    slots.change(SLOT, -2)
    for key in "abc":
        assert not slots.wait_for_slot(SLOT, 0)
        slots.leave(key)
    assert admitted == ["a", "b", "c", "d"]
