"""Promises of the file with the failures of a test session."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import session_report
from tests.session_report import SessionReport

FAILED = SimpleNamespace(nodeid="test_a.py::test_b", when="call", longreprtext="assert 1 == 2")


def end_session(num_tests: int, *failed: Any, status: int = 0) -> None:
    """End a session of this many tests as pytest does."""
    plugins = SimpleNamespace(get_plugin=lambda name: None)
    config: Any = SimpleNamespace(pluginmanager=plugins, option=SimpleNamespace(collectonly=False, markexpr=""))
    report, session = SessionReport(config), SimpleNamespace(items=[None] * num_tests)
    report.pytest_collection_finish(session)  # type: ignore[arg-type]
    ends: Any = SimpleNamespace(getreports=lambda kind: failed if kind == "failed" else ())
    report.pytest_terminal_summary(ends, status)


def test_a_green_session_of_many_tests_removes_old_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "build/failed-tests.log"
    monkeypatch.setattr(session_report, "LOG", file)
    end_session(500, FAILED, status=1)
    assert "test_a.py::test_b (call)\nassert 1 == 2\n" in file.read_text()
    end_session(1)
    end_session(500, status=pytest.ExitCode.INTERRUPTED)
    assert file.exists()
    end_session(500)
    assert not file.exists()
