"""Assigns auxiliary models to the workers that serve them; runs in the driver.

Each worker of auxiliary models serves one model for the whole run. A lost worker is requested again, and the next one
that joins serves its model. A worker beyond the requested number serves the model with the smallest fraction of its
engines.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from distributed import Client, Future, KilledWorker

from rftdask.config import Config
from rftdask.config.schema.explorer import InferenceModelConfig
from rftdask.errors import RoleError, UserError, WaitTimeout
from rftdask.processes.dask_task import WorkerInfo
from rftdask.rollouts.auxiliary_models import AUXILIARY_RESOURCE, SERVING_TOPIC, AuxiliaryTask, serve_auxiliary
from rftdask.run.run_folder import record_config
from rftdask.storage import Storage

MAX_FAILURES = 4
"""Starts of a model's engine in a row that may fail or lose their worker before the run fails."""
_ASK_AGAIN_S = 10.0
"""Seconds before missing workers are requested again."""

log = logging.getLogger(__name__)


def choose_model(models: Mapping[str, InferenceModelConfig], served: Mapping[str, int], amount: float) -> str | None:
    """Name of the model that a free worker should serve. None: the worker has too few GPUs for any.

    Args: models: sections by name; served: number of workers by model; amount: GPUs of the worker.
    """
    fitting = {name: model for name, model in models.items() if model.num_gpus <= amount}
    # Prefer the largest model that lacks an engine, because it fits the fewest workers.
    lacking = [name for name, model in fitting.items() if served.get(name, 0) < model.engine_num]
    if lacking:
        return max(lacking, key=lambda name: (fitting[name].num_gpus, -served.get(name, 0)))
    return min(fitting, key=lambda name: served.get(name, 0) / fitting[name].engine_num, default=None)


class AuxiliaryPool:
    """Auxiliary models of a stage that run on separate workers. Call `look` periodically. Not thread-safe."""

    def __init__(
        self,
        client: Client,
        storage: Storage,
        config: Config,
        *,
        threads: int,
        log_folder: str | None,
        deadline_s: float,
        note: Callable[[str], None],
        scale: Callable[[int], None],
    ) -> None:
        """threads: of each engine; deadline_s: seconds that a model may be without a worker; note: emits a message for
        the user; scale: requests a number of workers, or raises UserError if this run does not start workers.
        """
        self._client, self._url, self._threads, self._log_folder = client, storage.url, threads, log_folder
        self._fingerprint = record_config(storage, config)
        self._models = {model.asked_name: model for model in config.models_apart}
        self._deadline_s, self._note, self._scale = deadline_s, note, scale
        self._tasks: dict[str, tuple[str, Future[Any]]] = {}
        """(name of the model, its Dask task) by address of the worker."""
        self._serving: set[str] = set()
        """Keys of tasks whose models have become ready since the last `look`; filled from Dask's thread."""
        self._failures: Counter[str] = Counter()
        """Failures in a row by model."""
        self._missing_since_s: dict[str, float] = {}
        self._asked_s = time.monotonic()
        client.subscribe_topic(SERVING_TOPIC, lambda message: self._serving.add(str(message[1])))

    def look(self, workers: Mapping[str, WorkerInfo]) -> None:
        """Assign models to new workers, and replace lost ones. workers: connected workers by address.

        Raises: RoleError: the engines of a model fail repeatedly; WaitTimeout: no worker of a model has joined;
        UserError: an engine's.
        """
        resources = {address: info["resources"] for address, info in workers.items()}
        amounts = {address: of[AUXILIARY_RESOURCE] for address, of in resources.items() if of.get(AUXILIARY_RESOURCE)}
        for address, (name, task) in list(self._tasks.items()):
            key = str(task.key)
            if key in self._serving:
                self._serving.remove(key)
                self._failures[name] = 0
                worker = workers[address]["name"] if address in workers else address
                self._note(f"auxiliary model {name!r} is served by worker {worker}")
            if task.status != "pending" or address not in amounts:
                del self._tasks[address]
                self._take_end(name, task)
        # Largest worker first, so that a small model does not take one that a large model needs.
        for address in sorted(amounts.keys() - self._tasks.keys(), key=lambda address: (-amounts[address], address)):
            served = Counter(name for name, _ in self._tasks.values())
            chosen = choose_model(self._models, served, amounts[address])
            if chosen is not None:
                self._tasks[address] = chosen, self._submit(chosen, address)
                self._note(f"auxiliary model {chosen!r} starts on worker {workers[address]['name']}")
        self._check_missing(len(amounts))

    def close(self) -> None:
        """End the engines. Idempotent."""
        self._client.unsubscribe_topic(SERVING_TOPIC)
        self._client.cancel([task for _, task in self._tasks.values()], force=True)
        self._tasks.clear()

    def _submit(self, name: str, address: str) -> Future[Any]:
        log_file = None
        if self._log_folder:
            # A name may be a path.
            log_file = f"{self._log_folder}/auxiliary-{list(self._models).index(name)}.log"
        return self._client.submit(
            serve_auxiliary,
            AuxiliaryTask(self._url, self._fingerprint, self._threads, log_file, name),
            # The time makes the key unique, or Dask would return the result of an earlier task.
            key=f"auxiliary-{address}-{time.time_ns()}",
            resources={AUXILIARY_RESOURCE: self._models[name].num_gpus},
            workers=[address],
            pure=False,
            retries=0,
        )

    def _take_end(self, name: str, task: Future[Any]) -> None:
        error = task.exception() if task.status == "error" else None
        if isinstance(error, UserError):
            raise error
        self._failures[name] += 1
        is_lost = isinstance(error, KilledWorker) or error is None
        cause = "its worker was lost" if is_lost else f"{type(error).__name__}: {error}"
        text = f"an engine of auxiliary model {name!r} ended: {cause}"
        log.warning("%s", text)
        if self._failures[name] >= MAX_FAILURES:
            raise RoleError(f"{text}; {MAX_FAILURES} in a row have ended without serving a request") from error
        self._note(f"{text.partition(chr(10))[0]}; it is replaced")
        self._client.cancel([task], force=True)

    def _check_missing(self, num_workers: int) -> None:
        now = time.monotonic()
        served = {name for name, _ in self._tasks.values()}
        for name in self._models:
            if name in served:
                self._missing_since_s.pop(name, None)
            elif now - self._missing_since_s.setdefault(name, now) > self._deadline_s:
                model = self._models[name]
                raise WaitTimeout(
                    f"no worker with {model.num_gpus} of the resource {AUXILIARY_RESOURCE} has joined for auxiliary "
                    f"model {name!r} in {self._deadline_s:.0f} s (engine_num {model.engine_num})"
                )
        wanted = sum(model.engine_num for model in self._models.values())
        if num_workers < wanted and now - self._asked_s > _ASK_AGAIN_S:
            # Repeat the request while some are missing: a nanny does not restart a worker that died while it started.
            self._asked_s = now
            try:
                self._scale(wanted)
            except UserError as error:
                log.info("workers of auxiliary models are not requested: %s", error)
