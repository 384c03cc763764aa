"""Background: runs one job at a time in a daemon thread next to the training.

Invariant: the error of a job is raised by every later call, so no job starts after it and the run ends with its cause.
A ThreadPoolExecutor does not fit: the interpreter joins its threads at exit, and a job may wait for a rank that died.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from rftdask.storage.base import in_daemon

Result = TypeVar("Result")


class Background:
    """Example:
    published = background.start(lambda: publisher.publish(...))   # waits for the previous job
    background.check()                                           # raises its error once it has failed
    background.flush()                                           # waits for the last job
    """

    def __init__(self, name: str) -> None:
        """name: name of the threads."""
        self._name = name
        self._last: Future[Any] = Future()
        self._last.set_result(None)

    def start(self, job: Callable[[], Result]) -> Future[Result]:
        """Start a job after the previous one has ended. Raises: the error of the previous one."""
        self.flush()
        self._last = future = in_daemon(job, self._name)
        return future

    def check(self) -> None:
        """Raise the error of the job if it has failed, without waiting."""
        if self._last.done():
            self._last.result()

    def flush(self) -> None:
        """Wait for the job. Raises: its error."""
        self._last.result()  # it ends: storage has retries, a process group a deadline

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *error: object) -> None:
        self._last.exception()  # waits, without replacing an error of the block
