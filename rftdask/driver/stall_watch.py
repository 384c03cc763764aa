"""Report of what a run waits for, after a minute without progress."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

from rftdask.monitor.progress import duration

QUIET_S = 60.0
"""Seconds without progress before the first report. Each further report comes after twice the time of the last."""
_POLL_S = 0.5

log = logging.getLogger(__name__)


class StallWatch:
    """Writes to the terminal and to the log of the driver what the run waits for while it makes no progress.

    Example:
        with StallWatch() as watch:
            watch.begin(lambda: "the start of the cluster")
    """

    def __init__(self, quiet_s: float = QUIET_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._quiet_s, self._clock = quiet_s, clock
        self._ended = threading.Event()
        # A thread, because the one that it watches may hang.
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)
        self.begin(lambda: "the start of the run")

    def begin(self, waits_for: Callable[[], str]) -> None:
        """Begin a part of the run. waits_for: returns what it waits for, as a noun, in the thread of the watch."""
        self._waits_for = waits_for
        self.progress()

    def progress(self) -> None:
        """Restart the time. Call it when a step or an evaluation has ended."""
        self._since = self._clock()
        self._report_after_s = self._quiet_s

    def report_if_due(self) -> None:
        """Report if the run has made no progress for long enough."""
        quiet_s = self._clock() - self._since
        if quiet_s < self._report_after_s:
            return
        self._report_after_s = 2 * quiet_s
        try:
            waits_for = self._waits_for()
        except Exception as error:  # the run changes while the watch looks at it
            waits_for = f"something unknown ({type(error).__name__}: {error})"
        log.warning("no progress for %s: the run waits for %s", duration(quiet_s), waits_for)
        log.info("threads of the driver meanwhile:\n%s", _stacks())

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            self.report_if_due()

    def __enter__(self) -> StallWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(f"{names.get(ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames)
