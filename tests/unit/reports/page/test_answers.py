"""Answers over the steps of a run. Promises: a cell is the mean of the existing rewards; the answers of a group are
together, with their rewards minus the mean; a distribution counts every rollout once.
"""

import numpy as np
import pandas as pd
import pytest

from rftdask.reports.page.answers import Cell, as_passed, distribution, group_outcomes, groups_of, step_bins, task_table


def rows_of(*answers: tuple[int, int, int, float | None]) -> pd.DataFrame:
    """answers: (explore step, task, rollout, reward)."""
    frame = pd.DataFrame(answers, columns=["explore_step", "task_index", "rollout", "reward"])
    return frame.assign(
        stage="rl",
        taskset="sums",
        shard="shard-" + frame["explore_step"].astype(str),
        row=range(len(frame)),
        max_policy_version=frame["explore_step"] - 1,
        prompt_text="task " + frame["task_index"].astype(str),
        response_text="at " + frame["explore_step"].astype(str),
        truth="",
        error="",
        status="ok",
        unpaid=frame["reward"] < 0,
    )


LEARNS = rows_of(
    (1, 0, 0, 0.0), (1, 0, 1, 1.0), (1, 1, 0, 1.0), (1, 1, 1, np.nan), (2, 0, 0, 1.0), (2, 1, 0, 0.0), (2, 2, 0, np.nan)
)  # fmt: skip


def test_a_cell_is_the_mean_of_the_existing_rewards():
    table = task_table(LEARNS)
    assert list(table.columns) == [(1, 1), (2, 2)] and table.num_tasks == 3
    assert [row.cells for row in table.rows] == [
        [Cell(0.5, 2), Cell(1.0, 1)],
        [Cell(1.0, 2), Cell(0.0, 1)],
        [None, Cell(None, 1)],
    ]
    assert [row.answer for row in table.rows] == ["at 2", "at 2", "at 2"]
    assert (table.worst, table.best) == (0.0, 1.0)


@pytest.mark.parametrize(("order", "first"), [("", 0), ("lost", 1), ("gained", 0), ("worst", 1)])
def test_tasks_are_ordered_by_their_rewards(order, first):
    assert task_table(LEARNS, order=order).rows[0].task_index == first


def test_tasks_are_cut_into_pages():
    table = task_table(LEARNS, first=1, size=1)
    assert ([row.task_index for row in table.rows], table.num_tasks) == ([1], 3)


def test_nothing_gives_an_empty_table():
    assert task_table(LEARNS.iloc[:0]).rows == ()
    assert groups_of(LEARNS.iloc[:0]) == ([], 0)
    assert distribution(LEARNS.iloc[:0], "reward", "Reward", "rl") is None


def test_many_steps_are_binned_without_loss():
    bins = step_bins(np.array([3, 1, 1, 2, 50, 51, 90]), 3)
    assert bins == [(1, 2), (3, 50), (51, 90)]
    rows = rows_of(*((step, 0, 0, float(step % 2)) for step in range(1, 101)))
    cells = task_table(rows).rows[0].cells
    assert sum(cell.num_answers for cell in cells) == 100


def test_answers_of_a_group_are_sorted_by_reward():
    (first, second, *_), count = groups_of(LEARNS)
    assert count == 5
    assert (first.explore_step, first.task_index, first.version, first.mean, first.spread) == (1, 0, 0, 0.5, 0.5)
    assert [(row["rollout"], row["minus_mean"]) for row in first.answers] == [(1, 0.5), (0, -0.5)]
    # The mean excludes failed rollouts.
    assert second.mean == 1.0 and [row["minus_mean"] for row in second.answers] == [0.0, None]


def test_identical_answers_with_the_same_reward_are_merged():
    rows = rows_of((1, 0, 0, 1.0), (1, 0, 1, 1.0), (1, 0, 2, 0.0))
    ([group], _) = groups_of(rows)
    assert [(row["reward"], [twin["rollout"] for twin in row["same"]]) for row in group.answers] == [
        (1.0, [0, 1]),
        (0.0, [2]),
    ]
    assert group.num_answers == 3


def test_a_row_in_two_ledger_entries_is_one_answer():
    twice = pd.concat([LEARNS, LEARNS])
    assert [group.num_answers for group in groups_of(twice)[0]] == [2, 2, 1, 1, 1]
    drawn = distribution(twice, "reward", "Reward", "rl")
    assert drawn is not None and sum(map(sum, drawn.counts)) == 5


def test_few_values_have_one_row_each_the_highest_first():
    drawn = distribution(LEARNS, "reward", "Reward", "rl")
    assert drawn is not None
    assert (drawn.bins, drawn.columns, drawn.counts) == (["1", "0"], [(1, 1), (2, 2)], [[2, 1], [1, 1]])
    assert drawn.shares[0] == [2 / 3, 1 / 3]


def test_many_values_are_binned_without_loss():
    rows = rows_of(*((1, n, 0, n / 7) for n in range(100)))
    drawn = distribution(rows, "reward", "Reward", "rl")
    assert drawn is not None and sum(drawn.counts[0]) == 100
    assert len(drawn.bins) == 16 and min(drawn.counts[0]) >= 5


def test_groups_without_spread_have_no_learning_signal():
    rows = rows_of(
        *((1, 0, n, 1.0) for n in range(2)),  # all pass
        *((1, 1, n, float(n)) for n in range(2)),  # they differ
        *((2, 0, n, 0.5) for n in range(2)),  # all equal
        (2, 1, 0, 0.0),  # a single rollout
        (2, 2, 0, 1.0),
        (2, 2, 1, None),  # a single rollout and a failed one
    )
    drawn = group_outcomes(rows, "rl")
    assert drawn is not None
    assert (drawn.columns, drawn.counts, drawn.of) == ([(1, 1), (2, 2)], [[1, 1, 0], [0, 0, 1]], "groups")
    assert group_outcomes(rows[rows["task_index"] == 7], "rl") is None


def test_a_pass_is_a_reward_of_one_or_more():
    passed = as_passed(rows_of((1, 0, 0, 1.0), (1, 0, 1, 0.99), (1, 0, 2, 2.0), (1, 0, 3, None)))
    assert passed["reward"].fillna(-1).tolist() == [1.0, 0.0, 1.0, -1.0]
