"""The studio in a real browser, during a run."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.guides.browser import LAPTOP, PHONE, Chromium, require_chromium
from tests.integration.run_cases import DEADLINE_S, RunProcess, run_folder, write_config

NUM_STEPS = 1500
"""Steps of the running run, which is stopped before its end also on a slow machine."""
NUM_POINTS = "(window.curves.data.runs[0].stages[0].x.trainer?.step.length ?? 0)"
"""Number of points of the trainer's curves; no point exists when the page of a new run is drawn."""


@contextmanager
def studio(folder: Path, *arguments: str) -> Iterator[str]:
    """Run `rftdask studio` as typed and return the URL that it prints."""
    command = [sys.executable, "-m", "rftdask", *(arguments or ("studio", str(folder))), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            match = re.match(r"(http://127\.0\.0\.1:\d+/\S*token=\S+)", line)
            assert match, line
            yield match[1]
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, RunProcess]]:
    """Folder with a running run, and the same with another learning rate and two seeds that have ended."""
    require_chromium()
    config = write_config(tmp_path_factory.mktemp("studio"), num_tasks=64)
    folder = config.parent / "runs"
    with RunProcess("run", str(config), "--progress", "none") as ended:
        assert ended.end(DEADLINE_S).code == 0
    for seed in (1, 2):
        # The same numbers under another seed: the test checks that two runs become one curve.
        copy = folder / "rftdask" / f"seed-{seed}"
        shutil.copytree(run_folder(config), copy)
        record = (copy / "run.json").read_text().replace('"seed": 42', f'"seed": {seed}')
        (copy / "run.json").write_text(record.replace('"lr": 1e-06', '"lr": 0.5'))
    with RunProcess("run", str(config), "name=alive", f"trainer.total_steps={NUM_STEPS}", "--progress", "none") as run:
        yield folder, run


def choose(browser: Chromium, control: str, value: str) -> None:
    """Set the value of a control of the page, as a user would."""
    browser.evaluate(
        f"var control = document.getElementById('{control}'); control.value = '{value}'; "
        "control.dispatchEvent(new Event('input'))"
    )


def click(browser: Chromium, action: str) -> None:
    """Click the button of an action as soon as it is there."""
    button = f"document.querySelector('[data-do={action}]')"
    browser.wait_for(button, DEADLINE_S)
    browser.evaluate(f"{button}.click()")


