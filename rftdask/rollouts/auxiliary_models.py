"""Auxiliary models on separate workers: the task that serves one, and its client in explorer workers.

    explorer worker: SharedEngine.submit --RemoteEngine--> ModelServer of another worker --> its EngineClient

The driver submits a task to every worker of auxiliary models (auxiliary_pool.py). Its weights do not change. Requests
contain tokens; the client has the tokenizer, the templates and the seeds. It gets the addresses of workers from the
scheduler, and asks the workers which model they serve. Invariants: a request to a lost worker goes to another; one that
has lost several workers fails, since it may be what crashes them; every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from distributed import Status, Worker, get_worker
from distributed.comm.core import Comm

from rftdask.engines.base import GenerateRequest, Generation
from rftdask.engines.client import EngineClient, EngineSpec
from rftdask.engines.remote import RemoteEngine, RemoteEngines, RemoteEngineServer
from rftdask.engines.spec import engine_spec, is_asked_in_calls
from rftdask.errors import ProcessLostError, RftError, RoleError, WaitTimeout
from rftdask.processes.dask_task import make_cancel_check
from rftdask.rollouts.work_units import EngineRequest
from rftdask.run.run_folder import read_config
from rftdask.storage import Storage, open_storage

AUXILIARY_RESOURCE = "auxiliary"
OPERATION = "rftdask_auxiliary"
"""Operation of a worker's Dask server; takes a `Key`."""
SERVING_TOPIC = "rftdask-serving"
"""Dask topic of the key of a task whose model is ready."""
_POLL_INTERVAL_S = 1.0
"""Seconds between updates of the list of workers, and between checks of a served engine."""
_MAX_LOSSES = 3
"""Workers that a request may lose before it fails."""

Key = tuple[str, str, str]
"""(run folder, fingerprint of its config, name of the model)."""
Result = TypeVar("Result")


