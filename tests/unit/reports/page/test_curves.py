"""Curves of runs. Promises: values were written by a role, or are means of neighbors; each stage has its own steps;
runs that differ only in their seed form one arm.
"""

import itertools
import math

import pytest

from rftdask.monitor.metrics import MACHINE, MetricsWriter
from rftdask.reports.metric_table import explain
from rftdask.reports.page.curves import (
    MAX_POINTS,
    SECTIONS,
    Span,
    arms_of,
    charts_of,
    curves_of,
    differing_contents,
    differing_settings,
    timeline_of,
    trace_events,
)
from rftdask.reports.run_reader import StageReader
from rftdask.storage import open_storage
from tests.unit.reports.lineage.lineage_cases import make_config

_numbers = itertools.count()


def make_stage(name: str, began_s: float, num_steps: int, **metrics: float) -> StageReader:
    storage = open_storage(f"memory://curves-{next(_numbers)}")
    times = itertools.count()
    with MetricsWriter(storage, "trainer", clock=lambda: began_s + next(times)) as trainer:
        for step in range(1, num_steps + 1):
            trainer.write(step, {"num_tokens": 10.0, "loss": 1.0 / step, **metrics})
    return StageReader(make_config("runs", name=name), storage)


def test_steps_restart_per_stage_but_time_and_tokens_continue():
    first, second = curves_of([make_stage("a", 100.0, 2), make_stage("b", 200.0, 2)])
    assert (first["stage"], second["stage"]) == ("a", "b")
    assert first["x"]["trainer"] == {
        "step": [1, 2],
        "time": [0.0, first["x"]["trainer"]["time"][1]],
        "tokens": [10, 20],
    }
    assert second["x"]["trainer"]["step"] == [1, 2] and second["x"]["trainer"]["tokens"] == [30, 40]
    assert second["x"]["trainer"]["time"][0] == 100.0
    assert first["y"]["trainer.loss"] == {"trainer": [1.0, 0.5]}


def test_a_run_without_stages_is_named_after_its_algorithm():
    (stage,) = curves_of([make_stage("own name", 0.0, 1)])
    assert stage["stage"] == "grpo"


def test_only_accuracies_have_a_standard_error():
    stage = make_stage("a", 0.0, 1)
    with MetricsWriter(stage.storage, "eval") as evals:
        evals.write(0, {"accuracy": 0.5, "num_rollouts": 100.0}, taskset="held_out")
        evals.write(2, {"accuracy": 1.0, "num_rollouts": 100.0}, taskset="held_out")
        evals.write(4, {"accuracy": 0.5, "num_rollouts": 400.0, "accuracy/count": 100.0}, taskset="held_out")
        evals.write(2, {"accuracy": 0.5}, taskset="other")
    (curves,) = curves_of([stage])
    assert curves["error"] == {"eval.accuracy": {"eval/held_out": [0.05, 0.0, 0.05]}}


def test_machine_curves_are_plotted_over_completed_steps():
    stage = make_stage("a", 100.0, 3)
    with MetricsWriter(stage.storage, MACHINE, clock=lambda: 101.5) as machines:
        for name in ("trainer-0", "explorer-0"):
            machines.write(101, {"host_cpu": 0.5}, process=name, host="h")
    (curves,) = curves_of([stage])
    assert curves["y"]["machine.host_cpu"] == {"machine/explorer-0": [0.5], "machine/trainer-0": [0.5]}
    # The rows of steps 1, 2, 3 were written at 101, 102, 103 by a clock that advances at event call.
    assert curves["x"]["machine/trainer-0"]["step"] == [pytest.approx(1.5, abs=1)]
    assert stage.span[1] < 110
    sections = {chart["key"]: chart["section"] for chart in charts_of([stage])}
    assert sections["machine.host_cpu"] == "How busy are the machines?"


def test_nan_and_infinity_are_gaps():
    (stage,) = curves_of([make_stage("a", 0.0, 2, reward=math.nan, grad_norm=math.inf)])
    assert "trainer.reward" not in stage["y"]
    stage_with_some = make_stage("b", 0.0, 1, reward=1.0)
    with MetricsWriter(stage_with_some.storage, "trainer", clock=lambda: 50.0) as trainer:
        trainer.write(2, {"loss": 0.1})
    (stage,) = curves_of([stage_with_some])
    assert stage["y"]["trainer.reward"] == {"trainer": [1.0, None]}


def test_a_long_curve_has_means_of_neighbors():
    (stage,) = curves_of([make_stage("a", 0.0, 2 * MAX_POINTS + 2)])
    assert stage["mean_of"] == 3 and len(stage["y"]["trainer.loss"]["trainer"]) <= MAX_POINTS
    assert stage["x"]["trainer"]["step"][:2] == [2.0, 5.0]
    assert stage["y"]["trainer.loss"]["trainer"][0] == float(f"{(1 + 1 / 2 + 1 / 3) / 3:.6g}")


