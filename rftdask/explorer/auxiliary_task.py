"""Auxiliary task: the Dask task of a worker that serves an auxiliary model, as long as its engine lives.

The driver sends one to every worker of auxiliary models (auxiliary_pool.py). It ends with an error where the engine
cannot be started or has died, so that the error has a place to go. Its weights are frozen: nothing is loaded later.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from distributed import get_worker

from rftdask.engines.client import EngineClient
from rftdask.errors import ProcessLostError
from rftdask.explorer.shared_engine import ModelServer
from rftdask.explorer.worker_cache import engine_spec
from rftdask.processes.dask_task import make_called_off
from rftdask.run.run_folder import read_config
from rftdask.storage import open_storage

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


def serve_auxiliary(asked: AuxiliaryTask) -> None:
    """Serve the model until the task is cancelled.

    Raises: RoleError: the engine cannot be started, or has died; UserError; DataError: the run folder, as this worker
    sees it, lacks the config that the driver has; StorageError.
    """
    worker, called_off = get_worker(), make_called_off()
    key = asked.url, asked.config_fingerprint, asked.name
    server = ModelServer(worker, key)
    config = read_config(open_storage(asked.url), asked.config_fingerprint)
    section = next(model for model in config.models_apart if model.asked_name == asked.name)
    engine = EngineClient(engine_spec(section, config, asked.threads, asked.log_file))
    try:
        engine.wait_ready()
        server.engine = engine
        worker.log_event(SERVING_TOPIC, worker.get_current_task())
        while engine.alive():
            if called_off():
                return
            time.sleep(_LOOK_S)
        raise ProcessLostError(f"{engine} has died, which served auxiliary model {asked.name!r}")
    finally:
        server.engine = None
        engine.close()
