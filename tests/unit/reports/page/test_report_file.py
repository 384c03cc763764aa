"""Report: the pages of a run in one file. Promises: it is self-contained; only the studio's scripts can run; it starts
with the result, its standard error and the changes; its cost is bounded.
"""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rftdask.monitor.metrics import MetricsWriter
from rftdask.reports.lineage.browse import sample_answers
from rftdask.reports.lineage.tables import RunTables
from rftdask.reports.metric_table import METRICS
from rftdask.reports.page import report_file
from rftdask.reports.page.report_file import render_report, report_run
from rftdask.run.run_folder import note_end
from rftdask.studio.folder import HERE, Folder
from tests.unit.reports.lineage.lineage_cases import EVIL, Case, group, make_config, make_run

VOID = {"meta", "br", "input", "link"}


class Page(HTMLParser):
    """Strict parser that requires every element to be closed in order; collects texts, links and scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.feed(page)
        self.close()

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.links += [value for name in ("href", "src", "action") if (value := attributes.get(name))]
        self.ids += [value for value in [attributes.get("id")] if value]
        if tag == "script":
            self.scripts.append((attributes, ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif not self.open or self.open[-1] != "style":
            self.texts.append(data)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    case = make_run("", make_config(str(tmp_path_factory.mktemp("printed"))))
    with MetricsWriter(case.storage, "trainer") as trainer:
        for step in range(3, 9):
            trainer.write(step, {"loss": 0.1, "reward": 0.0, "flat_groups": 1.0, "num_rows": 4.0, "own_metric": 1.0})
    note_end(case.storage, "stopped", "")
    return case


@pytest.fixture(scope="module")
def html(case: Case) -> str:
    report_run(case.url)
    return case.storage.get("report.html").decode()


def test_the_report_is_self_contained(html: str) -> None:
    page = Page(html)
    assert page.open == [] and len(page.ids) == len(set(page.ids))
    assert [link for link in page.links if not link.startswith("#")] == []
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    others = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)  # a script contains a URL in a comment
    assert "http:" not in others and "https:" not in others and "@import" not in others


def test_only_the_studio_s_own_scripts_may_run(html: str) -> None:
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    allowed = re.findall(r"sha256-[^&#']+", policy[1])
    *_, first, second = page = Page(html).scripts
    [data] = page[:-2]
    for (attributes, text), name in ((first, "uPlot.iife.min.js"), (second, "studio.js")):
        assert attributes == {} and text == (Path(report_file.__file__).parent / "static" / name).read_text()
        assert f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}" in allowed
    assert len(allowed) == 2 and "unsafe" not in policy[1].replace("style-src &#39;unsafe-inline", "")
    assert data[0] == {"type": "application/json", "id": "curves-data"}
    assert json.loads(data[1])["runs"][0]["stages"][0]["y"]["trainer.loss"]
    # Model text is escaped.
    assert "<script>alert" not in html and "\x1b" not in html


def test_the_report_starts_with_the_result(html: str) -> None:
    text = Page(html).text
    headings = [
        "run stopped both",
        "10.0% \u2192 90.0%",
        "accuracy 10.0% -> 90.0% (+80.0 points",
        "seed 42 only",
        "Changes",
        "Reward",
        "Warning grpo: all rewards of the last 5 steps are 0",
        "Curves",
        "Use of time",
        "Answers over time",
        "Distributions",
        "Learning signal of groups",
        "Cluster",
        "committed = trained + dropped + waiting holds",
        "Meaning of the metrics",
    ]
    at = text.index("run stopped both")
    for words in headings:
        position = text.find(words, at)
        assert position >= 0, words
        at = position
    assert " ago" not in text, "the file is read later"
    assert METRICS["reward"].formula in text and METRICS["reward"].source in text and "own_metric" in text


def test_a_run_without_metrics_has_a_report(tmp_path: Path) -> None:
    config = make_config(str(tmp_path))
    folder = Path(config.checkpoint_job_dir)
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"config": config.to_dict()}))
    page = Page(render_report(str(folder), Folder(folder).summary(HERE)))
    assert page.open == [] and "not begun" in page.text


def test_sample_many_answers_evenly(tmp_path: Path) -> None:
    case = make_run("", make_config(str(tmp_path)))
    for step in range(3, 43):
        case_log = Folder(tmp_path).stages("p/run")[0].log
        case_log.commit([*group(0, explore_step=step), *group(1, explore_step=step)], explore_step=step, unit=0)
    rows, there = sample_answers(RunTables(case.url), max_rows=40)
    assert there == 16 + 40 * 4 and 20 <= len(rows) <= 60
    steps = rows["explore_step"].unique()
    assert steps.min() <= 3 and steps.max() >= 38 and len(steps) >= 8
    assert len(sample_answers(RunTables(case.url), max_rows=10**6)[0]) == there
    assert sample_answers(RunTables(case.url), evals=True, max_rows=10)[1] == 0


def test_model_text_is_escaped_in_the_report(tmp_path: Path) -> None:
    case = make_run("", make_config(str(tmp_path), name=f"n{EVIL[:8]}".replace("/", "-").replace("<", "-")))
    html = render_report(case.url, Folder(case.url).summary(HERE))
    assert [attributes for attributes, _ in Page(html).scripts][1:] == [{}, {}]