class SharedEngine:
    """Client of a model on separate workers with the methods of `EngineClient` that rollouts use. Thread-safe."""

    def __init__(self, worker: Worker, key: Key, spec: EngineSpec, *, num_engines: int, patience_s: float) -> None:
        """num_engines: number of requested engines, for the error; patience_s: seconds that a request waits for a
        worker that serves the model, and seconds that a response may take.
        """
        self.spec = spec
        self.answered_s = time.monotonic()
        """Monotonic time of the last response, or of the last time at which no worker served the model."""
        self._worker, self._key = worker, key
        self._loop: asyncio.AbstractEventLoop = cast(Any, worker.loop).asyncio_loop
        self._num_engines, self._patience_s = num_engines, patience_s
        # Used only on the event loop of the Dask worker.
        self._engines = RemoteEngines(self._open, 0.0)
        self._updated_s = -math.inf
        self._num_workers = 0

    def __str__(self) -> str:
        return f"auxiliary model {self._key[2]!r}"

    def wait_ready(self, timeout_s: float, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Wait until a worker serves the model. Raises: RoleError: none does in time, or cancelled."""
        waiting = self._start(self._choose((), timeout_s))
        while wait([waiting], _POLL_INTERVAL_S).not_done:
            if is_cancelled():
                waiting.cancel()
                raise RoleError(f"the work unit was cancelled while it waited for {self}")
        waiting.result()

    def submit(self, requests: Sequence[GenerateRequest]) -> list[Future[Generation]]:
        """Like `EngineClient.submit`, without streaming. Each request may go to a different worker."""

        async def generate(request: GenerateRequest) -> Generation:
            [generation] = await self._generate([request])
            return generation

        return [self._start(generate(request)) for request in requests]

    def generate(self, requests: Sequence[GenerateRequest], timeout_s: float) -> list[Generation]:
        """Like `EngineClient.generate`. All requests go to one worker."""
        return self._wait(self._generate(requests), timeout_s)

    def logprobs(
        self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], timeout_s: float
    ) -> list[tuple[float, ...]]:
        [scored] = self._wait(self._call(lambda engine: [engine.score(pairs)]), timeout_s)
        return list(scored.logprobs)

    def close(self) -> None:
        """Close the connections to workers. Idempotent."""
        with suppress(RuntimeError):  # the worker and its event loop have ended
            self._loop.call_soon_threadsafe(self._engines.close)

    def _start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
        future = self._start(work)
        timeout_s += 2 * self._patience_s  # longer than the request itself waits, so that its own error is raised
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise WaitTimeout(f"{self} sent no response for {timeout_s:.0f} s") from None

    async def _generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        plain = [replace(request, on_tokens=None) for request in requests]
        return await self._call(lambda engine: engine.submit(plain))

    async def _call(self, submit: Callable[[RemoteEngine], Sequence[Future[Result]]]) -> list[Result]:
        """Responses of one worker. Raises: RoleError: none serves the model in time, or several were lost with it."""
        lost, why = list[RemoteEngine](), ""
        while True:
            engine = await self._choose(lost, self._patience_s, why)
            # Cancelling a future removes its request from the engine.
            responses = asyncio.gather(*map(asyncio.wrap_future, submit(engine)))
            try:
                async with asyncio.timeout(self._patience_s):
                    # The scheduler notices first that a machine has disappeared.
                    while not (await asyncio.wait([responses], timeout=_POLL_INTERVAL_S))[0]:
                        await self._update_workers()
                    results: list[Result] = responses.result()
            except (RoleError, TimeoutError) as error:
                lost.append(engine)
                why = f"the last was lost: {type(error).__name__}: {error}; "
                if len(lost) >= _MAX_LOSSES:
                    text = f"{self}: one request has lost {len(lost)} of its workers in a row; {why}"
                    raise RoleError(text) from error
            else:
                self.answered_s = time.monotonic()
                return results
            finally:
                responses.cancel()

    async def _choose(self, lost: Sequence[RemoteEngine], patience_s: float, why: str = "") -> RemoteEngine:
        """Engine with the fewest requests of this client; one of `lost` if there is no other. Raises: RoleError."""
        deadline = time.monotonic() + patience_s
        while True:
            await self._update_workers()
            if alive := self._engines.alive:
                return min(alive, key=lambda engine: (engine in lost, engine.num_under_way, str(engine)))
            self.answered_s = time.monotonic()  # no engine exists that could be hanging
            if self.answered_s > deadline:
                raise RoleError(
                    f"no worker has served {self} (explorer.auxiliary_models) for {patience_s:.0f} s; engine_num is "
                    f"{self._num_engines}; {why}{self._num_workers} workers of auxiliary models are connected; see "
                    "their logs"
                )
            await asyncio.sleep(_POLL_INTERVAL_S / 20)

    async def _update_workers(self) -> None:
        """Update the list of workers of auxiliary models, at most every `_POLL_INTERVAL_S`."""
        if time.monotonic() - self._updated_s >= _POLL_INTERVAL_S:
            self._updated_s = time.monotonic()  # before the response, so that only one request is sent
            with suppress(OSError):  # the scheduler is gone or does not respond
                identity = self._worker.scheduler.identity(n_workers=-1)
                workers = (await asyncio.wait_for(identity, self._patience_s))["workers"]
                addresses = {address for address, info in workers.items() if info["resources"].get(AUXILIARY_RESOURCE)}
                self._num_workers = len(addresses)
                self._engines.look(addresses)

    async def _open(self, address: str) -> RemoteEngine:
        operation = {"op": OPERATION, "key": list(self._key)}
        return await RemoteEngine.open(address, self._worker.connection_args, operation)


@dataclass(frozen=True)
class AuxiliaryTask(EngineRequest):
    name: str
    """Name that workflows use."""


class ModelServer:
    """Handler of a worker's Dask server, through which other workers use its engine. in_calls: one call at a time."""

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

    Raises: RoleError: the engine cannot be started, or has died; UserError; StorageError; DataError: see read_config.
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
                time.sleep(_POLL_INTERVAL_S / 2)
            raise ended
        finally:
            server.end(ended)
    finally:
        engine.close()
