"""Promises of the sample rule: whole groups only, nothing staler than the bound, everything settled once."""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftdask.buffer.batches.replay_priority import LinearDecay, PriorityFunction, make_replay
from rftdask.buffer.batches.selection import (
    Cursor,
    Group,
    OldestFirst,
    Position,
    SampleRule,
    SampleStrategy,
    make_sample_strategy,
    next_positions,
    select_groups,
    staleness,
)
from rftdask.config import check_plugins
from rftdask.errors import ConfigError, UserError
from tests.numerics import shifted_seed
from tests.unit.config.config_cases import config, grpo, problems

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


REPLAY = "buffer.trainer_input.experience_buffer.replay_buffer"
ASYNC = "synchronizer.sync_style=fully_async"


class Freshest(SampleStrategy):
    def __init__(self, at_least: int = 0) -> None:
        self.at_least = at_least

    def choose(self, groups: Sequence[Group], count: int, policy_version: int) -> Sequence[Group]:
        fresh = [group for group in groups if group.min_policy_version >= self.at_least]
        return sorted(fresh, key=lambda group: -group.min_policy_version)[:count]


class Newest(PriorityFunction):
    def priorities(self, versions_N: np.ndarray, uses_N: np.ndarray, random: np.random.Generator) -> np.ndarray:
        return versions_N


NAME = f"{__name__}.Freshest"
WAITING = {(1, slot): Group((1, slot), "s", (slot,), min_policy_version=slot) for slot in range(4)}


def test_a_user_strategy_chooses_among_arrived_groups() -> None:
    rule = SampleRule(groups_per_batch=2, tasks_per_step=4, ordered=False, strategy=Freshest())
    selection = select_groups(WAITING, Cursor(), 4, rule)
    assert selection is not None
    assert [group.position for group in selection.use] == [(1, 3), (1, 2)]


def test_a_strategy_may_wait_for_better_groups() -> None:
    rule = SampleRule(groups_per_batch=2, tasks_per_step=4, ordered=False, strategy=Freshest(at_least=3))
    assert select_groups(WAITING, Cursor(), 4, rule) is None


def test_no_strategy_passes_the_staleness_bound() -> None:
    class Stalest(SampleStrategy):
        def choose(self, groups: Sequence[Group], count: int, policy_version: int) -> Sequence[Group]:
            return groups[:count]

    rule = SampleRule(2, 4, ordered=False, max_staleness=3, strategy=Stalest())
    selection = select_groups(WAITING, Cursor(), 4, rule)
    assert selection is not None
    assert [group.position for group in selection.use] == [(1, 1)]
    assert [group.position for group in selection.stale] == [(1, 0)]


def test_a_strategy_is_named_with_its_arguments() -> None:
    named = config(grpo(), ASYNC, f"algorithm.sample_strategy={NAME}")
    assert type(make_sample_strategy(named)).__name__ == "Freshest"
    loaded = config(grpo(), ASYNC, f"algorithm.sample_strategy={NAME}", "algorithm.sample_strategy_args={at_least: 2}")
    check_plugins(loaded)
    strategy = make_sample_strategy(loaded)
    assert (type(strategy).__name__, strategy.at_least) == ("Freshest", 2)  # type: ignore[attr-defined]
    assert make_sample_strategy(config(grpo())) == OldestFirst()


def test_wrong_names_and_arguments_fail_before_the_start() -> None:
    (line,) = problems(grpo(), "algorithm.sample_strategy=staleness_controll")
    assert "did you mean" in line
    assert "staleness_control" in line
    wrong = config(grpo(), ASYNC, f"algorithm.sample_strategy={NAME}", "algorithm.sample_strategy_args={at_lest: 2}")
    with pytest.raises(ConfigError, match=r"sample_strategy_args.at_lest: unknown argument; did you mean at_least"):
        check_plugins(wrong)


def test_a_strategy_that_chooses_does_not_go_with_style_fixed() -> None:
    with pytest.raises(UserError, match="does not work with sync_style fixed, because it selects"):
        make_sample_strategy(config(grpo(), "synchronizer.sync_style=fixed", f"algorithm.sample_strategy={NAME}"))


def test_a_priority_function_is_named_in_the_same_way(tmp_path: Path) -> None:
    (tmp_path / "priorities_of_mine.py").write_text(
        "from rftdask.buffer.batches.replay_priority import PriorityFunction\n"
        "class Uniform(PriorityFunction):\n"
        "    def priorities(self, versions_N, uses_N, random):\n"
        "        return random.random(len(versions_N))\n"
    )
    on = (ASYNC, f"{REPLAY}.enable=true", f"{REPLAY}.reuse_cooldown_time=1")
    for name in (f"{__name__}.Newest", "Uniform"):
        loaded = config(
            grpo(),
            *on,
            f"{REPLAY}.priority_fn={name}",
            f"{REPLAY}.priority_fn_args={{}}",
            f"explorer.plugin_dirs=[{tmp_path}]",
        )
        check_plugins(loaded)
        replay = make_replay(loaded)
        assert replay is not None
        assert type(replay.priority_fn).__name__ == name.rpartition(".")[2]
        values = replay.priorities([5, 3], [0, 1], step=4)
        assert values.tolist() == replay.priorities([5, 3], [0, 1], step=4).tolist(), "a resumed run draws the same"
    replay = make_replay(config(grpo(), *on))
    assert replay is not None
    assert replay.priority_fn == LinearDecay(2.0)


def test_the_examples_of_the_documentation_work() -> None:
    page = (Path(__file__).parents[4] / "docs/buffer.md").read_text()
    names: dict[str, type] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(block, names)
    rule = SampleRule(2, 4, ordered=False, strategy=names["Freshest"](at_least=1))
    selection = select_groups(WAITING, Cursor(), 4, rule)
    assert selection is not None
    assert [group.position for group in selection.use] == [(1, 3), (1, 2)]
    random = np.random.default_rng(0)
    values = names["Newest"]().priorities(np.array([5.0, 4.0, 5.0]), np.zeros(3), random)
    assert values.argmin() == 1
