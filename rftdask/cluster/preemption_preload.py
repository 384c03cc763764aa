"""Preload of the workers that a batch system gives and takes, and of their nannies. One that it takes (preempted,
cancelled, at its walltime) gets SIGTERM, and says so before it goes: then nobody suspects the task that it runs.

It is the nanny that says it, since the worker may be busy, and then kills the worker, which may have got the signal at
the same moment and waits for that. Invariant: who was killed in any other way says nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any

from distributed import Nanny

from rftdask.cluster.sigterm_preload import end_after
from rftdask.processes.dask_task import LEAVING_TOPIC

_LATER_S = 5.0
"""After which a worker ends whose nanny does not end it."""
_SAY_S = 1.0


def dask_setup(server: Any) -> None:
    """Called by Dask in the main thread of the worker, and in that of its nanny, where signals are handled already."""
    if not isinstance(server, Nanny):
        end_after(_LATER_S)


async def dask_teardown(server: Any) -> None:
    """Called when either closes: the nanny for a signal, or because the run is over, when nobody listens."""
    address = server.worker_address if isinstance(server, Nanny) else None
    if address:
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(server.scheduler.log_event(topic=LEAVING_TOPIC, msg=address), _SAY_S)
        if server.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGKILL)
