"""Background: one job at a time in a thread beside the training. What the job is it does not know.

Invariant: an error of a job is the error of every later call, so that nothing is begun after it and the run ends with
its reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class Background:
    """Jobs that write what was staged.

    Example:
        published = background.start(lambda: publish_weights(...))   # waits for the job before
        background.check()                                           # in every turn: raises what went wrong
        background.flush()                                           # at the end
    """

    def __init__(self, name: str) -> None:
        """name: of the threads."""
        self._name = name
        self._last: Future[Any] | None = None

    def start(self, job: Callable[[], Result]) -> Future[Result]:
        """Begin a job when the one before has ended; its result to be. Raises: as `check`."""
        self.flush()
        future: Future[Result] = Future()

        def work() -> None:
            try:
                future.set_result(job())
            except BaseException as error:  # carried to the thread that trains, and raised there
                future.set_exception(error)

        self._last = future
        # Daemon: a process that must end ends; what was written so far has no manifest, and so is not there.
        threading.Thread(target=work, name=self._name, daemon=True).start()
        return future

    def check(self) -> None:
        """Look after the job, without waiting. Raises: what went wrong in it."""
        if self._last is not None and self._last.done():
            self._last.result()

    def flush(self) -> None:
        """Wait until the job has ended. Raises: as `check`."""
        if self._last is not None:
            self._last.result()  # it ends: storage has its retries, a process group its deadline

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *raised: object) -> None:
        # However the job ended: who leaves by an error raises that.
        if self._last is not None:
            self._last.exception()