def test_draw_the_trainer_s_value_before_the_explorer_s():
    stage = make_stage("a", 0.0, 2, reward=0.5)
    with MetricsWriter(stage.storage, "explorer") as explorer:
        explorer.write(1, {"reward": 0.4, "own/metric": 1.0})
    charts = {chart["key"]: chart for chart in charts_of([stage])}
    assert charts["trainer.reward"]["section"] == "Does it learn?"
    assert charts["explorer.reward"]["section"] == charts["explorer.own/metric"]["section"] == "Everything else"
    assert charts["trainer.reward"]["direction"] == "higher is better"
    assert "workflow" in charts["explorer.own/metric"]["formula"]


def test_every_charted_metric_is_explained():
    placed = {name.rpartition(".")[2] for names in SECTIONS.values() for name in names}
    assert {metric for metric in placed if explain(metric) is None} == set()


def test_compare_settings_but_not_names():
    one = make_config("runs", name="one", seed=1)
    two = make_config("elsewhere", name="two", seed=2, algorithm={"repeat_times": 4})
    assert differing_settings([one, two]) == {
        "seed": [1, 2],
        "algorithm.repeat_times": [2, 4],
        "buffer.train_batch_size": [8, 16],  # derived from repeat_times
    }
    assert differing_settings([one, one]) == {}


def test_an_added_taskset_does_not_change_the_keys_of_others():
    def config(*names: str):
        sets = [{"name": name, "path": f"{name}.jsonl"} for name in names]
        return make_config("runs", buffer={"batch_size": 4, "explorer_input": {"tasksets": sets}})

    differing = differing_settings([config("b"), config("a", "b")])
    assert differing and all(".a." in key for key in differing), differing


def test_compare_the_fingerprints_that_both_runs_have():
    first = {"sources": {"rewards": "a" * 64, "tools": "t"}, "tasksets": {"sums": "x"}, "versions": {"torch": "2.13.0"}}
    second = {"sources": {"rewards": "b" * 64}, "tasksets": {"sums": "x"}, "versions": {"torch": "2.13.1"}}
    assert differing_contents([first, second]) == {
        "sources.rewards": ["a" * 12, "b" * 12],
        "versions.torch": ["2.13.0", "2.13.1"],
    }
    assert differing_contents([first, first]) == differing_contents([first, {}]) == {}


def test_seeds_of_one_setting_are_one_arm():
    names = ["a", "b", "c", "d"]
    differing = {"seed": [1, 2, 1, 2], "algorithm.optimizer.lr": [1e-3, 1e-3, 1e-4, 1e-4]}
    assert arms_of(names, differing) == ["lr=0.001", "lr=0.001", "lr=0.0001", "lr=0.0001"]
    assert arms_of(names[:2], {"seed": [1, 2]}) == ["all seeds", "all seeds"]
    # One arm per run: nothing to merge, or a seed occurs twice.
    assert arms_of(names[:2], {"algorithm.optimizer.lr": [1e-3, 1e-4]}) == ["a", "b"]
    assert arms_of(names[:2], {}) == ["a", "b"]
    long = {"seed": [1, 2, 1, 2], "format": ["x" * 80, "x" * 80, "y" * 80, "y" * 80]}
    assert arms_of(names, long) == ["like a", "like a", "like c", "like c"]


def test_a_timeline_has_the_activities_of_each_role():
    stage = make_stage("a", 0.0, 0)
    with MetricsWriter(stage.storage, "trainer", clock=iter((110.0, 110.0, 120.0, 120.0)).__next__) as trainer:
        trainer.write(1, {"step_s": 10.0, "wait_s": 4.0, "train_s": 5.0, "publish_s": 1.0, "checkpoint_s": 0.0})
        trainer.write(2, {"step_s": 10.0, "wait_s": 0.0, "train_s": 10.0, "publish_s": math.nan})
    with MetricsWriter(stage.storage, "explorer", clock=lambda: 104.0) as explorer:
        explorer.write(1, {"step_s": 6.0, "generate_s": 6.0, "wait_s": 3.0, "load_s": math.nan})
    lanes, seconds = timeline_of(stage)
    assert seconds == 20.0
    assert lanes == {
        "trainer": [
            Span("publish", 9.0, 10.0, 1),
            Span("train", 4.0, 9.0, 1),
            Span("wait", 0.0, 4.0, 1),
            Span("train", 10.0, 20.0, 2),
        ],
        # Parallel work units: 9 s in 6 s of time, the first 2 of them before the timeline.
        "explorer": [Span("generate", 0.0, 4.0, 1)],
    }
    assert timeline_of(make_stage("b", 0.0, 0)) == ({}, 0.0)
    # Chrome trace: a process, two threads, and the same spans in microseconds.
    events = trace_events([make_stage("b", 0.0, 0), stage])
    assert [(event["pid"], event["tid"], event["args"]["name"]) for event in events if event["ph"] == "M"] == [
        *((2, 0, "a"), (2, 1, "trainer"), (2, 2, "explorer"))
    ]
    [first, *_] = spans = [event for event in events if event["ph"] == "X"]
    assert first == {"ph": "X", "ts": 9e6, "dur": 1e6, "pid": 2, "tid": 1, "name": "publish", "args": {"step": 1}}
    assert sum(event["dur"] for event in spans) == 24e6
