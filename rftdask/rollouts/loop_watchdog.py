"""Watchdog that logs what blocks an event loop, and interrupts it after a while.

A workflow that is declared `in_process` and computes without end would stop all others on its loop, which could not
notice. Code that sleeps in C is logged, and interrupted when it returns to Python.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import sys
import threading
import time
import traceback
from collections.abc import MutableMapping
from typing import ClassVar
from weakref import WeakKeyDictionary

_BEAT_S = 0.2
WARN_AFTER_S = 2.0
_TAIL_LINES = 6

log = logging.getLogger(__name__)


class BlockedLoopError(Exception):
    """A blocking call was made on the event loop that would have to complete it."""


class BlockedLoopTimeout(BaseException):
    """Raised inside code that has blocked its event loop for too long. `except Exception` does not catch it."""


class Watchdog:
    """Context manager that watches the running event loop. Of several on one loop only the first is active."""

    _watched: ClassVar[MutableMapping[asyncio.AbstractEventLoop, list[Watchdog]]] = WeakKeyDictionary()
    """Entered watchdogs by loop; the first of each loop is active."""

    def __init__(self, max_block_s: float, only_within: str) -> None:
        """only_within: name of a function. Only code that it calls is interrupted; other code is only logged."""
        self._max_block_s, self._only_within = max_block_s, only_within
        self._ended = threading.Event()
        self._beat_at = time.monotonic()

    def __enter__(self) -> Watchdog:
        self._loop = asyncio.get_running_loop()
        self._all = self._watched.setdefault(self._loop, [])
        self._all.append(self)
        if self._all[0] is self:
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        was_first = self._all[0] is self
        self._all.remove(self)
        if was_first:
            self._ended.set()
            self._timer.cancel()
            self._thread.join()
            if self._all:
                self._all[0]._start()

    def _start(self) -> None:
        self._thread_id = threading.get_ident()
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="loop-watchdog", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        # A callback of the loop, which does not run while code blocks the loop.
        self._timer = self._loop.call_later(_BEAT_S, self._beat)

    def _watch(self) -> None:
        warned = interrupted = 0.0
        interval_s = min(_BEAT_S, self._max_block_s / 4)
        while not self._ended.wait(interval_s):
            beat = self._beat_at
            blocked_s = time.monotonic() - beat
            frame = sys._current_frames().get(self._thread_id)
            if blocked_s < min(WARN_AFTER_S, self._max_block_s) or frame is None:
                continue
            if warned != beat:
                warned = beat
                lines = "".join(traceback.format_stack(frame)[-_TAIL_LINES:])
                log.warning("the event loop of all rollouts is blocked for %.1f s by:\n%s", blocked_s, lines)
            # Read the frames again, because the loop may have gone on while the warning was written.
            frame = sys._current_frames().get(self._thread_id)
            if blocked_s <= self._max_block_s or interrupted == beat or self._beat_at != beat:
                continue
            while frame is not None and frame.f_code.co_name != self._only_within:
                frame = frame.f_back
            if frame is not None:
                interrupted = beat
                # Raises in the other thread at its next bytecode.
                error, thread_id = ctypes.py_object(BlockedLoopTimeout), ctypes.c_ulong(self._thread_id)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, error)
