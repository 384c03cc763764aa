"""Metric table: explanations of every metric that the package writes (`metrics.toml`), and the rules that detect from
their values that a run does not learn.

Workflows, reward functions and operators may write further metrics; these are stored and tracked without explanation.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

Direction = Literal["up", "down", "watch"]


@dataclass(frozen=True)
class Metric:
    label: str
    formula: str
    unit: str
    direction: Direction
    """Desired direction; "watch": neither is better, but look at jumps."""
    source: str
    """Modules below rftdask/ that compute the metric and the work it follows, separated by "; "."""
    advice: str = ""
    """How to read an odd value."""


_TABLE = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text())
METRICS = {name: Metric(**fields) for name, fields in _TABLE["metrics"].items()}
METRIC_PATTERNS = {pattern: Metric(**fields) for pattern, fields in _TABLE["patterns"].items()}
"""Explanations of metrics with generated names, by the regular expression that matches the whole name."""

DIRECTIONS: dict[Direction, str] = {"up": "higher is better", "down": "lower is better", "watch": "watch for jumps"}


def explain(name: str) -> Metric | None:
    matches = (metric for pattern, metric in METRIC_PATTERNS.items() if re.fullmatch(pattern, name))
    return METRICS.get(name) or next(matches, None)


WINDOW = 5
"""Number of steps that the rules average over, so that one odd step triggers no warning."""
_MIN_STEPS = 3
"""A run with fewer steps triggers no warning."""
_MAX_LOST = 0.5
"""Fraction of failed, truncated or stale rollouts, or of steps without rows, above which a run triggers a warning."""
_COLLAPSE = 0.1
"""Entropy or response length below this fraction of its value in the first steps has collapsed."""
_MAX_MISMATCH = {True: 0.01, False: 0.1}
"""Largest mismatch in nats per token, by whether the batches are on-policy. Training itself moves the policy away from
stale batches."""
_NO_SPREAD = "the tasks are too easy or too hard, or the reward does not distinguish answers"

Row = Mapping[str, float]
"""Metrics of one step by name. A missing metric is equivalent to NaN."""


def warn_of_learning(trainer: Sequence[Row], explorer: Sequence[Row]) -> dict[str, str]:
    """Return one warning for each metric that shows that a run does not learn, keyed by the metric.

    Args: trainer, explorer: rows of the steps in order; only the first and the last WINDOW rows count.
    """
    problems: dict[str, str] = {}

    def values(rows: Sequence[Row], name: str) -> list[float]:
        return [row[name] for row in rows if not math.isnan(row.get(name, math.nan))]

    if len(last := explorer[-WINDOW:]) >= _MIN_STEPS:
        for name, advice in (
            ("failed", "see their errors in rftdask view and in log/"),
            ("truncated", "raise model.max_response_tokens, or reward shorter answers"),
        ):
            if (measured := values(last, name)) and (share := fmean(measured)) > _MAX_LOST:
                problems[name] = f"{share:.0%} of the rollouts of the last {len(last)} explore steps {name}: {advice}"
        if unpaid := sum(values(last, "unpaid_truths")):
            problems["unpaid_truths"] = (
                f"{unpaid:.0f} responses of the last {len(last)} explore steps equal the expected answer and got the "
                "lowest reward: check the reward; studio and report mark them"
            )
    # The trainer may be some steps behind the explorer.
    if len(last := trainer[-WINDOW:]) < _MIN_STEPS:
        return problems
    steps = f"the last {len(last)} steps"

    rows = values(last, "num_rows")
    # A step is empty if every group failed, was stale or was filtered.
    if (empty := rows.count(0.0)) > _MAX_LOST * len(last):
        problems["num_rows"] = f"{empty} of {steps} trained no row: rftdask status shows the reasons of dropped rows"
    # Relative to trained and stale rows only: other drops have their own reasons.
    stale = sum(values(last, "num_dropped_stale"))
    if stale > _MAX_LOST * (stale + sum(rows)):
        share = stale / (stale + sum(rows))
        problems["num_dropped_stale"] = (
            f"{share:.0%} of the rows of {steps} were dropped as stale: raise synchronizer.max_staleness, or publish "
            "weights more often (sync_interval)"
        )
    flat, rewards = values(last, "flat_groups"), values(last, "reward")
    # Identical values over several batches leave no sampling noise, so the reward itself is constant.
    if len(rewards) >= _MIN_STEPS and len(set(rewards)) == 1 and min(flat, default=1.0) == 1.0:
        problems["reward"] = f"all rewards of {steps} are {rewards[0]:.4g}: {_NO_SPREAD}"
    elif len(flat) >= _MIN_STEPS and min(flat) == 1.0:
        problems["flat_groups"] = f"100% of the groups of {steps} have no spread: {_NO_SPREAD}"

    for name, advice in (
        ("entropy", "the policy no longer explores: lower the learning rate, or raise entropy_coef"),
        ("response_length", "read the answers in rftdask view: the reward may favor empty answers"),
    ):
        first, now = values(trainer[:WINDOW], name), values(last, name)
        # The two windows must not overlap, or a short run would be compared with itself.
        if len(trainer) >= 2 * WINDOW and first and now and fmean(now) < _COLLAPSE * fmean(first):
            label = METRICS[name].label.lower()
            problems[name] = f"{label} fell from {fmean(first):.3g} to {fmean(now):.3g} {METRICS[name].unit}: {advice}"
    # Older weights sampled a stale batch, so training also contributes to the mismatch.
    on_policy = max(values(last, "staleness_max"), default=0.0) == 0.0
    mismatch = values(last, "mismatch_kl")
    # The mean over the window ignores a single odd step.
    if mismatch and fmean(mismatch) > _MAX_MISMATCH[on_policy]:
        problems["mismatch_kl"] = (
            f"mismatch_kl is {fmean(mismatch):.3g} nats per token over {steps}: the engine samples from a different "
            "policy than the trainer computes; check its dtype and docs/engines.md"
        )
    return problems
