"""Metric table. Promises: every metric has a formula, a unit, a direction and an existing source; a run that does not
learn triggers a one-line warning with the number, and a run that learns triggers none.
"""

import math
import re
from pathlib import Path

import pytest

import rftdask
from rftdask.reports.metric_table import DIRECTIONS, METRIC_PATTERNS, METRICS, WINDOW, Row, warn_of_learning

LEARNS = {"num_rows": 8.0, "reward_std": 0.4, "flat_groups": 0.5, "staleness_max": 0.0, "mismatch_kl": 1e-9}
EXPLORES = {"reward": 0.5, "failed": 0.1, "truncated": 0.2}


def learning(num_steps: int = 2 * WINDOW, **last: float) -> list[Row]:
    """Rows of steps that learn; `last` replaces metrics of the last WINDOW rows."""
    steps = [{**LEARNS, "reward": step / 100, "entropy": 2.0, "response_length": 40.0} for step in range(num_steps)]
    return [*steps[:-WINDOW], *({**step, **last} for step in steps[-WINDOW:])]


@pytest.mark.parametrize("name", [*METRICS, *METRIC_PATTERNS])
def test_every_metric_has_a_complete_explanation(name: str) -> None:
    metric = {**METRICS, **METRIC_PATTERNS}[name]
    assert metric.label and metric.formula and metric.unit and metric.direction in DIRECTIONS
    modules = re.findall(r"[\w/]+(?:\.py|/\w+(?=;))", metric.source)
    assert modules or re.search(r"arXiv:\d{4}\.\d{5}", metric.source)
    assert [path for path in modules if not (Path(rftdask.__file__).parent / path).exists()] == []


def test_a_learning_run_triggers_no_warning() -> None:
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
def test_a_trainer_that_does_not_learn_triggers_one_warning(last: dict[str, float], name: str, words: str) -> None:
    warnings = warn_of_learning(learning(**last), [])
    assert list(warnings) == [name]
    assert warnings[name].startswith(words) and "\n" not in warnings[name]


@pytest.mark.parametrize("name", ["failed", "truncated"])
def test_warn_when_most_rollouts_fail_or_are_truncated(name: str) -> None:
    warnings = warn_of_learning([], WINDOW * [{**EXPLORES, name: 0.75}])
    assert list(warnings) == [name] and warnings[name].startswith("75% of the rollouts of the last 5 explore steps")


def test_warn_of_expected_answers_without_reward() -> None:
    [(name, text)] = warn_of_learning([], [*WINDOW * [EXPLORES], {**EXPLORES, "unpaid_truths": 3.0}]).items()
    assert name == "unpaid_truths" and text.startswith("3 responses of the last 5 explore steps equal the expected")


def test_short_runs_odd_steps_and_stale_drift_cause_no_warning() -> None:
    assert warn_of_learning(2 * [{"reward": 0.0, "flat_groups": 1.0, "num_rows": 0.0}], 2 * [{"failed": 1.0}]) == {}
    assert warn_of_learning([*learning(), {"flat_groups": 1.0, "num_rows": 0.0, "reward": 0.0}], []) == {}
    assert warn_of_learning(learning(mismatch_kl=0.05, staleness_max=2.0), []) == {}
    assert warn_of_learning(WINDOW * [{"reward": 0.5, "flat_groups": 0.0}], []) == {}
