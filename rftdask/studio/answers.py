"""Answers: what the policy said over the steps of a run: task by task, side by side, and as distributions.

Pure: rows of a `Browser` in, values of a page out. An advantage is told as the distance of a reward to the mean of its
group, which is what it is before an algorithm scales it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rftdask.reports.lineage.browse import records

if TYPE_CHECKING:
    import pandas as pd

MOST_COLUMNS = 14
"""Of a table over steps; steps beyond are put together."""
MOST_BINS = 16
_MOST_VALUES = 8
"""With at most so many different values each has a row of its own."""


class Cell(NamedTuple):
    """The answers to one task at some steps; `reward` is None where all of them failed."""

    reward: float | None
    num_answers: int


@dataclass(frozen=True)
class TaskRow:
    """One task and how its answers did."""

    stage: str
    taskset: str
    task_index: int
    prompt: str
    truth: str
    cells: Sequence[Cell | None]
    """One for each column of the table; None where the task was not asked then."""
    answer: str
    """One of its last."""


@dataclass(frozen=True)
class TaskTable:
    """Tasks by steps. `columns`: (first, last) step of each; of evaluations a step is the policy version."""

    columns: Sequence[tuple[int, int]] = ()
    rows: Sequence[TaskRow] = ()
    num_tasks: int = 0
    """Of all pages."""
    worst: float = 0.0
    best: float = 1.0
    """Range of the rewards, for colors; at least 0 to 1."""


TASK_ORDERS = {
    "": "as in the taskset",
    "lost": "unlearned most first",
    "gained": "learned most first",
    "worst": "worst at the end first",
}


def task_table(rows: pd.DataFrame, *, order: str = "", first: int = 0, size: int = 50) -> TaskTable:
    """Mean reward of each task by step, for the tasks `first` to `first + size` in that order."""
    if not len(rows):
        return TaskTable()
    columns = step_bins(rows["explore_step"].to_numpy(), MOST_COLUMNS)
    keys = ["stage", "taskset", "task_index"]
    column = np.searchsorted([last for _, last in columns], rows["explore_step"].to_numpy())
    parts = rows.assign(column=column).groupby([*keys, "column"], sort=True)
    means = parts["reward"].agg(["mean", "size"]).reset_index()
    wide = means.pivot(index=keys, columns="column", values="mean").reindex(columns=range(len(columns)))
    sizes = means.pivot(index=keys, columns="column", values="size").reindex(columns=range(len(columns)))
    ends = wide.bfill(axis=1)[0], wide.ffill(axis=1)[len(columns) - 1]
    gain = ends[1] - ends[0]
    match order:
        case "lost":
            wide = wide.loc[gain.sort_values(kind="stable").index]
        case "gained":
            wide = wide.loc[gain.sort_values(ascending=False, kind="stable").index]
        case "worst":
            wide = wide.loc[ends[1].sort_values(kind="stable").index]
    newest = rows.sort_values(["explore_step", "rollout"], ascending=[False, True], kind="stable")
    texts = newest.drop_duplicates(keys).set_index(keys)[["prompt_text", "truth", "response_text", "error"]]
    found = []
    for key, values in wide.iloc[first : first + size].iterrows():
        counts = sizes.loc[key]
        cells = [
            None if np.isnan(count) else Cell(None if np.isnan(value) else float(value), int(count))
            for value, count in zip(values, counts, strict=True)
        ]
        stage, taskset, task = key
        prompt, truth, response, error = (str(text or "") for text in texts.loc[key])
        found.append(TaskRow(str(stage), str(taskset), int(task), prompt, truth, cells, response or error))
    low, high = float(rows["reward"].min()), float(rows["reward"].max())
    # Nothing but failures has neither.
    low, high = (0.0, 1.0) if np.isnan(low) else (min(low, 0.0), max(high, 1.0))
    return TaskTable(columns, found, len(wide), low, high)


def step_bins(steps: np.ndarray[Any, Any], most: int) -> list[tuple[int, int]]:
    """(first, last) of at most `most` ranges that hold all of these steps, each with about as many different ones."""
    parts = np.array_split(np.unique(steps), min(most, len(np.unique(steps))))
    return [(int(part[0]), int(part[-1])) for part in parts]


@dataclass(frozen=True)
class Group:
    """Sibling answers: one task, one visit."""

    stage: str
    taskset: str
    task_index: int
    explore_step: int
    version: int
    """Newest weights that sampled a token of it."""
    prompt: str
    truth: str
    mean: float | None
    spread: float
    """Standard deviation of the rewards; 0 teaches nothing."""
    answers: Sequence[dict[str, Any]] = field(default_factory=list)
    """Rows of the browser with `minus_mean`, the best first. Siblings that say the same and have the same reward are
    one, whose `same` are the rows of all of them.
    """
    num_answers: int = 0


def groups_of(rows: pd.DataFrame, first: int = 0, size: int = 20) -> tuple[list[Group], int]:
    """Groups `first` to `first + size`, by step, and how many there are."""
    # A row that several ledger entries name has several lines.
    rows = rows.drop_duplicates(["stage", "shard", "row"])
    keys = ["explore_step", "stage", "taskset", "task_index", "shard"]
    parts = rows.groupby(keys, sort=True)
    wanted = list(parts.groups)[first : first + size]
    found = []
    for key in wanted:
        part = parts.get_group(key)
        part = part.assign(minus_mean=part["reward"] - part["reward"].mean())
        part = part.sort_values(["reward", "rollout"], ascending=[False, True])
        step, stage, taskset, task, _ = key
        head, mean = part.iloc[0], part["reward"].mean()
        spread = part["reward"].std(ddof=0)
        merged: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in records(part):
            told = ("response_text", "error", "reward", "status", "state", "reason")
            key = tuple(row.get(name) for name in told)
            merged.setdefault(key, {**row, "same": []})["same"].append(row)
        found.append(
            Group(
                str(stage),
                str(taskset),
                int(task),
                int(step),
                int(part["max_policy_version"].max()),
                str(head["prompt_text"]),
                str(head["truth"] or ""),
                None if np.isnan(mean) else float(mean),
                0.0 if np.isnan(spread) else float(spread),
                list(merged.values()),
                len(part),
            )
        )
    return found, len(parts)


def as_passed(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with 1 in place of a reward of 1 or more, and 0 of a lower one: their mean is a pass rate, as pass@1."""
    return rows.assign(reward=(rows["reward"] >= 1).astype(float).where(rows["reward"].notna()))


