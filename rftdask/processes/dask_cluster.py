"""Dask's processes, as this package starts them: a scheduler in the driver's own, and workers, each in its nanny.

Apart from the kinds of clusters, so that who plans one, and begins what takes long, need not wait for Dask's imports.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from multiprocessing import resource_tracker
from typing import Any

import dask
import distributed.utils
from distributed import Client, Scheduler, SpecCluster
from distributed.security import Security

from rftdask.errors import RoleError
from rftdask.processes.fork_server import WITHOUT_MAIN
from rftdask.processes.zygote import SIGNALS

_START_ATTEMPTS = 3
"""Starts of a cluster, of which the first may lose a worker to whoever kills processes on this machine."""
WITHOUT_MAIN.add("Dask Worker process (from Nanny)")  # what Dask calls the process of a worker

# Dask would have all imported in a fork server that it can make use of, and in this process, too.
distributed.utils._forkserver_preload_set = True

log = logging.getLogger(__name__)

METHOD = "distributed.worker.multiprocessing-method"
"""Key of Dask: how a nanny starts its worker."""
DASK_CONFIG: dict[str, Any] = {
    # We want to hear of every loss: Dask blames all tasks that the worker had, also those that had not begun, and runs
    # them again without a word (explorer/crash_suspects.py tells preemption from poison).
    "distributed.scheduler.allowed-failures": 0,
    "distributed.scheduler.worker-ttl": "120s",
    # A nanny starts its worker again, however long that takes. Dask would close it for good, if 15 s after a loss there
    # is none of its name: also where that one has come back meanwhile, and is lost once more.
    "distributed.deploy.lost-worker-timeout": "365 days",
    # Idle workers must not take the cores from those who compute.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.system-monitor.gil.enabled": False,
    "distributed.admin.system-monitor.interval": "10s",
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.tick.limit": "60s",
    "distributed.comm.retry.count": 3,
    METHOD: "spawn",
    # Workers have no pages: what they would tell, such as addresses and metrics, is told without a password.
    "distributed.worker.http.routes": [],
}


class _Dask(SpecCluster):
    """A cluster whose workers start undisturbed: they do not run the user's script again, and wait with signals."""

    async def _start(self) -> None:
        # In the thread that starts the workers, which have its mask. What a terminal or SLURM sends to all processes
        # is for the driver; preloads.py takes it in a worker that has its imports behind it.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        resource_tracker.ensure_running()  # it unblocks two of them, the first time
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        await super()._start()  # type: ignore[no-untyped-call]


def start_dask(
    workers: Mapping[str, dict[str, Any]], dashboard_address: str | None, security: Security | None, **options: Any
) -> SpecCluster:
    """A scheduler in this process, and the workers. dashboard_address: as in the config; options: host, protocol.

    Raises: RoleError: a worker died at each of several starts.
    """
    dashboard = {"dashboard": dashboard_address is not None, "dashboard_address": dashboard_address or "127.0.0.1:0"}
    scheduler = {"cls": Scheduler, "options": {"security": security, **dashboard, **options}}
    # A scheduler has an HTTP server also without a dashboard; then it has nothing to tell.
    pages: dict[str, Any] = {} if dashboard_address else {"distributed.scheduler.http.routes": []}
    for attempt in range(_START_ATTEMPTS):
        try:
            with dask.config.set(pages):
                return _Dask(  # type: ignore[no-untyped-call]
                    scheduler=scheduler,
                    workers=dict(workers),
                    security=security,
                    silence_logs=40,
                    shutdown_on_close=True,
                )
        except Exception as error:  # Dask names no class for it
            last = error.__cause__ or error
            log.warning("the cluster did not start (%d of %d): %s", attempt + 1, _START_ATTEMPTS, last)
    raise RoleError(
        f"the workers of this machine did not start, {_START_ATTEMPTS} times: {type(last).__name__}: {last}; is there "
        "memory for them? The log of the driver has more"
    ) from last


def connect(cluster: SpecCluster) -> Client:
    """The default client of a cluster of this process, for which actor calls look. Raises: RoleError: none starts."""
    for attempt in range(_START_ATTEMPTS):
        try:
            return Client(cluster, security=cluster.security)
        # Where what Dask waits for is cancelled, its `sync` has neither a result nor an error and trips over that; a
        # client is nothing but connections to this process, so there is another one.
        except UnboundLocalError as error:
            last = error
            log.warning("Dask's client did not start (%d of %d): it was cancelled", attempt + 1, _START_ATTEMPTS)
    raise RoleError(f"Dask's client was cancelled as it started, {_START_ATTEMPTS} times") from last
