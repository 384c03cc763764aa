"""Promises of sample strategies and priority functions: they are found by the common rule for plug-ins, and cannot
split a group or exceed the staleness bound.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rftdask.buffer.batches.replay_priority import LinearDecay, PriorityFunction, make_replay
from rftdask.buffer.batches.selection import (
    Cursor,
    Group,
    OldestFirst,
    SampleRule,
    SampleStrategy,
    make_sample_strategy,
    select_groups,
)
from rftdask.config import check_plugins
from rftdask.errors import ConfigError, UserError
from tests.unit.config.config_cases import config, grpo, problems

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