@dataclass(frozen=True)
class Distribution:
    """How one number was distributed over the steps of a stage."""

    label: str
    stage: str
    columns: Sequence[tuple[int, int]]
    """(first, last) explore step of each column."""
    bins: Sequence[str]
    """What each row holds, the highest values first."""
    counts: Sequence[Sequence[int]]
    """[columns][bins] answers, or what `of` says."""
    of: str = "rollouts"

    @cached_property
    def shares(self) -> list[list[float]]:
        """[columns][bins], each column summing to 1."""
        return [[count / max(1, sum(column)) for count in column] for column in self.counts]


def distribution(
    rows: pd.DataFrame, column: str, label: str, stage: str, most_columns: int = 40
) -> Distribution | None:
    """Of the values of one column by explore step; None where there are none."""
    rows = rows[rows["stage"] == stage].drop_duplicates(["shard", "row"]).dropna(subset=[column])
    if not len(rows):
        return None
    steps, values = rows["explore_step"].to_numpy(), rows[column].to_numpy(dtype=float)
    columns = step_bins(steps, most_columns)
    different = np.unique(values)
    if len(different) <= _MOST_VALUES:
        edges = np.append(different, np.inf)
        names = [f"{value:.4g}" for value in different]
    else:
        edges = np.linspace(different[0], different[-1], MOST_BINS + 1)
        if np.all(different == np.round(different)) and different[-1] - different[0] > MOST_BINS:
            edges = np.unique(np.round(edges))
        names = [f"{low:.3g} to {high:.3g}" for low, high in pairwise(edges)]
        edges[-1] = np.inf  # the largest belongs to the last bin
    place = np.searchsorted([last for _, last in columns], steps)
    counts = np.zeros((len(columns), len(names)), dtype=int)
    np.add.at(counts, (place, np.searchsorted(edges, values, side="right") - 1), 1)
    return Distribution(label, stage, columns, names[::-1], counts[:, ::-1].tolist())


_OUTCOMES = ("all pass: nothing to learn", "rewards differ: it teaches", "all alike: nothing to learn")


def group_outcomes(rows: pd.DataFrame, stage: str, most_columns: int = 40) -> Distribution | None:
    """Whether the groups of each explore step can teach something: without spread every advantage is 0. None where no
    group has two rewards.
    """
    rows = rows[rows["stage"] == stage].drop_duplicates(["shard", "row"]).dropna(subset=["reward"])
    groups = rows.groupby(["explore_step", "shard", "taskset", "task_index"])["reward"].agg(["min", "max", "size"])
    groups = groups[groups["size"] > 1].reset_index()
    if not len(groups):
        return None
    columns = step_bins(groups["explore_step"].to_numpy(), most_columns)
    place = np.searchsorted([last for _, last in columns], groups["explore_step"].to_numpy())
    is_flat, passes = groups["min"] == groups["max"], groups["min"] >= 1
    counts = np.zeros((len(columns), len(_OUTCOMES)), dtype=int)
    np.add.at(counts, (place, np.where(~is_flat, 1, np.where(passes, 0, 2))), 1)
    return Distribution("Groups: what they teach", stage, columns, _OUTCOMES, counts.tolist(), "groups")
