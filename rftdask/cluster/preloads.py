"""Preload of all worker processes, and of the nannies of those that a batch system gives and takes: what signals do.

- SIGINT and SIGHUP are ignored: Ctrl-C, or a terminal that closes, reaches its whole group, and only the driver is to
  act on it.
- A worker beside the driver starts with all three blocked, so that none ends it, or its imports, half-way.
- SIGTERM ends a worker beside the driver at once if nothing needs it (explorers), else after GRACE_S: a batch system
  that ends a job may send it to all processes, and the driver then writes a checkpoint, which takes a living trainer.
- SIGTERM to a worker that a batch system takes (preempted, cancelled, at its walltime) is announced by its nanny before
  it goes: then nobody suspects the task that it runs. Invariant: who was killed in any other way says nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import threading
from typing import Any

import setproctitle

from rftdask.processes.usage import METER, Meter
from rftdask.processes.zygote import SIGNALS, die_with_parent, reseed_numpy

MODULE = __name__
"""What Dask is given to load."""
GRACE_VARIABLE = "RFTDASK_SIGTERM_GRACE_S"
"""Environment of a worker that this driver starts: seconds from SIGTERM to its end; 0: at once."""
UMASK_VARIABLE = "RFTDASK_UMASK"
"""Environment of a worker that is a fork: the file mode mask of its driver."""
GRACE_S = 30.0
"""SLURM's own, from SIGTERM to SIGKILL, where a site has not set another (KillWait)."""
_LEAVING_S = 5.0
"""From SIGTERM to the end of a worker whose nanny does not end it before."""
_JOINING_S = 1.0
"""For a worker that is just joining as its nanny is told to end."""
_SAY_S = 3.0
"""For the connection to the scheduler that saying takes, on a machine that may be ending many processes at once."""
_NEW_OBJECTS = 50_000
"""After which the collector looks for cycles among them. A work unit makes as many, and has no cycles; a look after
every 700, which is Python's, takes a fifth of the worker's time."""
LEAVING = ("--preload", MODULE, "--preload-nanny", MODULE)
"""Options of `dask worker` on a machine of a batch system: it says when it is told to end, and ignores Ctrl-C."""


def dask_setup(server: Any) -> None:
    """Called by Dask in the main thread of the worker, and in that of its nanny, where signals are handled already."""
    if _is_nanny(server):
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    grace_s = float(os.environ.get(GRACE_VARIABLE, _LEAVING_S))
    if grace_s:
        signal.signal(signal.SIGTERM, lambda *_: _end_after(grace_s))
    if UMASK_VARIABLE in os.environ:
        reseed_numpy()
        gc.freeze()  # the collector would otherwise touch, and so copy, all that was imported for the forks
        os.umask(int(os.environ[UMASK_VARIABLE]))
        os.environ.pop("__DASK_PARENT_PID", None)  # by which Dask would know that it may give a title, with an address
        setproctitle.setproctitle(f"rftdask worker {server.name}")
        # Dask hears of the ends of its forks from the fork server, and takes them for dead when that one is.
        die_with_parent(os.getppid())
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
    server.metrics[METER] = Meter()
    # Last: a signal that came during the imports is delivered here, to the handlers that are set by now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _is_nanny(server: Any) -> bool:
    from distributed import Nanny  # late: the driver needs the names above before it has imported Dask

    return isinstance(server, Nanny)


def _end_after(grace_s: float) -> None:
    # Not the end of the event loop, which may be blocked: the process itself.
    timer = threading.Timer(grace_s, os._exit, (128 + signal.SIGTERM,))
    timer.daemon = True
    timer.start()


async def dask_teardown(server: Any) -> None:
    """Called when either closes: the nanny for a signal, or because the run is over, when nobody listens.

    It is the nanny that says it, since the worker may be busy, and then kills the worker, which may have got the signal
    at the same moment and waits for that.
    """
    from distributed.core import Status  # late: as above

    from rftdask.processes.dask_task import LEAVING_TOPIC  # late: as above

    if not _is_nanny(server):
        # Dask's own calls that are under way as a worker closes end in tracebacks, which say nothing of the run.
        logging.getLogger("tornado.application").setLevel(logging.CRITICAL)
        return
    if server.process is not None and server.process.status == Status.starting:
        # The nanny looks at times for what its worker says; that one may have joined by now, and have a task.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.process.running.wait(), _JOINING_S)
    if address := server.worker_address:
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(_say_leaving(server, LEAVING_TOPIC, address), _SAY_S)
        if server.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGKILL)


async def _say_leaving(nanny: Any, topic: str, address: str) -> None:
    from distributed.comm.addressing import get_address_host_port  # late: as above

    # Of a scheduler that is gone this says so at once; Dask would knock until its deadline.
    _, writer = await asyncio.open_connection(*get_address_host_port(nanny.scheduler.address))
    writer.close()
    await nanny.scheduler.log_event(topic=topic, msg=address)
