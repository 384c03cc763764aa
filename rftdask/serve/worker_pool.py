"""Worker pool: the engines of a server that are on Dask's workers, wherever those are.

Which workers there are Dask says: those that hold the resource of explorers, each of which has one engine. A worker
that joins is asked once its engine serves the newest weights; one that is lost costs no call (balance.py), and a worker
whose engine has ended gets another one. How they are asked, `engines.remote` says; an engine lives as long as the
server's connection to it, so a server that ends, or is killed, leaves none behind.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from distributed import Status, Worker
from distributed.comm.core import Comm

from rftdask.cluster.base import Cluster
from rftdask.cluster.layout import EXPLORER_RESOURCE
from rftdask.engines.client import LOAD_TIMEOUT_S, AskedEngine
from rftdask.engines.remote import RemoteEngine, RemoteEngines, RemoteEngineServer
from rftdask.errors import ProcessLostError, RftError, RoleError, UserError
from rftdask.processes.dask_task import workers_of
from rftdask.rollouts.work_unit_task import WarmUp, own_engine
from rftdask.serve.balance import Balanced
from rftdask.serve.engines import EnginePool
from rftdask.storage import Storage, open_storage

OPERATION = "rftdask_engine"
_LOOK_AT_WORKERS_S = 1.0
_LOOK_S = 0.2
"""Between two looks of a worker whether its engine lives."""
_AGAIN_S = 10.0
"""Pause before an engine is started again on a worker where it failed."""
MAX_FAILURES = 3
"""Engines in a row that did not start while there is no other one, after which the server ends."""

log = logging.getLogger(__name__)


class WorkerEngines(EnginePool):
    """Engines on the workers of a Dask cluster that hold the resource of explorers, one on each, as they come and go.

    run: what a worker needs to start one.
    """

    def __init__(self, cluster: Cluster, run: WarmUp, storage: Storage, queue: Balanced) -> None:
        super().__init__(storage, queue)
        self._cluster, self._run = cluster, run
        self._engines = RemoteEngines(self._start, _AGAIN_S)
        self._errors: list[RftError | OSError] = []
        """Of starts that failed since the last look."""
        self._num_failures = 0
        """Starts in a row that failed."""
        self._looked_s = -_LOOK_AT_WORKERS_S
        self._lacks_since_s = time.monotonic()

    async def _look_for_engines(self) -> None:
        errors, self._errors = self._errors, []
        for error in [] if self._engines.alive else errors:
            if isinstance(error, UserError):
                raise error
            if self._num_failures >= MAX_FAILURES:
                raise RoleError(f"{self._num_failures} engines in a row did not start; the last: {error}") from error
        now = time.monotonic()
        if self._engines.alive:
            self._lacks_since_s = now
        elif now - self._lacks_since_s > self._cluster.worker_deadline_s + LOAD_TIMEOUT_S:
            raise RoleError(f"no explorer worker has had an engine for {now - self._lacks_since_s:.0f} s")
        if now - self._looked_s < _LOOK_AT_WORKERS_S:
            return
        self._looked_s = now
        self._cluster.check()
        found = await asyncio.to_thread(workers_of, self._cluster.client)
        self._engines.look({address for address, told in found.items() if told["resources"].get(EXPLORER_RESOURCE)})

    async def _start(self, address: str) -> RemoteEngine:
        """An engine of a worker that serves the newest weights, and is asked now. Raises: RftError; OSError: the worker
        is not there.
        """
        client, operation = self._cluster.client, {"op": OPERATION, "run": astuple(self._run)}
        try:
            try:
                await asyncio.to_thread(client.run, host_engines, workers=[address])
            except Exception as error:  # whatever the call raised there, such as where rftdask is another one
                raise RoleError(f"it cannot be asked to start one: {type(error).__name__}: {error}") from error
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
        log.info("%s is asked from now on", engine)
        return engine

    def _take_lost(self, engine: AskedEngine) -> None:
        log.warning("%s is asked no more; what it was asked goes elsewhere", engine)
        engine.close()  # also one that hangs

    async def close(self) -> None:
        """See EnginePool."""
        await super().close()
        self._engines.close()


# ---- the worker


def host_engines(dask_worker: Worker) -> None:
    """Have a worker start an engine for each server that asks for one, from here on. Idempotent."""
    dask_worker.handlers[OPERATION] = host


async def host(comm: Comm, run: Sequence[Any]) -> Status:
    """Start an engine for a server, and end it when the connection ends. run: the fields of a WarmUp."""
    warm_up = WarmUp(*run)
    answering = RemoteEngineServer(comm, may_load=True)
    # A daemon: a model that takes minutes to load does not hold up the end of the worker.
    threading.Thread(target=_hold_engine, args=(warm_up, answering), name="hosted-engine", daemon=True).start()
    await answering.run()
    return Status.dont_reply


def _hold_engine(run: WarmUp, answering: RemoteEngineServer) -> None:
    try:
        with own_engine(run, answering.over.is_set) as engine:
            answering.begin(engine, open_storage(run.url))
            while engine.alive() and not answering.over.wait(_LOOK_S):
                pass
        answering.end(ProcessLostError("its process has ended"))
    except RftError as error:
        answering.end(error)
    except Exception as error:  # of ours: nobody else would hear of it
        answering.end(RftError(f"{type(error).__name__}: {error}"))
