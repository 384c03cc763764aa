"""Dask preload of all workers, and of the nannies of batch jobs, which handles signals; and how workers get it.

- SIGINT and SIGHUP are ignored. Ctrl-C or a closing terminal reaches all processes, and only the driver acts on it.
- Workers of the driver's machine start with these signals and SIGTERM blocked, so that their imports are not
  interrupted.
- SIGTERM ends such a worker at once (explorers) or after GRACE_S: a batch system may send it to all processes of a job,
  and the driver needs a living trainer to write a checkpoint.
- If a batch system sends SIGTERM to a worker (preemption, cancellation, walltime), its nanny reports that, so that its
  task is not a crash suspect. Invariant: workers that are killed in another way send no report.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import setproctitle

from rftdask.cluster.layout import AUXILIARY_RESOURCE, EXPLORER_RESOURCE, amount_of, auxiliary_sizes
from rftdask.processes.dask_task import LEAVING_TOPIC
from rftdask.processes.gpus import METER, Meter
from rftdask.processes.zygote import SIGNALS, die_with_parent, reseed_numpy

if TYPE_CHECKING:
    from rftdask.config import Config

MODULE = __name__
"""Value of Dask's option --preload."""
GRACE_VARIABLE = "RFTDASK_SIGTERM_GRACE_S"
"""Environment variable of a worker of the driver: seconds from SIGTERM to its end; 0: at once."""
UMASK_VARIABLE = "RFTDASK_UMASK"
"""Environment variable of a forked worker: the file mode mask of its driver."""
GRACE_S = 30.0
"""SLURM's default time from SIGTERM to SIGKILL (KillWait)."""
_LEAVING_S = 5.0
"""Time from SIGTERM to the end of a worker, if its nanny does not end it before."""
_JOINING_S = 1.0
"""Time for a worker to join while its nanny is ending."""
_REPORT_S = 3.0
"""Timeout of the report to the scheduler, on a machine that may be ending many processes."""
_NEW_OBJECTS = 50_000
"""Threshold of the garbage collector. A work unit creates as many objects and no cycles; with Python's default of 700
the collector takes a fifth of the worker's time."""


def worker_options(role: str, stages: Sequence[Config]) -> list[str]:
    """Return options of `dask worker` for a worker of a role in a batch job or of `rftdask join`."""
    amount = amount_of(role, max(auxiliary_sizes(stages), default=1))
    # One task at a time, whose data is in a child process, which the nanny does not measure.
    options = f"--resources {role}={amount} --no-dashboard --nthreads 1 --memory-limit 0".split()
    return [*options, "--preload", MODULE, "--preload-nanny", MODULE]


def grace(resources: Collection[str]) -> dict[str, str]:
    """Return the environment of a worker with its seconds from SIGTERM to its end, 0 for workers of engines."""
    ends = EXPLORER_RESOURCE in resources or AUXILIARY_RESOURCE in resources
    return {GRACE_VARIABLE: "0" if ends else str(GRACE_S)}


def worker_spec(name: str, resources: Mapping[str, int], env: Mapping[str, str], **options: Any) -> dict[str, Any]:
    """Describe a worker of a SpecCluster, in a nanny. options: further options of the nanny."""
    defaults = {
        "name": name,
        "nthreads": 1,
        "dashboard": False,
        "dashboard_address": None,
        # Data is in child processes, which the nanny does not measure.
        "memory_limit": 0,
        "silence_logs": logging.CRITICAL,
        "preload": [MODULE],
        "resources": dict(resources),
        "env": {**grace(resources), **env},
    }
    return {"cls": "distributed.Nanny", "options": {**defaults, **options}}


def dask_setup(server: Any) -> None:
    """Set up the worker. Dask calls this in workers and nannies, which handle signals themselves."""
    if _is_nanny(server):
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    grace_s = float(os.environ.get(GRACE_VARIABLE, _LEAVING_S))
    if grace_s:
        signal.signal(signal.SIGTERM, lambda *_: _end_after(grace_s))
    if UMASK_VARIABLE in os.environ:
        reseed_numpy()
        gc.freeze()  # the collector would touch, and so copy, the pages of all imports
        os.umask(int(os.environ[UMASK_VARIABLE]))
        os.environ.pop("__DASK_PARENT_PID", None)  # else Dask sets a title with an address
        setproctitle.setproctitle(f"rftdask worker {server.name}")
        # Dask learns the ends of workers from the fork server, and assumes them dead when that ends.
        die_with_parent(os.getppid())
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
    server.metrics[METER] = Meter()
    # Last: signals that came during the imports are delivered here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _is_nanny(server: Any) -> bool:
    from distributed import Nanny  # late: the driver needs this module before it imports Dask

    return isinstance(server, Nanny)


def _end_after(grace_s: float) -> None:
    # Not by the event loop, which may be blocked.
    timer = threading.Timer(grace_s, os._exit, (128 + signal.SIGTERM,))
    timer.daemon = True
    timer.start()


async def dask_teardown(server: Any) -> None:
    """Report that the worker leaves, then kill it. Dask calls this when a worker or nanny closes.

    The nanny reports, because the worker may be busy. The worker may have the signal as well, and waits to be killed.
    """
    from distributed.core import Status  # late: as above

    if not _is_nanny(server):
        # Pending calls of Dask would print tracebacks that have no meaning for the run.
        logging.getLogger("tornado.application").setLevel(logging.CRITICAL)
        return
    if server.process is not None and server.process.status == Status.starting:
        # The nanny polls its worker, which may have joined meanwhile and have a task.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.process.running.wait(), _JOINING_S)
    if address := server.worker_address:
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(_report_leaving(server, address), _REPORT_S)
        if server.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGKILL)


async def _report_leaving(nanny: Any, address: str) -> None:
    from distributed.comm.addressing import get_address_host_port  # late: as above

    # Fails at once if the scheduler has ended; Dask would retry until its deadline.
    _, writer = await asyncio.open_connection(*get_address_host_port(nanny.scheduler.address))
    writer.close()
    await nanny.scheduler.log_event(topic=LEAVING_TOPIC, msg=address)
