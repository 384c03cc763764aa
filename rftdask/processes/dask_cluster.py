"""Starts Dask: a scheduler in the driver's process, and workers, each in a nanny.

A module of its own, because planning a cluster does not import Dask.
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
"""Attempts to start a cluster, since a starting worker may be killed, for example by the kernel's OOM killer."""
WITHOUT_MAIN.add("Dask Worker process (from Nanny)")  # Dask's name of a worker process

# Else Dask would preload modules of its own choice in the fork server, and import them in this process.
distributed.utils._forkserver_preload_set = True

log = logging.getLogger(__name__)

METHOD = "distributed.worker.multiprocessing-method"
"""Configuration key of Dask: how a nanny starts its worker."""
DASK_CONFIG: dict[str, Any] = {
    # Report every loss: Dask would silently repeat all tasks of a lost worker, also those that it had not started.
    # explorer/crash_suspects.py distinguishes preempted workers from crash suspects.
    "distributed.scheduler.allowed-failures": 0,
    "distributed.scheduler.worker-ttl": "120s",
    # A nanny restarts its worker however long that takes. By default Dask removes a worker 15 s after a loss, even one
    # that has returned meanwhile and is lost again.
    "distributed.deploy.lost-worker-timeout": "365 days",
    # Idle workers must not use the cores of computing processes.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.system-monitor.gil.enabled": False,
    "distributed.admin.system-monitor.interval": "10s",
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.tick.limit": "60s",
    "distributed.comm.retry.count": 3,
    METHOD: "spawn",
    # Pages of workers would show addresses and metrics without a password.
    "distributed.worker.http.routes": [],
}


class _Dask(SpecCluster):
    """A cluster whose workers start with blocked signals."""

    async def _start(self) -> None:
        # This thread starts the workers, which inherit its mask. Signals of a terminal or SLURM are for the driver; a
        # worker handles them once it has its imports (cluster/preloads.py).
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        resource_tracker.ensure_running()  # its first call unblocks two signals
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        await super()._start()  # type: ignore[no-untyped-call]


def start_dask(
    workers: Mapping[str, dict[str, Any]], dashboard_address: str | None, security: Security | None, **options: Any
) -> SpecCluster:
    """Start a scheduler in this process, and workers.

    Args: dashboard_address: None: no dashboard; options: host, protocol.
    Raises: RoleError: a worker died in each of several attempts.
    """
    dashboard = {"dashboard": dashboard_address is not None, "dashboard_address": dashboard_address or "127.0.0.1:0"}
    scheduler = {"cls": Scheduler, "options": {"security": security, **dashboard, **options}}
    # Without a dashboard the HTTP server of the scheduler gets no pages.
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
        except Exception as error:  # Dask documents no class
            last = error.__cause__ or error
            log.warning("the cluster did not start (%d of %d): %s", attempt + 1, _START_ATTEMPTS, last)
    raise RoleError(
        f"the workers of this machine did not start in {_START_ATTEMPTS} attempts: {type(last).__name__}: {last}; "
        "check the free memory and the log of the driver"
    ) from last


def connect(cluster: SpecCluster) -> Client:
    """Start the default client of a cluster, which actor calls use. Raises: RoleError: it does not start."""
    for attempt in range(_START_ATTEMPTS):
        try:
            return Client(cluster, security=cluster.security)
        # If its coroutine is cancelled, Dask's `sync` has neither a result nor an error and fails with this.
        except UnboundLocalError as error:
            last = error
            log.warning("Dask's client did not start (%d of %d): it was cancelled", attempt + 1, _START_ATTEMPTS)
    raise RoleError(f"the start of Dask's client was cancelled in {_START_ATTEMPTS} attempts") from last
