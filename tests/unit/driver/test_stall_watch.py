"""Reports of what a run waits for, with a fake clock."""

import logging

import pytest

from rftdask.driver.stall_watch import QUIET_S, StallWatch


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


@pytest.fixture
def watch(now: list[float]) -> StallWatch:
    return StallWatch(clock=lambda: now[0])


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_report_comes_after_a_minute_then_less_often(
    watch: StallWatch, now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    watch.begin(lambda: "two workers to join")
    times = []
    for second in range(500):
        now[0] = 1000.0 + second
        before = len(reports(caplog))
        watch.report_if_due()
        times += [second] * (len(reports(caplog)) - before)
    assert times == [QUIET_S, 2 * QUIET_S, 4 * QUIET_S, 8 * QUIET_S]
    assert reports(caplog)[0] == "no progress for 1:00: the run waits for two workers to join"


def test_progress_restarts_the_minute(watch: StallWatch, now: list[float], caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(10):
        now[0] += QUIET_S - 1
        watch.report_if_due()
        watch.progress()
    assert not reports(caplog)


def test_the_log_has_the_stacks_of_all_threads(
    watch: StallWatch, now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="rftdask")
    now[0] += QUIET_S
    watch.report_if_due()
    stacks = caplog.records[-1].getMessage()
    assert "MainThread:" in stacks and "test_the_log_has_the_stacks_of_all_threads" in stacks


def test_an_error_in_the_description_is_reported(
    watch: StallWatch, now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    def changed() -> str:
        raise RuntimeError("dictionary changed size")

    watch.begin(changed)
    now[0] += QUIET_S
    watch.report_if_due()
    assert "RuntimeError: dictionary changed size" in reports(caplog)[0]
