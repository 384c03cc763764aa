"""Starts Dask: a scheduler in the driver's process, and workers, each in a nanny.

Dask is imported late, because planning a cluster does not need it.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

from rftdask.errors import RoleError
from rftdask.processes.fork_server import WITHOUT_MAIN
from rftdask.processes.zygote import SIGNALS

if TYPE_CHECKING:
    from distributed import Client, SpecCluster
    from distributed.security import Security

_START_ATTEMPTS = 3
"""Attempts to start a cluster, since a starting worker may be killed, for example by the kernel's OOM killer."""
WITHOUT_MAIN.add("Dask Worker process (from Nanny)")  # Dask's name of a worker process

log = logging.getLogger(__name__)

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
    "distributed.worker.multiprocessing-method": "spawn",
    # Pages of workers would show addresses and metrics without a password.
    "distributed.worker.http.routes": [],
}


def set_config(settings: Mapping[str, Any] | None = None, *, forks: bool = False) -> AbstractContextManager[object]:
    """Set DASK_CONFIG in this process; the returned object restores the configuration on exit.

    Args: settings: further keys; forks: nannies fork their workers from the fork server.
    """
    import dask
    import distributed.utils

    # Else Dask would preload modules of its own choice in the fork server, and import them in this process.
    distributed.utils._forkserver_preload_set = True
    method = {"distributed.worker.multiprocessing-method": "forkserver"} if forks else {}
    return dask.config.set({**DASK_CONFIG, **method, **(settings or {})})


def start_dask(
    workers: Mapping[str, dict[str, Any]], dashboard_address: str | None, security: Security | None, **options: Any
) -> SpecCluster:
    """Start a scheduler in this process, and workers.

    Args: dashboard_address: None: no dashboard; options: host, protocol.
    Raises: RoleError: a worker died in each of several attempts.
    """
    import dask
    from distributed import Scheduler, SpecCluster

    class BlockingCluster(SpecCluster):
        """A cluster whose workers start with blocked signals."""

        async def _start(self) -> None:
            # This thread starts the workers, which inherit its mask. Signals of a terminal or SLURM are for the driver;
            # a worker handles them once it has its imports (cluster/preloads.py).
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            resource_tracker.ensure_running()  # its first call unblocks two signals
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            await super()._start()  # type: ignore[no-untyped-call]

    dashboard = {"dashboard": dashboard_address is not None, "dashboard_address": dashboard_address or "127.0.0.1:0"}
    scheduler = {"cls": Scheduler, "options": {"security": security, **dashboard, **options}}
    # Without a dashboard the HTTP server of the scheduler gets no pages.
    pages: dict[str, Any] = {} if dashboard_address else {"distributed.scheduler.http.routes": []}
    for attempt in range(_START_ATTEMPTS):
        try:
            with dask.config.set(pages):
                return BlockingCluster(  # type: ignore[no-untyped-call]
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
    from distributed import Client

    for attempt in range(_START_ATTEMPTS):
        try:
            return Client(cluster, security=cluster.security)
        # If its coroutine is cancelled, Dask's `sync` has neither a result nor an error and fails with this.
        except UnboundLocalError as error:
            last = error
            log.warning("Dask's client did not start (%d of %d): it was cancelled", attempt + 1, _START_ATTEMPTS)
    raise RoleError(f"the start of Dask's client was cancelled in {_START_ATTEMPTS} attempts") from last


def call_on_loss(cluster: SpecCluster, call: Callable[[], None]) -> None:
    """Call a function in the scheduler's loop whenever a worker leaves."""
    from distributed import Scheduler, SchedulerPlugin

    class OnLoss(SchedulerPlugin):
        def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
            call()

    scheduler, loop = cluster.scheduler, cluster.loop
    assert isinstance(scheduler, Scheduler) and loop is not None
    # The scheduler is not thread-safe.
    loop.add_callback(scheduler.add_plugin, OnLoss())
