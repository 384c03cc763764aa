"""Checks of processes that may end at any moment, also between two checks."""

import contextlib
import os
import time
from pathlib import Path

import psutil

import rftdask


def python_path(*folders: Path) -> str:
    """Return a PYTHONPATH of these folders and the folder of the package."""
    return os.pathsep.join(map(str, [*folders, Path(rftdask.__file__).parents[1]]))


def lives(process: psutil.Process | int) -> bool:
    """Return True if a process, given as object or pid, runs and is not a zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(process) if isinstance(process, int) else process
        return bool(found.is_running() and found.status() != psutil.STATUS_ZOMBIE)
    return False


def wait_until_gone(pid: int, deadline_s: float = 60.0) -> None:
    """Wait until a process has ended. Raises: AssertionError: it still lives after `deadline_s`."""
    deadline = time.monotonic() + deadline_s
    while lives(pid):
        assert time.monotonic() < deadline, f"process {pid} lives"
        time.sleep(0.01)
