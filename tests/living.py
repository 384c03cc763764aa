"""Processes in tests, which may go at any moment, also between two questions about them."""

import contextlib
import time

import psutil


def lives(process: psutil.Process | int) -> bool:
    """Whether a process, or that of a number, runs: it is there, and no zombie that nobody has waited for."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(process) if isinstance(process, int) else process
        return bool(found.is_running() and found.status() != psutil.STATUS_ZOMBIE)
    return False


def wait_until_gone(pid: int, deadline_s: float = 60.0) -> None:
    """Until it lives no more. Raises: AssertionError: it does after `deadline_s`."""
    deadline = time.monotonic() + deadline_s
    while lives(pid):
        assert time.monotonic() < deadline, f"process {pid} lives"
        time.sleep(0.01)
