"""Preload of the worker processes beside the driver that it needs to end well: of the trainer and the light roles.

A batch system that ends a job may send SIGTERM to all its processes at once. The driver then ends the run with a
checkpoint, which takes a trainer that still lives. Invariant: SIGTERM ends the process, after `GRACE_S` at the latest.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

GRACE_S = 30.0
"""SLURM's own, from SIGTERM to SIGKILL, where a site has not set another (KillWait)."""


def dask_setup(worker: Any) -> None:
    """Called by Dask in the worker's main thread before it joins."""
    end_after(GRACE_S)


def end_after(grace_s: float) -> None:
    """From now on SIGTERM ends this process so many seconds later."""

    def end_later(*_: object) -> None:
        timer = threading.Timer(grace_s, os._exit, (128 + signal.SIGTERM,))
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGTERM, end_later)
