"""Auxiliary task: the Dask task of a worker that serves an auxiliary model, as long as its engine lives.

The driver sends one to every worker of auxiliary models (auxiliary_pool.py). It ends with an error where the engine
cannot be started or has died, so that the error has a place to go. Its weights are frozen: nothing is loaded later.
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
from rftdask.run.run_folder import read_config
from rftdask.storage import Storage, open_storage

SERVING_TOPIC = "rftdask-serving"
"""Dask topic where a worker reports the key of its task, once the model answers."""
_LOOK_S = 0.5


@dataclass(frozen=True)
class AuxiliaryTask:
    """Which model a worker is to serve."""

    url: str
    """Run folder."""
    config_fingerprint: str
    name: str
    """As workflows call it."""
    threads: int
    """Threads of its engine."""
    log_file: str | None
    """File that the engine writes to; None: its output is the worker's."""


class ModelServer:
    """Answers what other workers ask of the engine of this worker, from here on. in_calls: one call at a time, which
    shares the engine with nobody.
    """

    def __init__(self, worker: Worker, key: Key, engine: EngineClient, storage: Storage, *, in_calls: bool) -> None:
        self._key, self._engine, self._storage = key, engine, storage
        self._alone = asyncio.Lock() if in_calls else None
        self._asked: set[RemoteEngineServer] = set()
        self._ended: RftError | None = None
        worker.handlers[OPERATION] = self._answer

    def end(self, error: RftError) -> None:
        """Let nobody ask any more."""
        self._ended = error
        for answering in tuple(self._asked):
            answering.end(error)

    async def _answer(self, comm: Comm, key: Sequence[str]) -> Status:
        answering = RemoteEngineServer(comm, alone=self._alone)
        self._asked.add(answering)  # first: the engine may end meanwhile
        if self._ended is None and tuple(key) == self._key:
            answering.begin(self._engine, self._storage)
        else:
            answering.end(self._ended or RoleError("it serves another model"))
        try:
            await answering.run()
        finally:
            self._asked.remove(answering)
        return Status.dont_reply


def serve_auxiliary(asked: AuxiliaryTask) -> None:
    """Serve the model until the task is cancelled.

    Raises: RoleError: the engine cannot be started, or has died; UserError; DataError: the run folder, as this worker
    sees it, lacks the config that the driver has; StorageError.
    """
    worker, is_cancelled = get_worker(), make_cancel_check()
    storage = open_storage(asked.url)
    config = read_config(storage, asked.config_fingerprint)
    section = next(model for model in config.models_apart if model.asked_name == asked.name)
    engine = EngineClient(engine_spec(section, config, asked.threads, asked.log_file))
    try:
        engine.wait_ready()
        key, in_calls = (asked.url, asked.config_fingerprint, asked.name), is_asked_in_calls(section, config)
        server = ModelServer(worker, key, engine, storage, in_calls=in_calls)
        worker.log_event(SERVING_TOPIC, worker.get_current_task())
        ended = ProcessLostError(f"{engine} has ended, which served auxiliary model {asked.name!r}")
        try:
            while engine.alive():
                if is_cancelled():
                    return
                time.sleep(_LOOK_S)
            raise ended
        finally:
            server.end(ended)
    finally:
        engine.close()
