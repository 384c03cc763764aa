"""Shared engine: an auxiliary model on workers of its own, as the rollouts of any explorer worker ask it.

    explorer worker: SharedEngine.submit --RemoteEngine--> ModelServer of another worker --> its EngineClient

Tokens in, tokens out: tokenizer, templates and seeds are the asker's, so an answer is the one that an engine beside the
policy would give. Who serves which model is asked of the workers, each of which knows (auxiliary_task.py); which
workers there are, of the scheduler. How a worker is asked, `engines.remote` says.

Invariants: what was asked of a worker that is lost is asked of another; a request that has lost several is given up,
since it may be what ends them; no wait is without a deadline, and the error names the model.
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
"""Of a worker that serves a model; takes a `Key`."""
_LOOK_S = 1.0
"""Between two looks which workers there are, while there is somebody to ask; and how long one that does not serve a
model is not asked for it."""
_MAX_LOSSES = 3
"""Workers that a request may lose before it is given up."""

Key = tuple[str, str, str]
"""(run folder, fingerprint of its config, name of the model)."""
Found = TypeVar("Found")


class SharedEngine:
    """A model that workers of its own serve. Has what an `EngineClient` is asked for. Used from any thread.

    Example:
        judge = SharedEngine(get_worker(), ("runs/a", fingerprint, "judge"), spec, num_engines=2, patience_s=900)
        judge.wait_ready(1800)
        futures = judge.submit(requests)
    """

    def __init__(self, worker: Worker, key: Key, spec: EngineSpec, *, num_engines: int, patience_s: float) -> None:
        """num_engines: that the run asks for, for the error; patience_s: how long a request waits where no worker
        serves the model, and how long an answer may take.
        """
        self.spec = spec
        self.answered_s = time.monotonic()
        """Time of the last answer to anybody, or of the last moment at which none could come."""
        self._worker, self._key = worker, key
        self._num_engines, self._patience_s = num_engines, patience_s
        # Both on the event loop of Dask's worker alone.
        self._engines = RemoteEngines(self._open, 0.0)
        self._looked_s = -math.inf
        self._num_workers = 0

    def __str__(self) -> str:
        return f"auxiliary model {self._key[2]!r}"

    def wait_ready(self, timeout_s: float, called_off: Callable[[], bool] = lambda: False) -> None:
        """Wait until a worker serves the model. Raises: RoleError: none does in time, or it is called off."""
        waiting = self._start(self._choose((), timeout_s))
        while wait([waiting], _LOOK_S).not_done:
            if called_off():
                waiting.cancel()
                raise RoleError(f"{self} is waited for no longer: the work unit was called off")
        waiting.result()

    def submit(self, requests: Sequence[GenerateRequest]) -> list[Future[Generation]]:
        """As `EngineClient.submit`; each request may go to another worker. Their tokens are not told on the way."""
        return [self._start(self._generate_one(request)) for request in requests]

    def generate(self, requests: Sequence[GenerateRequest], timeout_s: float) -> list[Generation]:
        """As `EngineClient.generate`: these together, of one worker."""
        return self._wait(self._generate(requests), timeout_s)

    def logprobs(
        self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], timeout_s: float
    ) -> list[tuple[float, ...]]:
        """As `EngineClient.logprobs`."""
        [scored] = self._wait(self._ask(lambda engine: [engine.score(pairs)]), timeout_s)
        return list(scored.logprobs)

    def close(self) -> None:
        """End the connections to workers. Idempotent."""
        with suppress(RuntimeError):  # the worker has ended, and its event loop
            self._loop.call_soon_threadsafe(self._engines.close)

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return cast(Any, self._worker.loop).asyncio_loop  # type: ignore[no-any-return]

    def _start(self, work: Coroutine[Any, Any, Found]) -> Future[Found]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, Found], timeout_s: float) -> Found:
        # Longer than the request itself waits, so that its own error is told.
        future = self._start(work)
        try:
            return future.result(timeout_s + 2 * self._patience_s)
        except TimeoutError:
            future.cancel()
            raise WaitTimeout(f"{self} gave no answer for {timeout_s + 2 * self._patience_s:.0f} s") from None

    async def _generate_one(self, request: GenerateRequest) -> Generation:
        [generation] = await self._generate([request])
        return generation

    async def _generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        plain = [replace(each, on_tokens=None) for each in requests]
        return await self._ask(lambda engine: engine.submit(plain))

    async def _ask(self, ask: Callable[[RemoteEngine], Sequence[Future[Found]]]) -> list[Found]:
        """The answers of one of the workers. Raises: RoleError: none serves the model for so long, or several were lost
        with this request.
        """
        lost, why = list[RemoteEngine](), ""
        while True:
            engine = await self._choose(lost, self._patience_s, why)
            # A future that is cancelled leaves the engine.
            answers = asyncio.gather(*map(asyncio.wrap_future, ask(engine)))
            try:
                async with asyncio.timeout(self._patience_s):
                    # A machine that has gone without a word is known by the scheduler first.
                    while not (await asyncio.wait([answers], timeout=_LOOK_S))[0]:
                        await self._look()
                    found: list[Found] = answers.result()
            except (RoleError, TimeoutError) as error:
                lost.append(engine)
                why = f"the last was lost: {type(error).__name__}: {error}; "
                if len(lost) >= _MAX_LOSSES:
                    raise RoleError(
                        f"{self}: one request has lost {len(lost)} of its workers in a row; {why}"
                    ) from error
            else:
                self.answered_s = time.monotonic()
                return found
            finally:
                answers.cancel()

    async def _choose(self, lost: Sequence[RemoteEngine], patience_s: float, why: str = "") -> RemoteEngine:
        """The engine with the least of ours to do; one of `lost` if there is no other. Raises: RoleError: none serves
        the model for so long.
        """
        deadline = time.monotonic() + patience_s
        while True:
            await self._look()
            if alive := self._engines.alive:
                return min(alive, key=lambda engine: (engine in lost, engine.num_under_way, str(engine)))
            self.answered_s = time.monotonic()  # it is not an engine that is silent
            if self.answered_s > deadline:
                raise RoleError(
                    f"no worker has served {self} (explorer.auxiliary_models) for {patience_s:.0f} s, of "
                    f"{self._num_engines} that were asked for (engine_num); {why}"
                    f"{self._num_workers} workers of auxiliary models are there. Their logs say why"
                )
            await asyncio.sleep(_LOOK_S / 20)

    async def _look(self) -> None:
        """Take in who serves the model, as of a moment ago."""
        if time.monotonic() - self._looked_s >= _LOOK_S:
            self._looked_s = time.monotonic()  # before it is answered: one question is enough
            with suppress(OSError):  # the scheduler is gone, and this worker with it, or does not answer
                asked = self._worker.scheduler.identity(n_workers=-1)
                told = (await asyncio.wait_for(asked, self._patience_s))["workers"]
                there = {address for address, info in told.items() if info["resources"].get(AUXILIARY_RESOURCE)}
                self._num_workers = len(there)
                self._engines.look(there)

    async def _open(self, address: str) -> RemoteEngine:
        operation = {"op": OPERATION, "key": list(self._key)}
        return await RemoteEngine.open(address, self._worker.connection_args, operation)
