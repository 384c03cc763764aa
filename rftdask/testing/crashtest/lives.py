"""Lives: processes that are forked from this one, which has everything imported already, and killed.

A life costs some milliseconds that way. Fork only from a process without threads: the command line and tests run the
harness in a process of its own. Invariants: a life that outlives this process ends by itself; what a life raises is
told, never lost.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rftdask.errors import RoleError

_POLL_S = 0.001


@dataclass
class Life:
    """One process. `status` is None while it runs, its exit code when it has ended, minus the signal if killed."""

    pid: int
    error_file: Path
    status: int | None = None

    def poll(self) -> int | None:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def wait(self, deadline_s: float) -> int:
        """The status. Raises: RoleError: it did not end in time, and was killed."""
        end = time.monotonic() + deadline_s
        while self.poll() is None:
            if time.monotonic() > end:
                self.kill()
                raise RoleError(f"process {self.pid} did not end in {deadline_s:.0f} s")
            time.sleep(_POLL_S)
        assert self.status is not None
        return self.status

    def kill(self) -> bool:
        """SIGKILL, and wait until it is gone; whether it was that which ended it."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status == -signal.SIGKILL

    def error(self) -> str:
        """Read what it raised, in one line; "" if nothing."""
        text = self.error_file.read_text() if self.error_file.exists() else ""
        return text.strip().rpartition("\n")[2]


def start_life(job: Callable[[], None], folder: Path) -> Life:
    """Run `job` in a fork of this process. `folder`: where it says what it raised."""
    parent = os.getpid()
    pid = os.fork()  # not a new interpreter: importing pyarrow takes a second, and there are thousands of lives
    if pid:
        return Life(pid, folder / f"error-{pid}.txt")
    status = 1
    try:
        job()
        status = 0
    except BaseException:
        # An orphan's parent has removed the folder, or is about to.
        if os.getppid() == parent:
            (folder / f"error-{os.getpid()}.txt").write_text(traceback.format_exc())
    finally:
        os._exit(status)  # nothing of the parent's: no buffers, no exit handlers
    raise AssertionError("unreachable")


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal is on its way


def stop_if_alone(parent: int) -> None:
    """Check, in the loops of a life. Raises: RoleError: the process that forked it is gone."""
    if os.getppid() != parent:
        raise RoleError("the crash test has ended")
