"""Promises of the schedule: a step is a function of its arguments, and an epoch holds every task once."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftdask.algorithm.selectors import Selector, Shuffle
from rftdask.config.schema.algorithm import load_part
from rftdask.data.task_schedule import EpochOrder, TaskRef
from rftdask.data.task_schedule import explore_tasks as explore_tasks_of

sizes_of_tasksets = st.lists(st.integers(1, 12), min_size=1, max_size=4)


def explore_tasks(step: int, *, sizes: list[int], batch_size: int, selector: str, seed: int) -> list[TaskRef]:
    """The tasks of a step whose tasksets all have one selector."""
    part: Selector = load_part("selector", selector)()
    orders = [order_of(part, size) for size in sizes]
    return explore_tasks_of(
        step, sizes=sizes, batch_size=batch_size, orders=orders, seed=seed, epoch_each_step=part.epoch_each_step
    )


def order_of(selector: Selector, size: int) -> EpochOrder:
    return partial(selector.order, np.empty((size, 0)))


def run(sizes: list[int], batch_size: int, selector: str, num_steps: int, seed: int = 0) -> list[TaskRef]:
    return [
        task
        for step in range(1, num_steps + 1)
        for task in explore_tasks(step, sizes=sizes, batch_size=batch_size, selector=selector, seed=seed)
    ]


def test_sequential_order_lets_steps_straddle_epochs() -> None:
    steps = [explore_tasks(k, sizes=[5], batch_size=3, selector="sequential", seed=1) for k in (1, 2, 3, 4)]
    assert [[(task.epoch, task.index) for task in step] for step in steps] == [
        [(0, 0), (0, 1), (0, 2)],
        [(0, 3), (0, 4), (1, 0)],
        [(1, 1), (1, 2), (1, 3)],
        [(1, 4), (2, 0), (2, 1)],
    ]


def test_several_tasksets_are_interleaved_in_proportion() -> None:
    tasks = explore_tasks(1, sizes=[6, 2], batch_size=8, selector="sequential", seed=1)
    assert [task.taskset_number for task in tasks] == [0, 0, 1, 0, 0, 0, 1, 0]
    assert [task.index for task in tasks] == [0, 1, 0, 2, 3, 4, 1, 5]


@given(sizes_of_tasksets, st.sampled_from(["sequential", "shuffle"]), st.integers(-5, 5), st.integers(0, 3))
def test_an_epoch_holds_every_task_exactly_once(sizes: list[int], selector: str, seed: int, epoch: int) -> None:
    tasks = explore_tasks(epoch + 1, sizes=sizes, batch_size=sum(sizes), selector=selector, seed=seed)
    assert sorted((task.taskset_number, task.index) for task in tasks) == [
        (number, index) for number, size in enumerate(sizes) for index in range(size)
    ]
    assert {task.epoch for task in tasks} == {epoch}


@given(sizes_of_tasksets, st.integers(1, 30), st.sampled_from(["sequential", "shuffle", "random"]))
def test_no_two_tasks_of_a_run_share_an_identity(sizes: list[int], batch_size: int, selector: str) -> None:
    assert max(Counter(run(sizes, batch_size, selector, num_steps=4)).values()) == 1


@given(sizes_of_tasksets, st.integers(1, 30))
def test_the_size_of_the_steps_does_not_change_the_order(sizes: list[int], batch_size: int) -> None:
    assert run(sizes, batch_size, "shuffle", 3) == run(sizes, 1, "shuffle", 3 * batch_size)


def test_a_shuffle_depends_on_seed_epoch_and_taskset() -> None:
    def order(seed: int, epoch: int, number: int) -> list[int]:
        tasks = explore_tasks(epoch + 1, sizes=[50, 50], batch_size=100, selector="shuffle", seed=seed)
        return [task.index for task in tasks if task.taskset_number == number]

    orders = [order(seed, epoch, number) for seed in (1, 2) for epoch in (0, 1) for number in (0, 1)]
    assert len({tuple(each) for each in orders}) == 8


def test_the_shuffle_is_this_one_in_every_version() -> None:
    """A resumed run must have the same order after an upgrade."""
    tasks = explore_tasks(1, sizes=[10], batch_size=10, selector="shuffle", seed=42)
    assert [task.index for task in tasks] == [0, 1, 4, 2, 6, 8, 5, 9, 7, 3]


def test_random_draws_anew_per_step_without_repeats() -> None:
    steps = [explore_tasks(k, sizes=[20], batch_size=10, selector="random", seed=7) for k in (1, 2, 3)]
    assert all(len({task.index for task in step}) == 10 for step in steps)
    assert [step[0].epoch for step in steps] == [0, 1, 2]
    assert len({task.index for step in steps[:2] for task in step}) < 20


@pytest.mark.parametrize(("step", "sizes", "batch_size"), [(0, [1], 1), (1, [], 1), (1, [3, 0], 1), (1, [3], 0)])
def test_counts_below_one_are_refused(step: int, sizes: list[int], batch_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        explore_tasks(step, sizes=sizes, batch_size=batch_size, selector="shuffle", seed=1)


def test_each_taskset_has_another_order_in_every_epoch() -> None:
    orders = [lambda epoch, random: np.array([2, 0, 1]), order_of(Shuffle(), 3)]
    steps = [explore_tasks_of(k, sizes=[3, 3], batch_size=6, orders=orders, seed=1) for k in (1, 2)]
    plain = [explore_tasks(k, sizes=[3, 3], batch_size=6, selector="shuffle", seed=1) for k in (1, 2)]
    for step, shuffled in zip(steps, plain, strict=True):
        assert [task.index for task in step if task.taskset_number == 0] == [2, 0, 1]
        assert step[1::2] == shuffled[1::2], "the other taskset is as it was"


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [1, 2, 3]])
def test_an_order_that_misses_a_task_is_refused(order: list[int]) -> None:
    with pytest.raises(ValueError, match="each of 0"):
        explore_tasks_of(1, sizes=[3], batch_size=1, orders=[lambda epoch, random: np.array(order)], seed=1)
