"""Answers: the policy's answers over the steps of a run, by task, by group, and as distributions.

Pure: rows of a `Browser` in, values of a page out. Advantages are shown as reward minus group mean, before any scaling
by an algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rftdask.reports.lineage.browse import records

if TYPE_CHECKING:
    import pandas as pd

MAX_COLUMNS = 14
"""Columns of a table over steps; with more steps, a column covers several."""
_MAX_DISTRIBUTION_COLUMNS = 40
MAX_BINS = 16
_MAX_VALUES = 8
"""Up to this many distinct values each have their own row."""


class Cell(NamedTuple):
    """Answers to one task at some steps; `reward` is None if all of them failed."""

    reward: float | None
    num_answers: int


@dataclass(frozen=True)
class TaskRow:
    stage: str
    taskset: str
    task_index: int
    prompt: str
    truth: str
    cells: Sequence[Cell | None]
    """One per column of the table; None if the task has no answers at these steps."""
    answer: str
    """One of the newest answers."""
    num_unpaid: int = 0
    """Answers at all steps that equal the expected answer and got the lowest reward of their shard."""


@dataclass(frozen=True)
class TaskTable:
    """Rewards by task and step. `columns`: (first, last) step of each column; evaluations use the policy version."""

    columns: Sequence[tuple[int, int]] = ()
    rows: Sequence[TaskRow] = ()
    num_tasks: int = 0
    """Number of tasks on all pages."""
    worst: float = 0.0
    best: float = 1.0
    """Range of the rewards for the color scale; at least 0 to 1."""


TASK_ORDERS = {
    "": "taskset order",
    "lost": "largest decrease first",
    "gained": "largest increase first",
    "worst": "lowest final reward first",
}


def task_table(rows: pd.DataFrame, *, order: str = "", first: int = 0, size: int = 50) -> TaskTable:
    """Return the mean reward by step of the tasks `first` to `first + size` in the given order."""
    if not len(rows):
        return TaskTable()
    columns = step_bins(rows["explore_step"].to_numpy(), MAX_COLUMNS)
    keys = ["stage", "taskset", "task_index"]
    column = np.searchsorted([last for _, last in columns], rows["explore_step"].to_numpy())
    parts = rows.assign(column=column).groupby([*keys, "column"], sort=True)
    means = parts["reward"].agg(["mean", "size"]).reset_index()
    wide = means.pivot(index=keys, columns="column", values="mean").reindex(columns=range(len(columns)))
    sizes = means.pivot(index=keys, columns="column", values="size").reindex(columns=range(len(columns)))
    ends = wide.bfill(axis=1)[0], wide.ffill(axis=1)[len(columns) - 1]
    if order:
        by = ends[1] if order == "worst" else ends[1] - ends[0]
        wide = wide.loc[by.sort_values(ascending=order != "gained", kind="stable").index]
    newest = rows.sort_values(["explore_step", "rollout"], ascending=[False, True], kind="stable")
    texts = newest.drop_duplicates(keys).set_index(keys)[["prompt_text", "truth", "response_text", "error"]]
    task_rows, unpaid = [], rows.groupby(keys)["unpaid"].sum()
    for key, values in wide.iloc[first : first + size].iterrows():
        counts = sizes.loc[key]
        cells = [
            None if np.isnan(count) else Cell(None if np.isnan(value) else float(value), int(count))
            for value, count in zip(values, counts, strict=True)
        ]
        stage, taskset, task = key
        prompt, truth, response, error = (str(text or "") for text in texts.loc[key])
        task_rows.append(TaskRow(stage, taskset, task, prompt, truth, cells, response or error, int(unpaid.loc[key])))
    low, high = float(rows["reward"].min()), float(rows["reward"].max())
    low, high = (0.0, 1.0) if np.isnan(low) else (min(low, 0.0), max(high, 1.0))
    return TaskTable(columns, task_rows, len(wide), low, high)


def step_bins(steps: np.ndarray[Any, Any], max_bins: int) -> list[tuple[int, int]]:
    """Return (first, last) of at most `max_bins` ranges that cover the steps, with about equally many steps each."""
    distinct = np.unique(steps)
    return [(int(part[0]), int(part[-1])) for part in np.array_split(distinct, min(max_bins, len(distinct)))]


@dataclass(frozen=True)
class AnswerGroup:
    """Answers to one task in one explore step."""

    stage: str
    taskset: str
    task_index: int
    explore_step: int
    version: int
    """Newest policy version that sampled a token of the group."""
    prompt: str
    truth: str
    mean: float | None
    spread: float
    """Standard deviation of the rewards; 0 means no learning signal."""
    answers: Sequence[dict[str, Any]]
    """Rows of the browser with `minus_mean`, the best first. Identical answers with the same reward are merged; `same`
    lists their rows.
    """
    num_answers: int


def groups_of(rows: pd.DataFrame, first: int = 0, size: int = 20) -> tuple[list[AnswerGroup], int]:
    """Return the groups `first` to `first + size`, by step, and the number of all groups."""
    # A row has one line per ledger entry that names it.
    rows = rows.drop_duplicates(["stage", "shard", "row"])
    parts = rows.groupby(["explore_step", "stage", "taskset", "task_index", "shard"], sort=True)
    groups = []
    for key in list(parts.groups)[first : first + size]:
        part = parts.get_group(key)
        part = part.assign(minus_mean=part["reward"] - part["reward"].mean())
        part = part.sort_values(["reward", "rollout"], ascending=[False, True])
        step, stage, taskset, task, _ = key
        merged: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in (answers := records(part)):
            key = tuple(row.get(name) for name in ("response_text", "error", "reward", "status", "state", "reason"))
            merged.setdefault(key, {**row, "same": []})["same"].append(row)
        version, prompt, truth = max(part["max_policy_version"]), answers[0]["prompt_text"], answers[0]["truth"] or ""
        mean, spread = part["reward"].mean(), part["reward"].std(ddof=0)
        numbers = None if np.isnan(mean) else float(mean), 0.0 if np.isnan(spread) else float(spread)
        texts = (stage, taskset, task, step, version, prompt, truth)
        groups.append(AnswerGroup(*texts, *numbers, list(merged.values()), len(part)))
    return groups, len(parts)


def as_passed(rows: pd.DataFrame) -> pd.DataFrame:
    """Replace rewards of 1 or more by 1 and lower ones by 0, so that their mean is the pass rate (pass@1)."""
    return rows.assign(reward=(rows["reward"] >= 1).astype(float).where(rows["reward"].notna()))


@dataclass(frozen=True)
class Distribution:
    """Distribution of a number over the steps of a stage."""

    label: str
    stage: str
    columns: Sequence[tuple[int, int]]
    """(first, last) explore step of each column."""
    counts: Sequence[Sequence[int]]
    """[columns][bins] numbers of `of`."""
    bins: Sequence[str]
    """Label of each row, the highest values first."""
    of: str = "rollouts"

    @cached_property
    def shares(self) -> list[list[float]]:
        """[columns][bins], each column summing to 1."""
        return [[count / max(1, sum(column)) for count in column] for column in self.counts]


def _count(steps: np.ndarray[Any, Any], bins: np.ndarray[Any, Any], num_bins: int) -> tuple[list[Any], list[list[int]]]:
    """Return the columns of a distribution, and the numbers of values in each column and bin."""
    columns = step_bins(steps, _MAX_DISTRIBUTION_COLUMNS)
    counts = np.zeros((len(columns), num_bins), dtype=int)
    np.add.at(counts, (np.searchsorted([last for _, last in columns], steps), bins), 1)
    return columns, counts.tolist()


def distribution(rows: pd.DataFrame, column: str, label: str, stage: str) -> Distribution | None:
    """Return the distribution of a column by explore step, or None if it has no values."""
    rows = rows[rows["stage"] == stage].drop_duplicates(["shard", "row"]).dropna(subset=[column])
    if not len(rows):
        return None
    steps, values = rows["explore_step"].to_numpy(), rows[column].to_numpy(dtype=float)
    distinct = np.unique(values)
    if len(distinct) <= _MAX_VALUES:
        edges = np.append(distinct, np.inf)
        names = [f"{value:.4g}" for value in distinct]
    else:
        edges = np.linspace(distinct[0], distinct[-1], MAX_BINS + 1)
        if np.all(distinct == np.round(distinct)) and distinct[-1] - distinct[0] > MAX_BINS:
            edges = np.unique(np.round(edges))
        names = [f"{low:.3g} to {high:.3g}" for low, high in pairwise(edges)]
        edges[-1] = np.inf  # the last bin includes the largest value
    highest_first = len(names) - np.searchsorted(edges, values, side="right")
    return Distribution(label, stage, *_count(steps, highest_first, len(names)), bins=names[::-1])


_OUTCOMES = ("all pass: no signal", "rewards differ: learning signal", "all equal: no signal")


def group_outcomes(rows: pd.DataFrame, stage: str) -> Distribution | None:
    """Return the numbers of groups with and without a learning signal by explore step, or None if no group has two
    rewards. If all rewards of a group are equal, its advantages are 0.
    """
    rows = rows[rows["stage"] == stage].drop_duplicates(["shard", "row"]).dropna(subset=["reward"])
    groups = rows.groupby(["explore_step", "shard", "taskset", "task_index"])["reward"].agg(["min", "max", "size"])
    groups = groups[groups["size"] > 1].reset_index()
    if not len(groups):
        return None
    outcomes = np.where(groups["min"] < groups["max"], 1, np.where(groups["min"] >= 1, 0, 2))
    counted = _count(groups["explore_step"].to_numpy(), outcomes, len(_OUTCOMES))
    return Distribution("Learning signal of groups", stage, *counted, _OUTCOMES, "groups")
