"""Promises of the sample rule: whole groups only, nothing staler than the bound, everything settled once."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftdask.buffer.batches.selection import (
    Cursor,
    Group,
    Position,
    SampleRule,
    next_positions,
    select_groups,
    staleness,
)
from tests.numerics import shifted_seed

TASKS = 4


def group(step: int, slot: int, *, rows: int = 2, version: int = 0) -> Group:
    return Group((step, slot), f"shard {step}", tuple(range(rows)), min_policy_version=version)


def waiting(*groups: Group) -> dict[Position, Group]:
    return {g.position: g for g in groups}


def rule(groups: int = 2, *, ordered: bool = True, max_staleness: int | None = None) -> SampleRule:
    return SampleRule(groups, TASKS, ordered, max_staleness)


def test_ordered_waits_for_the_very_positions_that_are_next() -> None:
    there = waiting(group(1, 0), group(1, 2), group(1, 3), group(2, 0))
    assert select_groups(there, Cursor(), 0, rule()) is None
    there[1, 1] = group(1, 1)
    selection = select_groups(there, Cursor(), 0, rule())
    assert selection is not None
    assert selection.settled == ((1, 0), (1, 1))


def test_an_unordered_rule_takes_the_oldest_arrived_groups() -> None:
    there = waiting(group(2, 0), group(1, 3), group(5, 1))
    selection = select_groups(there, Cursor(), 0, rule(ordered=False))
    assert selection is not None
    assert selection.settled == ((1, 3), (2, 0))


@pytest.mark.parametrize("ordered", [True, False])
def test_a_group_that_failed_leaves_its_batch_smaller(ordered: bool) -> None:
    there = waiting(group(1, 0, rows=0), group(1, 1), group(1, 2))
    selection = select_groups(there, Cursor(), 0, rule(ordered=ordered))
    assert selection is not None
    assert [g.position for g in selection.use] == [(1, 1)]
    assert [g.position for g in selection.empty] == [(1, 0)]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_group_that_is_too_stale_is_set_aside(ordered: bool) -> None:
    low = 5  # four steps of four groups before: eight batches of two
    there = waiting(group(5, 0, version=5), group(5, 1, version=6), group(5, 2, version=6))
    selection = select_groups(there, Cursor(low), 8, rule(ordered=ordered, max_staleness=2))
    assert selection is not None
    assert [g.position for g in selection.stale] == [(5, 0)]
    assert [g.position for g in selection.use] == [(5, 1)]


def test_a_batch_of_only_stale_groups_is_settled_unused() -> None:
    there = waiting(group(3, 0), group(3, 1))
    selection = select_groups(there, Cursor(low=3), 4, rule(ordered=False, max_staleness=2))
    assert selection is not None
    assert (selection.use, len(selection.stale)) == ((), 2)


def test_staleness_counts_steps_between_sampling_and_training() -> None:
    assert staleness(policy_version=7, min_policy_version=5) == 2


@st.composite
def groups(draw: Any) -> dict[Position, Group]:
    positions = draw(st.sets(st.tuples(st.integers(1, 5), st.integers(0, TASKS - 1)), max_size=14))
    return {
        p: Group(p, f"shard {p[0]}", tuple(range(draw(st.integers(0, 2)))), (), draw(st.integers(0, 9)))
        for p in positions
    }


@given(groups(), st.integers(1, 4), st.booleans(), st.none() | st.integers(0, 5), st.integers(0, 12))
def test_used_groups_are_whole_fresh_and_settled_once(
    there: dict[Position, Group], size: int, ordered: bool, bound: int | None, version: int
) -> None:
    before = dict(there)
    cursor = Cursor()
    cursor.settle([(0, 0), (9, 0)], TASKS)
    selection = select_groups(there, cursor, version, rule(size, ordered=ordered, max_staleness=bound))
    assert there == before
    if selection is None:
        return
    assert len(set(selection.settled)) == len(selection.settled) >= 1
    for g in selection.use:
        assert there[g.position] is g
        assert g.trainable_rows
        assert bound is None or staleness(version, g.min_policy_version) <= bound
    assert all(staleness(version, g.min_policy_version) > (bound or 0) for g in selection.stale)
    assert all(not g.trainable_rows for g in selection.empty)


@given(groups(), st.integers(1, 4), st.booleans())
def test_too_few_groups_make_no_batch(there: dict[Position, Group], size: int, ordered: bool) -> None:
    few = dict(sorted(there.items())[: size - 1])
    assert select_groups(few, Cursor(), 0, rule(size, ordered=ordered)) is None


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, TASKS - 1)), unique=True), st.integers(0, 2**32))
def test_a_cursor_is_the_set_of_settled_positions(positions: list[Position], seed: int) -> None:
    cursor, naive = Cursor(), set()
    random.Random(shifted_seed(seed)).shuffle(positions)
    while positions:
        some = [positions.pop() for _ in range(min(3, len(positions)))]
        cursor.settle(some, TASKS)
        naive.update(some)
        for step in range(1, 8):
            for slot in range(TASKS):
                assert ((step, slot) in cursor) == ((step, slot) in naive)
        assert any((cursor.low, slot) not in naive for slot in range(TASKS)), "low moves on as soon as it can"
        assert Cursor.from_state_dict(cursor.state_dict()) == cursor
        expected = [(s, t) for s in range(1, 20) for t in range(TASKS) if (s, t) not in naive][:5]
        assert next_positions(cursor, 5, TASKS) == expected


def test_a_cursor_forgets_fully_settled_steps() -> None:
    cursor = Cursor()
    cursor.settle([(2, slot) for slot in range(TASKS)], TASKS)
    assert (cursor.low, len(cursor.beyond)) == (1, 4)
    cursor.settle([(1, slot) for slot in range(TASKS)], TASKS)
    assert (cursor.low, cursor.beyond) == (3, set())
    cursor.settle([(1, 0)], TASKS)
    assert (cursor.low, cursor.beyond) == (3, set())
