"""Dask task of a worker that serves an auxiliary model as long as its engine lives.

The driver submits one to every worker of auxiliary models (auxiliary_pool.py). If the engine cannot be started or dies,
the task ends with the error. The weights are those of the model folder and do not change.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from distributed import Status, Worker, get_worker
from distributed.comm.core import Comm

from rftdask.engines.client import EngineClient
from rftdask.engines.remote import RemoteEngineServer
from rftdask.engines.spec import engine_spec, is_asked_in_calls
from rftdask.errors import ProcessLostError, RftError, RoleError
from rftdask.processes.dask_task import make_cancel_check
from rftdask.rollouts.auxiliary_client import OPERATION, Key
from rftdask.rollouts.work_units import EngineRequest
from rftdask.run.run_folder import read_config
from rftdask.storage import Storage, open_storage

SERVING_TOPIC = "rftdask-serving"
"""Dask topic of the key of a task whose model is ready."""
_POLL_INTERVAL_S = 0.5


@dataclass(frozen=True)
class AuxiliaryTask(EngineRequest):
    """Request to a worker: serve an auxiliary model."""

    name: str
    """Name that workflows use."""


class ModelServer:
    """Handler of a worker's Dask server, through which other workers use its engine.

    in_calls: the engine runs one call at a time and batches no requests of different calls.
    """

    def __init__(self, worker: Worker, key: Key, engine: EngineClient, storage: Storage, *, in_calls: bool) -> None:
        self._key, self._engine, self._storage = key, engine, storage
        self._call_lock = asyncio.Lock() if in_calls else None
        self._active: set[RemoteEngineServer] = set()
        self._ended: RftError | None = None
        worker.handlers[OPERATION] = self._answer

    def end(self, error: RftError) -> None:
        """Reject new requests and end the active ones with this error."""
        self._ended = error
        for answering in tuple(self._active):
            answering.end(error)

    async def _answer(self, comm: Comm, key: Sequence[str]) -> Status:
        answering = RemoteEngineServer(comm, alone=self._call_lock)
        self._active.add(answering)  # first, because the engine may end meanwhile
        if self._ended is None and tuple(key) == self._key:
            answering.begin(self._engine, self._storage)
        else:
            answering.end(self._ended or RoleError("this worker serves another model"))
        try:
            await answering.run()
        finally:
            self._active.remove(answering)
        return Status.dont_reply


def serve_auxiliary(task: AuxiliaryTask) -> None:
    """Serve the model until the task is cancelled.

    Raises: RoleError: the engine cannot be started, or has died; UserError; DataError: the run folder as seen by this
    worker lacks the driver's config; StorageError.
    """
    worker, is_cancelled = get_worker(), make_cancel_check()
    storage = open_storage(task.url)
    config = read_config(storage, task.config_fingerprint)
    section = next(model for model in config.models_apart if model.asked_name == task.name)
    engine = EngineClient(engine_spec(section, config, task.threads, task.log_file))
    try:
        engine.wait_ready()
        key, in_calls = (task.url, task.config_fingerprint, task.name), is_asked_in_calls(section, config)
        server = ModelServer(worker, key, engine, storage, in_calls=in_calls)
        worker.log_event(SERVING_TOPIC, worker.get_current_task())
        ended = ProcessLostError(f"{engine} has ended; it served auxiliary model {task.name!r}")
        try:
            while engine.alive():
                if is_cancelled():
                    return
                time.sleep(_POLL_INTERVAL_S)
            raise ended
        finally:
            server.end(ended)
    finally:
        engine.close()
