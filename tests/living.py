"""Checks of processes that may end at any moment, also between two checks."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

import rftdask


def python_path(*folders: Path) -> str:
    return os.pathsep.join(map(str, [*folders, Path(rftdask.__file__).parents[1]]))


def lives(process: psutil.Process | int) -> bool:
    """Return True if a process, given as object or pid, runs and is not a zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(process) if isinstance(process, int) else process
        return bool(found.is_running() and found.status() != psutil.STATUS_ZOMBIE)
    return False


def wait_until(
    condition: Callable[[], object], what: str = "it", *, deadline_s: float = 60.0, every_s: float = 0.005
) -> None:
    """Look `every_s` until the condition holds. Raises: AssertionError: it does not within `deadline_s`."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {deadline_s:.0f} s"
        time.sleep(every_s)


def wait_until_gone(pid: int, deadline_s: float = 60.0) -> None:
    """Wait until a process has ended. Raises: AssertionError: it still lives after `deadline_s`."""
    wait_until(lambda: not lives(pid), f"the end of process {pid}", deadline_s=deadline_s)