def test_a_run_is_watched_compared_and_searched(runs: tuple[Path, RunProcess]) -> None:
    folder, run = runs
    with studio(folder) as url, Chromium() as browser:
        browser.open(url)
        # The list shows the run when it has started, without reloading.
        browser.wait_for("document.querySelector('tbody').textContent.includes('rftdask/alive')", DEADLINE_S)
        assert browser.evaluate("document.querySelectorAll('#runs tbody tr').length") == 4
        choose(browser, "filter", "seed")
        shown = "[...document.querySelectorAll('#runs tbody tr:not(.hide) b')].map((name) => name.textContent)"
        assert sorted(browser.evaluate(shown)) == ["rftdask/seed-1", "rftdask/seed-2"]
        assert browser.evaluate("compare.disabled") is True

        # One run, while it runs.
        browser.evaluate("[...document.querySelectorAll('a')].find((a) => a.textContent.includes('alive')).click()")
        browser.wait_for("document.body.dataset.drawn > 5")
        state = "document.querySelector('[data-live=state]').textContent"
        browser.evaluate("window.isSame = true")
        # Stop with a checkpoint and continue, with its buttons.
        browser.wait_for(f"{NUM_POINTS} > 3", DEADLINE_S)
        click(browser, "stop")
        assert run.end(DEADLINE_S).code == 130
        browser.wait_for(f"{state} === 'stopped'", DEADLINE_S)
        points = browser.evaluate(NUM_POINTS)
        click(browser, "continue")
        browser.wait_for(f"{state} === 'running' && {NUM_POINTS} > {points}", DEADLINE_S)
        click(browser, "stop")
        browser.wait_for(f"{state} === 'stopped'", DEADLINE_S)
        assert browser.evaluate("window.isSame"), "the page was not left"
        assert "accuracy" in browser.evaluate("document.querySelector('[data-live=result]').textContent")

        # The controls of the page.
        look = "document.querySelector('[data-chart=\"trainer.reward\"] canvas').toDataURL()"
        before = browser.evaluate(look)
        choose(browser, "smooth", "0.9")
        assert browser.evaluate(look) != before
        choose(browser, "x", "time")
        assert browser.evaluate(
            "document.querySelector('[data-chart=\"trainer.loss\"] .u-legend').textContent"
        ).startswith("time")
        choose(browser, "metric", "reward spread")
        assert browser.evaluate("[...document.querySelectorAll('[data-chart]')].map((c) => c.dataset.chart)") == [
            "trainer.reward_std"
        ]

        # The answers.
        for page in ("Samples", "Distributions", "Experiences", "SQL", "Cluster", "Logs", "About"):
            browser.evaluate(f"[...document.querySelectorAll('nav a')].find((a) => a.textContent === '{page}').click()")
            browser.wait_for(
                f"document.querySelector('nav a.here')?.textContent === '{page}' && document.readyState === 'complete'"
            )
            if page == "Samples":
                assert browser.evaluate("document.querySelectorAll('table.heat tbody tr').length") == 3
                browser.evaluate("document.querySelector('table.heat td a').click()")
                browser.wait_for("document.querySelector('section.group b')?.textContent.includes('policy version')")
                assert browser.evaluate("document.querySelectorAll('.answer').length") >= 2
            if page == "SQL":
                browser.evaluate(
                    "var form = document.forms[0]; form.q.value = 'select 6 * 7 as answer'; form.requestSubmit()"
                )
                browser.wait_for("document.querySelector('th')?.textContent === 'answer'")
                assert browser.evaluate("document.querySelector('td').textContent") == "42"
            if page == "Cluster":
                workers = browser.evaluate("[...document.querySelectorAll('table.stack b')].map((b) => b.textContent)")
                assert workers == ["explorer-0", "trainer-0"]
            if page == "Logs":
                assert "trainer-rank-0.log" in browser.evaluate("document.body.textContent")

        # Two seeds are one curve with a band, next to the run with the other setting.
        browser.open(url)
        browser.evaluate(
            "for (const box of document.querySelectorAll('#runs input')) if (!box.value.includes('alive')) box.click()"
        )
        browser.evaluate("compare.click()")
        browser.wait_for("document.body.dataset.drawn > 5")
        settings = browser.evaluate("[...document.querySelectorAll('tbody code')].map((key) => key.textContent)")
        assert settings == ["seed", "algorithm.optimizer.lr"]
        assert browser.evaluate("[...new Set(window.curves.data.runs.map((run) => run.arm))].sort()") == [
            "lr=0.5",
            "lr=1e-06",
        ]
        assert browser.evaluate("window.curves.plots[1].bands.length") == 1

        assert browser.errors == []
        root = url.partition("/?")[0]
        assert [request for request in browser.requests if not request.startswith(root)] == []


def test_the_report_is_one_file_that_requests_no_host(runs: tuple[Path, RunProcess]) -> None:
    report = (runs[0] / "rftdask" / "fake" / "report.html").as_uri()
    with Chromium() as browser:
        browser.open(report)
        browser.wait_for("document.body.dataset.drawn > 5")
        look = "document.querySelector('[data-chart=\"trainer.staleness\"] canvas').toDataURL()"
        before = browser.evaluate(look)
        choose(browser, "x", "time")
        assert browser.evaluate(look) != before
        for size in (PHONE, LAPTOP):
            browser.resize(*size)
            assert browser.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert (browser.requests, browser.errors) == ([report], [])


def test_pages_fit_a_phone_and_a_single_run_can_be_viewed(runs: tuple[Path, RunProcess]) -> None:
    folder, _ = runs
    run = (
        Path(os.environ["RFTDASK_QUICKSTART"]) / "runs/rftdask/quickstart"
        if "RFTDASK_QUICKSTART" in os.environ
        else None
    )
    if run is None or not run.is_dir():
        run = folder / "rftdask" / "seed-1"
    with studio(folder, "view", str(run)) as url, Chromium() as browser:
        browser.resize(*PHONE, dark=True)
        browser.open(url)
        assert browser.evaluate("location.pathname + location.search") == "/experiences"
        assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 20, 23)"
        for page in ("run", "samples", "groups", "distributions", "experiences", "sql", "cluster", "logs", "about"):
            browser.open(f"{url.partition('/experiences')[0]}/{page}")
            if page == "run":
                browser.wait_for("document.body.dataset.drawn > 5")
            assert browser.evaluate("document.documentElement.scrollWidth") <= PHONE[0], page
        assert browser.errors == []
