"""Promises of explanations: every metric has a formula, a unit, a direction and a source that is there; what learns
nothing is told in a line with its number, and what learns is not.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

import rftdask
from rftdask.reports.metric_table import DIRECTIONS, FAMILIES, METRICS, WINDOW, Row, warn_of_learning

LEARNS = {"num_rows": 8.0, "reward_std": 0.4, "flat_groups": 0.5, "staleness_max": 0.0, "mismatch_kl": 1e-9}
EXPLORES = {"reward": 0.5, "failed": 0.1, "truncated": 0.2}


def learning(num_steps: int = 2 * WINDOW, **last: float) -> list[Row]:
    """Steps that learn, of which the last WINDOW have other numbers."""
    steps = [{**LEARNS, "reward": step / 100, "entropy": 2.0, "response_length": 40.0} for step in range(num_steps)]
    return [*steps[:-WINDOW], *({**step, **last} for step in steps[-WINDOW:])]


@pytest.mark.parametrize("name", [*METRICS, *FAMILIES])
def test_a_metric_is_explained_whole(name: str) -> None:
    told = {**METRICS, **FAMILIES}[name]
    assert told.label and told.formula and told.unit and told.direction in DIRECTIONS
    modules = re.findall(r"[\w/]+(?:\.py|/\w+(?=;))", told.source)
    assert modules or re.search(r"arXiv:\d{4}\.\d{5}", told.source)
    assert [each for each in modules if not (Path(rftdask.__file__).parent / each).exists()] == []


def test_a_run_that_learns_is_not_warned_of() -> None:
    assert warn_of_learning(learning(), 5 * [EXPLORES]) == {}
    assert warn_of_learning([], []) == warn_of_learning([{"loss": 1.0, "num_rows": 4.0}] * 9, []) == {}
    assert warn_of_learning(learning(entropy=math.nan, reward=math.nan), []) == {}


@pytest.mark.parametrize(
    ("last", "name", "words"),
    [
        ({"flat_groups": 1.0}, "flat_groups", "100% of the groups of the last 5 steps have no spread"),
        ({"flat_groups": 1.0, "reward": 0.0}, "reward", "all rewards of the last 5 steps are 0"),
        ({"num_rows": 0.0}, "num_rows", "5 of the last 5 steps trained no row"),
        ({"num_dropped_stale": 24.0}, "num_dropped_stale", "75% of the rows of the last 5 steps were dropped as stale"),
        ({"entropy": 0.1}, "entropy", "entropy fell from 2 to 0.1 nats per token"),
        ({"response_length": 1.0}, "response_length", "response length fell from 40 to 1 tokens"),
        ({"mismatch_kl": 0.05}, "mismatch_kl", "mismatch_kl is 0.05 nats per token over the last 5 steps"),
        ({"mismatch_kl": 0.5, "staleness_max": 3.0}, "mismatch_kl", "mismatch_kl is 0.5 nats"),
    ],
)
def test_a_trainer_that_learns_nothing_is_told_with_the_number(last: dict[str, float], name: str, words: str) -> None:
    found = warn_of_learning(learning(**last), [])
    assert list(found) == [name]
    assert found[name].startswith(words) and "\n" not in found[name]


@pytest.mark.parametrize("name", ["failed", "truncated"])
def test_most_rollouts_failed_or_truncated_is_told(name: str) -> None:
    found = warn_of_learning([], WINDOW * [{**EXPLORES, name: 0.75}])
    assert list(found) == [name] and found[name].startswith("75% of the rollouts of the last 5 explore steps")


def test_few_steps_one_odd_step_and_drift_of_stale_batches_are_no_warning() -> None:
    assert warn_of_learning(2 * [{"reward": 0.0, "flat_groups": 1.0, "num_rows": 0.0}], 2 * [{"failed": 1.0}]) == {}
    assert warn_of_learning([*learning(), {"flat_groups": 1.0, "num_rows": 0.0, "reward": 0.0}], []) == {}
    assert warn_of_learning(learning(mismatch_kl=0.05, staleness_max=2.0), []) == {}
    assert warn_of_learning(WINDOW * [{"reward": 0.5, "flat_groups": 0.0}], []) == {}
