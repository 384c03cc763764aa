"""Promises of report, summary and plots: one file that needs nothing else, and numbers that are those of the run."""

import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from rftdask.monitor.charts import CHARTS, Panel, chart_svg, panels_of, plot_metrics
from rftdask.monitor.explain import METRICS
from rftdask.monitor.metrics import MetricsRow, rows_to_frame
from rftdask.run.report import render_report, write_report
from rftdask.run.summary import (
    RunSummary,
    SampleAnswer,
    StageSummary,
    learned,
    next_commands,
    print_summary,
    render_summary,
    shorten,
)
from rftdask.storage.memory import MemoryStorage

VOID = {"meta", "br", "path", "use", "rect", "line"}
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
SUMMARY = RunSummary(
    run_name="countdown",
    run_url="/scratch/runs/demo/countdown",
    status="finished",
    mode="both",
    started_at_s=1_760_000_000,
    seconds=4321,
    stages=(
        StageSummary("warmup", "train", "sft", 10, 300, 0.1, 0.3),
        StageSummary("rl", "both", "grpo", 50, 4021, 0.3, 0.8),
    ),
    accuracy_before=0.1,
    accuracy_after=0.8,
    samples=tuple(SampleAnswer(f"task {n} <script>", "41", "wrong", "<answer>41</answer>", 0.0, 1.0) for n in range(7)),
    counts={"committed": 1280, "trained": 1200, "waiting": 16, "too stale": 50, "group has no spread": 14},
    time_split={"generating": 2000, "training": 1500, "neither": 500},
    versions={"rftdask": "0.1.0"},
    config_yaml="mode: both",
    files={"global_step_50/": "newest checkpoint"},
    next_commands={"rftdask resume": "train on"},
)


def test_without_tasks_the_sentence_is_of_the_held_out_loss() -> None:
    stages = (StageSummary("warmup", "train", "sft", 10, 300, eval_losses=(2.5, 0.25)),)
    summary = replace(SUMMARY, stages=stages, accuracy_before=None, accuracy_after=None)
    assert learned(summary) == "held-out loss of warmup 2.5 -> 0.25"
    assert "held-out loss of warmup" in render_report(summary, STAGES)


