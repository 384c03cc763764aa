"""Preload of every worker process. Ctrl-C reaches the whole terminal group; only the driver is to act on it."""

from __future__ import annotations

import signal
from typing import Any


def dask_setup(worker: Any) -> None:
    """Called by Dask in the worker's main thread before it joins."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
