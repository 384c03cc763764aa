"""Client of an auxiliary model on separate workers, for the rollouts of explorer workers.

    explorer worker: SharedEngine.submit --RemoteEngine--> ModelServer of another worker --> its EngineClient

Requests and responses contain tokens. The client has the tokenizer, the templates and the seeds, so a response is the
same as that of an engine in the explorer worker. The client gets the addresses of workers from the scheduler, and asks
the workers which model they serve (auxiliary_task.py). See `engines.remote` for the connection.

Invariants: a request to a lost worker goes to another; a request that has lost several workers fails, since it may be
what crashes them; every wait has a deadline, and its error names the model.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar, cast

from distributed import Worker

from rftdask.engines.base import GenerateRequest, Generation
from rftdask.engines.client import EngineSpec
from rftdask.engines.remote import RemoteEngine, RemoteEngines
from rftdask.errors import RoleError, WaitTimeout

AUXILIARY_RESOURCE = "auxiliary"
OPERATION = "rftdask_auxiliary"
"""Operation of a worker's Dask server; takes a `Key`."""
_POLL_INTERVAL_S = 1.0
"""Seconds between updates of the list of workers, and until a worker without the model is tried again."""
_MAX_LOSSES = 3
"""Workers that a request may lose before it fails."""

Key = tuple[str, str, str]
"""(run folder, fingerprint of its config, name of the model)."""
Result = TypeVar("Result")


class SharedEngine:
    """Client of a model on separate workers with the methods of `EngineClient` that rollouts use. Thread-safe.

    Example:
        judge = SharedEngine(get_worker(), ("runs/a", fingerprint, "judge"), spec, num_engines=2, patience_s=900)
        judge.wait_ready(1800)
        futures = judge.submit(requests)
    """

    def __init__(self, worker: Worker, key: Key, spec: EngineSpec, *, num_engines: int, patience_s: float) -> None:
        """num_engines: number of requested engines, for the error; patience_s: seconds that a request waits for a
        worker that serves the model, and seconds that a response may take.
        """
        self.spec = spec
        self.answered_s = time.monotonic()
        """Monotonic time of the last response, or of the last time at which no worker served the model."""
        self._worker, self._key = worker, key
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
        return [self._start(self._generate_one(request)) for request in requests]

    def generate(self, requests: Sequence[GenerateRequest], timeout_s: float) -> list[Generation]:
        """Like `EngineClient.generate`. All requests go to one worker."""
        return self._wait(self._generate(requests), timeout_s)

    def logprobs(
        self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], timeout_s: float
    ) -> list[tuple[float, ...]]:
        """Like `EngineClient.logprobs`."""
        [scored] = self._wait(self._call(lambda engine: [engine.score(pairs)]), timeout_s)
        return list(scored.logprobs)

    def close(self) -> None:
        """Close the connections to workers. Idempotent."""
        with suppress(RuntimeError):  # the worker and its event loop have ended
            self._loop.call_soon_threadsafe(self._engines.close)

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return cast(Any, self._worker.loop).asyncio_loop  # type: ignore[no-any-return]

    def _start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
        # Longer than the request itself waits, so that its own error is raised.
        future = self._start(work)
        try:
            return future.result(timeout_s + 2 * self._patience_s)
        except TimeoutError:
            future.cancel()
            raise WaitTimeout(f"{self} sent no response for {timeout_s + 2 * self._patience_s:.0f} s") from None

    async def _generate_one(self, request: GenerateRequest) -> Generation:
        [generation] = await self._generate([request])
        return generation

    async def _generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        plain = [replace(request, on_tokens=None) for request in requests]
        return await self._call(lambda engine: engine.submit(plain))

    async def _call(self, submit: Callable[[RemoteEngine], Sequence[Future[Result]]]) -> list[Result]:
        """Responses of one of the workers. Raises: RoleError: none serves the model in time, or several were lost with
        this request.
        """
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
                    raise RoleError(
                        f"{self}: one request has lost {len(lost)} of its workers in a row; {why}"
                    ) from error
            else:
                self.answered_s = time.monotonic()
                return results
            finally:
                responses.cancel()

    async def _choose(self, lost: Sequence[RemoteEngine], patience_s: float, why: str = "") -> RemoteEngine:
        """Engine with the fewest requests of this client; one of `lost` if there is no other. Raises: RoleError: none
        serves the model in time.
        """
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
