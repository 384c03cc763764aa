"""Worker pool: the engines of a server that run on Dask workers.

Dask lists the workers that hold the explorer resource; each of them hosts one engine. A new worker gets requests once
its engine serves the newest weights. A lost worker costs no call (load_balancer.py), and a worker whose engine ended
gets another one. `engines.remote` holds the protocol. An engine ends with the server's connection to it, so a server
that ends or is killed leaves no engine behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

from distributed import Status, Worker
from distributed.comm.core import Comm

from rftdask.cluster.base import Cluster, plan_cluster, start_cluster
from rftdask.cluster.layout import EXPLORER_RESOURCE
from rftdask.config import Config
from rftdask.engines.client import LOAD_TIMEOUT_S, AskedEngine
from rftdask.engines.remote import RemoteEngine, RemoteEngines, RemoteEngineServer
from rftdask.errors import ProcessLostError, RftError, RoleError, UserError
from rftdask.processes.dask_task import workers_of
from rftdask.rollouts.work_unit_task import own_engine
from rftdask.rollouts.work_units import EngineRequest
from rftdask.run.run_folder import record_config
from rftdask.serve.engines import EnginePool
from rftdask.serve.load_balancer import LoadBalancer
from rftdask.storage import Storage, open_storage

OPERATION = "rftdask_engine"
_WORKER_POLL_INTERVAL_S = 1.0
_POLL_INTERVAL_S = 0.2
"""Seconds between a worker's checks that its engine is alive."""
_RETRY_S = 10.0
"""Seconds before an engine is started again on a worker where it failed."""
MAX_FAILURES = 3
"""Consecutive failed starts, without a running engine, after which the server ends."""

log = logging.getLogger(__name__)


@contextlib.contextmanager
def on_workers(config: Config, storage: Storage) -> Iterator[Callable[[Storage, LoadBalancer], WorkerEngines]]:
    """Start the cluster and yield a factory of WorkerEngines. Raises: UserError: it cannot start; WaitTimeout."""
    layout = plan_cluster(config, [config])
    run = EngineRequest(storage.url, record_config(storage, config), layout.threads_of(EXPLORER_RESOURCE), None)
    with start_cluster(config, layout, storage) as cluster:
        cluster.use((EXPLORER_RESOURCE,))
        yield partial(WorkerEngines, cluster, run)


class WorkerEngines(EnginePool):
    """One engine on each Dask worker with the explorer resource. run: settings with which workers start them."""

    def __init__(self, cluster: Cluster, run: EngineRequest, storage: Storage, queue: LoadBalancer) -> None:
        super().__init__(storage, queue)
        self._cluster, self._run = cluster, run
        self._engines = RemoteEngines(self._start, _RETRY_S)
        self._errors: list[RftError | OSError] = []
        """Errors of starts that failed since the last poll."""
        self._num_failures = 0
        self._polled_s = -_WORKER_POLL_INTERVAL_S
        self._without_engine_since_s = time.monotonic()

    async def _add_engines(self) -> None:
        errors, self._errors = self._errors, []
        for error in [] if self._engines.alive else errors:
            if isinstance(error, UserError):
                raise error
            if self._num_failures >= MAX_FAILURES:
                raise RoleError(
                    f"{self._num_failures} consecutive engines failed to start; the last: {error}"
                ) from error
        now = time.monotonic()
        if self._engines.alive:
            self._without_engine_since_s = now
        elif (waited_s := now - self._without_engine_since_s) > self._cluster.worker_deadline_s + LOAD_TIMEOUT_S:
            raise RoleError(f"no explorer worker has had an engine for {waited_s:.0f} s")
        if now - self._polled_s < _WORKER_POLL_INTERVAL_S:
            return
        self._polled_s = now
        self._cluster.check()
        workers = await asyncio.to_thread(workers_of, self._cluster.client)
        self._engines.look({address for address, info in workers.items() if info["resources"].get(EXPLORER_RESOURCE)})

    async def _start(self, address: str) -> RemoteEngine:
        """Start an engine with the newest weights, and add it to `queue`. Raises: RftError; OSError: no connection."""
        client, operation = self._cluster.client, {"op": OPERATION, "run": astuple(self._run)}
        try:
            try:
                await asyncio.to_thread(client.run, host_engines, workers=[address])
            except Exception as error:  # anything, for example because the worker has another version of rftdask
                raise RoleError(f"cannot request an engine start: {type(error).__name__}: {error}") from error
            engine = await RemoteEngine.open(address, client.connection_args, operation)
            try:
                await self._load_newest(engine)
            except BaseException:
                engine.close()
                raise
        except (RftError, OSError) as error:
            log.warning("worker %s has no engine: %s", address, error)
            self._errors.append(error)
            self._num_failures += 1
            raise
        self._num_failures = 0
        self.queue.add(engine)
        log.info("%s now takes requests", engine)
        return engine

    def _handle_lost(self, engine: AskedEngine) -> None:
        log.warning("%s is lost; its requests go to other engines", engine)
        engine.close()  # needed if it hangs

    async def close(self) -> None:
        await super().close()
        self._engines.close()


def host_engines(dask_worker: Worker) -> None:
    """Register `host` on a worker, so that servers can start engines there. Idempotent."""
    dask_worker.handlers[OPERATION] = host


async def host(comm: Comm, run: Sequence[Any]) -> Status:
    """Start an engine for a server and end it with the connection. run: the fields of an EngineRequest."""
    request = EngineRequest(*run)
    answering = RemoteEngineServer(comm, may_load=True)
    # A daemon thread: a model that takes minutes to load must not delay the worker's exit.
    threading.Thread(target=_hold_engine, args=(request, answering), name="hosted-engine", daemon=True).start()
    await answering.run()
    return Status.dont_reply


def _hold_engine(run: EngineRequest, answering: RemoteEngineServer) -> None:
    try:
        with own_engine(run, answering.over.is_set) as engine:
            answering.begin(engine, open_storage(run.url))
            while engine.alive() and not answering.over.wait(_POLL_INTERVAL_S):
                pass
        answering.end(ProcessLostError("its process has ended"))
    except RftError as error:
        answering.end(error)
    except Exception as error:  # a bug: without this the server would get no error
        answering.end(RftError(f"{type(error).__name__}: {error}"))
