"""Ask the package math-verify, in a process of its own, whether two answers are equal as mathematics.

It does algebra (sympy) on what the policy wrote, which may take any time and memory, and it can be stopped on the main
thread alone. So each process that asks has one child for it, which is begun at the first question, is limited in the
processor time and memory of a question, and is replaced when it dies. This module knows no rewards.

    is_equal(r"\\boxed{x+1}", r"\\boxed{1+x}")  ->  True
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import resource
import signal
import threading
from types import FrameType
from typing import Any

import psutil

from rftdask.errors import ProcessLostError, WaitTimeout
from rftdask.processes.child import Channel, Child

CPU_S = 5.0
"""Processor time for one question, so that a busy machine changes no answer."""
_WAIT_S = 120.0
"""Deadline of an answer: the child's start, and what of a question no signal interrupts."""
_MEMORY_BYTES = 2 << 30
"""Beyond what the child has when it begins."""

log = logging.getLogger(__name__)


def is_equal(said: str, truth: str) -> bool | None:
    """Whether math-verify finds in `said` what it finds in `truth`; each is a text with its mathematics in LaTeX, in
    a \\boxed{} or between dollars, or at least numbers.

    Returns: None if the truth has no mathematics. False, with a warning in the log, if that needs more time or memory
    than there is for a question.
    """
    return _ASKER.ask(said, truth)


class _Asker:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        """The child takes one question at a time."""
        self._child: Child | None = None
        self._inherited: Child | None = None

    def ask(self, said: str, truth: str) -> bool | None:
        with self._lock:
            # Twice, because a child may have died of something else, such as the end of its session.
            for _ in range(2):
                if self._child is None:
                    self._child = Child(f"{__name__}:serve", {}, name="math-verifier", may_fork=False)
                try:
                    answer, why = self._child.request([said, truth], _WAIT_S)
                    break
                except (ProcessLostError, WaitTimeout) as error:
                    answer, why = False, str(error)
                    self.close()
                except BaseException:
                    self.close()  # an answer that nobody took would be that of the next question
                    raise
        if why:
            log.warning("an answer counts as wrong, because math-verify gave up on it: %s: %.200r", why, said[-200:])
        return answer if answer is None else bool(answer)

    def close(self) -> None:
        """End the child, if there is one. Idempotent."""
        if self._child is not None:
            self._child.close(grace_s=0.0)
            self._child = None

    def forget(self) -> None:
        """In a fork: the child, and a question that was under way, are those of the other process."""
        # Not dropped: its folder would be removed.
        self._inherited, self._child, self._lock = self._child, None, threading.Lock()


_ASKER = _Asker()
atexit.register(_ASKER.close)
os.register_at_fork(after_in_child=_ASKER.forget)


class _OutOfTimeError(BaseException):
    """Not an Exception: math-verify catches those, and goes on."""


def serve(spec: dict[str, Any], channel: Channel) -> None:
    """In the child: answer each [said, truth] with [True, False or None (no mathematics), why it was given up]."""
    math_verify = importlib.import_module("math_verify")
    # It warns that nothing stops it, and of all that it cannot parse.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    limit = psutil.Process().memory_info().vms + _MEMORY_BYTES
    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def out_of_time(number: int, frame: FrameType | None) -> None:
        raise _OutOfTimeError

    signal.signal(signal.SIGPROF, out_of_time)
    for said, truth in channel:
        # Of this process, its threads included; it beats again, in case something swallows the first.
        signal.setitimer(signal.ITIMER_PROF, CPU_S, 1.0)
        answer: bool | None = False
        why = ""
        try:
            gold = math_verify.parse(truth, parsing_timeout=None)
            found = math_verify.parse(said, parsing_timeout=None)
            answer = bool(math_verify.verify(gold, found, timeout_seconds=None)) if gold else None
        except _OutOfTimeError:
            why = f"{CPU_S:.0f} s of processor time are over"
        except MemoryError:
            why = f"{_MEMORY_BYTES >> 30} GB of memory are used"
        except RecursionError:
            why = "it is nested too deeply"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        channel.send([answer, why])