class Page(HTMLParser):
    """Parses strictly: every element is closed, in order; keeps texts, links and ids."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("href", "src", "xlink:href", "action") and value]
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def html() -> str:
    return render_report(SUMMARY, STAGES)


def test_the_report_is_one_file_at_the_root_of_the_run(html):
    storage = MemoryStorage("memory://report")
    url = write_report(storage, SUMMARY, STAGES)
    assert url == f"{storage.url}/report.html"
    assert storage.get("report.html").decode() == html


def test_the_report_needs_nothing_from_outside(html):
    page = Page(html)
    assert page.open == []
    assert [link for link in page.links if not link.startswith("#")] == []
    assert "http:" not in html and "https:" not in html and "@import" not in html
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert all(url.startswith("#") for url in re.findall(r"url\((.*?)\)", html))


def test_ids_of_the_charts_are_unique_and_every_reference_has_its_target(html):
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    references = {link[1:] for link in page.links} | set(re.findall(r"url\(#(.*?)\)", html))
    assert references and references <= set(page.ids)


def test_colors_of_the_charts_follow_the_page(html):
    svgs = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
    assert "var(--s1)" in svgs and "currentColor" in svgs
    assert set(re.findall(r"#[0-9a-f]{6}\b", svgs)) <= {"#000000"}  # only of ticks of length 0


def test_the_report_tells_the_numbers_of_the_run(html):
    text = " ".join(" ".join(Page(html).texts).split())
    assert "10.0% \u2192 80.0%" in text
    assert "accuracy 10.0% -> 80.0% (+70.0 points)" in text
    assert "generating 50.0%" in text
    assert "committed = trained + dropped + waiting holds" in text
    assert "task 6 <script>" in text and "<script>" not in html
    assert METRICS["reward"].formula in text and "own_metric" in text
    assert "2025-10-09 08:53 UTC" in text


def test_counts_that_do_not_add_up_are_called_out():
    counts = {"committed": 10, "trained": 8, "waiting": 1}
    page = render_report(RunSummary("r", "/r", "failed", counts=counts, error="trainer rank 1 died"), [])
    assert "does NOT hold" in page and "trainer rank 1 died" in page


def test_a_run_that_measured_nothing_still_has_a_report():
    page = render_report(RunSummary("r", "/r", "stopped"), [("r", rows_to_frame([]))])
    assert Page(page).open == []
    assert "Nothing has been measured yet" in page


def test_each_stage_has_a_panel_and_steps_of_its_own():
    (reward,) = panels_of(REWARD, STAGES)
    assert reward == Panel("rl", {"": (list(range(1, 51)), [0.5] * 50)})
    warmup, rl = panels_of(ACCURACY, STAGES)
    assert warmup == Panel("warmup", {"easy": ([0, 10], [0.0, 0.1]), "hard": ([0, 10], [0.0, 0.1])})
    assert rl.curves["hard"] == ([0, 50], [0.0, 0.5])
    # Of equal width, whatever their steps; and what one stage measured is one curve, with tags or without.
    sft, grpo = [axes for axes in plot_metrics(STAGES).axes if axes.get_xlabel() == "optimizer step"][1:]
    assert sft.get_position().width == pytest.approx(grpo.get_position().width, rel=0.1)
    untagged = rows_to_frame([MetricsRow("trainer", 1, 1.0, {}, {"loss": 2.0})])
    assert [list(panel.curves) for panel in panels_of(LOSS, [("warmup", untagged), STAGES[1]])] == [[""], [""]]


def test_the_trainer_s_reward_is_drawn_before_the_explorer_s():
    rows = [MetricsRow(role, 1, 1.0, {}, {"reward": value}) for role, value in (("explorer", 0.1), ("trainer", 0.2))]
    assert panels_of(REWARD, [("", rows_to_frame(rows))])[0].curves == {"": ([1], [0.2])}
    assert panels_of(REWARD, [("", rows_to_frame(rows[:1]))])[0].curves == {"": ([1], [0.1])}


def test_missing_values_leave_no_point():
    rows = [MetricsRow("trainer", step, 1.0, {}, {"reward": value}) for step, value in ((1, 0.5), (2, math.nan))]
    assert panels_of(REWARD, [("", rows_to_frame(rows))])[0].curves == {"": ([1], [0.5])}
    assert chart_svg(ACCURACY, [("", rows_to_frame(rows))]) == ""


def test_a_plot_has_one_part_per_measured_metric():
    parts = plot_metrics(STAGES[1][1]).subfigs
    titles = [part.get_suptitle() for part in parts if part.axes]
    assert titles == ["Reward (reward units)", "Accuracy (fraction, 0 to 1)", "Loss (nats)"]
    assert plot_metrics(rows_to_frame([])).axes == []


def test_every_chart_is_explained():
    assert {chart.metric for chart in CHARTS} <= METRICS.keys()


def test_the_terminal_summary_says_what_was_learned_and_what_to_do_next():
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_summary(SUMMARY))
    console.file.close()
    text = console.export_text()
    assert "countdown finished after 1:12:01\naccuracy 10.0% -> 80.0% (+70.0 points)" in text
    assert re.search(r"rl +both +grpo +50 +1:07:01 +30.0% +80.0%", text)
    assert "task 4 <script>" in text and "task 5" not in text  # five of seven
    assert "1,280 committed = 1,200 trained, 50 dropped (too stale), 14 dropped" in text
    assert "Files are in /scratch/runs/demo/countdown" in text
    assert "\n  # train on\n  rftdask resume" in text


def test_paths_and_commands_stay_on_one_line_in_a_narrow_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    folder = "/scratch/" + "long/" * 30
    commands = {f"/opt/env/bin/rftdask status {folder}": "where it stands"}
    print_summary(replace(SUMMARY, run_url=folder, next_commands=commands, files={f"{folder}run.json": "settings"}))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert f"Files are in {folder}" in lines and f"  /opt/env/bin/rftdask status {folder}" in lines
    assert f"  {folder}run.json  settings" in lines


def test_next_commands_name_the_program_that_runs_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rftdask", "tensorboard"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert list(next_commands("tensorboard", "/runs/my run")) == [
        f"{tmp_path}/rftdask status '/runs/my run'",
        f"{tmp_path}/rftdask report '/runs/my run'",
        f"{tmp_path}/tensorboard --logdir '/runs/my run'",
    ]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert next(iter(next_commands("none", "/run"))) == "rftdask status /run"
    (tmp_path / "rftdask").unlink()
    assert list(next_commands("none", "/run"))[1] == f"{tmp_path}/python -m rftdask report /run"


def test_a_shortened_answer_keeps_its_end():
    assert shorten("a " * 200 + "<answer>7</answer>", 60).endswith("<answer>7</answer>")
    assert len(shorten("x" * 500, 60)) <= 60
