"""The short form of the crash test (`rftdask crashtest`); docs/reliability.md has the figures of the long form."""

from pathlib import Path

import pytest
from crash_cases import part, run_crash_test

from rftdask.testing.crashtest.suite import PROTECTIONS

pytestmark = pytest.mark.slow


def test_a_hundred_kills_at_random_lose_nothing(tmp_path: Path) -> None:
    code, report = run_crash_test(tmp_path, "--only", "kills", "--kills", "100")
    figures = part(report, "kills")
    assert (code, report["failures"]) == (0, []), report
    assert figures["num_kills"] >= 100
    assert (figures["num_lost"], figures["num_twice"]) == (0, 0)
    assert figures["num_trained_again"] > 0, "a trainer that never gets anywhere proves nothing"


def test_kills_at_storage_operations_lose_nothing(tmp_path: Path) -> None:
    code, report = run_crash_test(tmp_path, "--only", "stops", "--every", "20")
    figures = part(report, "stops")
    assert (code, report["failures"]) == (0, []), report["failures"]
    assert figures["num_kills"] == figures["num_tried"] > 25
    assert figures["num_trained_again"] > 0


def test_power_losses_rivals_and_damage_lose_nothing(tmp_path: Path) -> None:
    code, report = run_crash_test(tmp_path, "--only", "power,rivals,damage", "--every", "20")
    assert (code, report["failures"]) == (0, []), report["failures"]
    assert sum(figures["num_tried"] for figures in report["parts"]) > 100
    assert sum(figures["num_lost"] + figures["num_twice"] for figures in report["parts"]) == 0
    assert all(figures["num_trained_again"] > 0 for figures in report["parts"] if figures["part"] != "damage")


@pytest.mark.long
def test_without_any_one_protection_something_breaks(tmp_path: Path) -> None:
    code, report = run_crash_test(tmp_path, "--only", "protections", "--every", "12")
    assert {p["protection"] for p in report["protections"] if p["num_broken"]} == set(PROTECTIONS)
    assert code == 0


@pytest.mark.long
def test_a_failure_is_exit_code_1(tmp_path: Path) -> None:
    code, report = run_crash_test(tmp_path, "--only", "protections", "--every", "1000000")
    assert code == 1
    assert any("this test proves nothing of it" in line for line in report["failures"])
