"""Lines that a test session prints in addition to those of pytest: its size, late tests, the file to attach."""

import hashlib
import os
import platform
import threading
import time
from pathlib import Path

import pytest

LOG = Path(__file__).parents[1] / "build/failed-tests.log"
_LATE_S = 60.0
_MANY = 100
"""Number of tests from which the size of the session is printed."""
_CPU_S_PER_TEST = 0.055
"""CPU time of a test in `make test` on the reference machine, imports included."""
_CALIBRATION_S = 0.25
"""Time of the computation of `calibrate` on the reference machine, while the processes of xdist start."""


def calibrate() -> float:
    """Return how many times slower than the reference machine this one is now, with its load."""
    began = time.perf_counter()
    for _ in range(8):
        hashlib.pbkdf2_hmac("sha256", b"rftdask", b"calibration", 50_000)
    return (time.perf_counter() - began) / _CALIBRATION_S


class SessionReport:
    """Plugin of the process that prints; with xdist that is the controller."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._began: dict[str, float] = {}
        """Start of the running tests by name, in seconds."""
        self._ended = threading.Event()
        self._num_tests = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:  # the controller of xdist has none
            self._count(len(session.items), 1)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        self._count(len(ids), int(self._config.getoption("numprocesses") or 1))

    def _count(self, num_tests: int, num_processes: int) -> None:
        if self._num_tests or self._config.option.collectonly:
            return
        self._num_tests = num_tests
        threading.Thread(target=self._watch, name="late-tests", daemon=True).start()
        if num_tests < _MANY:
            return
        text = f"{num_tests} tests in {num_processes} processes"
        if "not slow" in self._config.option.markexpr:
            cpus = min(num_processes, len(os.sched_getaffinity(0)))
            minutes = num_tests * _CPU_S_PER_TEST * calibrate() / cpus / 60
            text += f", about {max(1, round(minutes))} min on this machine with its load"
        self._write(text)

    def _watch(self) -> None:
        while not self._ended.wait(_LATE_S):
            now, running = time.monotonic(), self._began.copy()  # the main thread changes it
            late = sorted((began, name) for name, began in running.items() if now - began > _LATE_S)
            if late:
                began, name = late[0]
                self._write(f"running for {now - began:.0f} s: {name}" + f" and {len(late) - 1} more" * (len(late) > 1))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._began[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._began.pop(nodeid, None)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        self._ended.set()
        failed = [report for kind in ("failed", "error") for report in terminalreporter.getreports(kind)]
        if not failed:
            # Failures of an earlier session, which a green rerun of a few tests does not disprove.
            if exitstatus == pytest.ExitCode.OK and self._num_tests >= _MANY:
                LOG.unlink(missing_ok=True)
            return
        LOG.parent.mkdir(exist_ok=True)
        machine = f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} CPUs\n\n"
        texts = [f"{'=' * 100}\n{report.nodeid} ({report.when})\n{report.longreprtext}\n" for report in failed]
        LOG.write_text(machine + "\n".join(texts))
        self._write(f"the failures are in {LOG}; attach this file if you report them")

    def _write(self, text: str) -> None:
        reporter: pytest.TerminalReporter | None = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(text)
