"""Plots. Promises: each stage has its own panel and steps, and every point is a measured value."""

import math

import pytest

from rftdask.monitor.metrics import MetricsRow, rows_to_frame
from rftdask.reports.charts import CHARTS, Panel, panels_of, plot_metrics
from rftdask.reports.metric_table import METRICS

REWARD, ACCURACY, LOSS = (
    next(chart for chart in CHARTS if chart.metric == name) for name in ("reward", "accuracy", "loss")
)


def stage(num_steps: int, **metrics: float):
    rows = [MetricsRow("trainer", step, step, {}, metrics) for step in range(1, num_steps + 1)]
    rows += [
        MetricsRow("eval", step, step, {"taskset": name}, {"accuracy": step / 100})
        for step in (0, num_steps)
        for name in ("easy", "hard")
    ]
    return rows_to_frame(rows)


STAGES = [("warmup", stage(10, loss=2.0)), ("rl", stage(50, loss=0.1, reward=0.5, own_metric=1.0))]


def test_each_stage_has_its_own_panel_and_steps():
    (reward,) = panels_of(REWARD, STAGES)
    assert reward == Panel("rl", {"": (list(range(1, 51)), [0.5] * 50)})
    warmup, rl = panels_of(ACCURACY, STAGES)
    assert warmup == Panel("warmup", {"easy": ([0, 10], [0.0, 0.1]), "hard": ([0, 10], [0.0, 0.1])})
    assert rl.curves["hard"] == ([0, 50], [0.0, 0.5])
    # Panels have equal width whatever their steps, and the values of a stage are one curve with or without tags.
    sft, grpo = [axes for axes in plot_metrics(STAGES).axes if axes.get_xlabel() == "optimizer step"][1:]
    assert sft.get_position().width == pytest.approx(grpo.get_position().width, rel=0.1)
    untagged = rows_to_frame([MetricsRow("trainer", 1, 1.0, {}, {"loss": 2.0})])
    assert [list(panel.curves) for panel in panels_of(LOSS, [("warmup", untagged), STAGES[1]])] == [[""], [""]]


def test_plot_the_trainer_s_reward_if_both_roles_have_one():
    rows = [MetricsRow(role, 1, 1.0, {}, {"reward": value}) for role, value in (("explorer", 0.1), ("trainer", 0.2))]
    assert panels_of(REWARD, [("", rows_to_frame(rows))])[0].curves == {"": ([1], [0.2])}
    assert panels_of(REWARD, [("", rows_to_frame(rows[:1]))])[0].curves == {"": ([1], [0.1])}


def test_missing_values_leave_no_point():
    rows = [MetricsRow("trainer", step, 1.0, {}, {"reward": value}) for step, value in ((1, 0.5), (2, math.nan))]
    assert panels_of(REWARD, [("", rows_to_frame(rows))])[0].curves == {"": ([1], [0.5])}
    assert panels_of(ACCURACY, [("", rows_to_frame(rows))]) == []


def test_a_plot_has_one_part_per_measured_metric():
    parts = plot_metrics(STAGES[1:2]).subfigs
    titles = [part.get_suptitle() for part in parts if part.axes]
    assert titles == ["Reward (reward units)", "Accuracy (fraction, 0 to 1)", "Loss (nats)"]
    assert plot_metrics([("", rows_to_frame([]))]).axes == []


def test_every_chart_is_explained():
    assert {chart.metric for chart in CHARTS} <= METRICS.keys()
