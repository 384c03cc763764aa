"""Orphans: a process that others started for an engine ends when the engine's process does, however that one ended.

For processes which know nothing of the engine's pipe, such as vLLM's. Linux; elsewhere they stay.
"""

from __future__ import annotations

import os
import select
import signal
import threading

HOST_PID = "RFTDASK_ENGINE_PID"
"""Environment variable: the engine's process."""


def end_with_engine() -> None:
    """Watch, in a thread, the process that the environment names; nothing is watched if it names none or this one."""
    named = os.environ.get(HOST_PID)
    if named is None or int(named) == os.getpid() or not hasattr(os, "pidfd_open"):
        return
    try:
        handle = os.pidfd_open(int(named))
    except ProcessLookupError:
        os._exit(1)
    between = os.getppid()  # whoever started this one, unless that is the engine's process

    def watch() -> None:
        select.select([handle], [], [])
        if between == os.getppid() and between not in (1, int(named)):
            os.kill(between, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="engine-watch", daemon=True).start()
