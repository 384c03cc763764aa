"""Shared engine: an auxiliary model on workers of its own, as the rollouts of any explorer worker ask it.

    explorer worker: SharedEngine.submit --Dask's connections--> ModelServer of another worker --> its EngineClient

Tokens in, tokens out: tokenizer, templates and seeds are the asker's, so an answer is the one that an engine beside the
policy would give. Who serves which model is asked of the workers, each of which knows (auxiliary_task.py); which
workers there are, of the scheduler. TLS and keys are those of the cluster.

Invariants: what was asked of a worker that is lost is asked of another; a request that has lost several is given up,
since it may be what ends them; no wait is without a deadline, and the error names the model.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, Protocol, cast

from distributed import Worker

from rftdask.engines import server
from rftdask.engines.base import GenerateRequest, Generation
from rftdask.engines.client import EngineSpec
from rftdask.errors import ProcessLostError, RftError, RoleError, WaitTimeout

AUXILIARY_RESOURCE = "auxiliary"
_ASK, _DROP = "rftdask_auxiliary_ask", "rftdask_auxiliary_drop"
_LOOK_S = 1.0
"""Between two looks which workers there are, while there is somebody to ask; and how long one that does not serve a
model is not asked for it."""
_MAX_LOSSES = 3
"""Workers that a request may lose before it is given up."""

Key = tuple[str, str, str]
"""(run folder, fingerprint of its config, name of the model)."""


# ---- the worker that serves a model


class AskedEngine(Protocol):
    """What an `EngineClient` is asked for."""

    def submit(self, requests: Sequence[GenerateRequest], /) -> list[Future[Generation]]:
        """Futures of the answers; a cancelled one's request leaves the engine. They raise RoleError."""

    def generate(self, requests: Sequence[GenerateRequest], timeout_s: float, /) -> list[Generation]:
        """The answers. Raises: RoleError, WaitTimeout."""

    def logprobs(
        self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], timeout_s: float, /
    ) -> list[tuple[float, ...]]:
        """The logprobs of the second tokens after the first. Raises: RoleError, WaitTimeout."""


class ModelServer:
    """Answers what other workers ask of the model of this worker, from here on; with nothing as long as it has no
    engine that works.
    """

    def __init__(self, worker: Worker, key: Key) -> None:
        self.engine: AskedEngine | None = None
        self._key = key
        self._alone = asyncio.Lock()
        """Held by one call at a time of those that share the engine with nobody."""
        self._asked: dict[str, list[Future[Generation]]] = {}
        """What is under way, by a name that its asker has made."""
        worker.handlers.update({_ASK: self._answer, _DROP: self._drop})

    async def _answer(
        self, key: Sequence[str], name: str, message: Any, alone: bool, timeout_s: float
    ) -> dict[str, Any]:
        """{"answer"}: what the engine says; {"lost"}: why it says nothing any more; {}: it is not served here."""
        engine = self.engine
        if engine is None or tuple(key) != self._key:
            return {}
        asked = server.FROM_CLIENT.decode(message)
        try:
            if isinstance(asked, server.Score):
                scored = await asyncio.to_thread(engine.logprobs, asked.pairs, timeout_s)
                return {"answer": server.FROM_SERVER.encode(server.Scored(0, tuple(scored)))}
            assert isinstance(asked, server.Generate)
            requests = [each.request for each in asked.requests]
            if alone:
                async with self._alone:
                    found = await asyncio.to_thread(engine.generate, requests, timeout_s)
            else:
                futures = self._asked[name] = engine.submit(requests)
                found = list(await asyncio.wait_for(asyncio.gather(*map(asyncio.wrap_future, futures)), timeout_s))
        except (RoleError, WaitTimeout, TimeoutError) as error:
            return {"lost": f"{type(error).__name__}: {error}"}
        except asyncio.CancelledError:
            if any(future.cancelled() for future in self._asked.get(name, ())):
                return {"lost": "nobody waits for it"}
            raise  # this worker ends
        finally:
            self._asked.pop(name, None)
        answers = tuple(server.Answer(number, generation) for number, generation in enumerate(found))
        return {"answer": server.FROM_SERVER.encode(server.Generated(answers))}

    async def _drop(self, name: str) -> None:
        """Let the engine go on without requests that nobody waits for."""
        for future in self._asked.get(name, ()):
            future.cancel()


# ---- the worker that asks


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
        # All of these on the event loop of Dask's worker alone.
        self._under_way: Counter[str] = Counter()
        """Requests, by address."""
        self._workers: frozenset[str] = frozenset()
        self._looked_s = -math.inf
        self._absent: dict[str, float] = {}
        """Until when a worker is not asked again, that did not serve the model."""

    def __str__(self) -> str:
        return f"auxiliary model {self._key[2]!r}"

    def wait_ready(self, timeout_s: float, called_off: Callable[[], bool] = lambda: False) -> None:
        """Wait until a worker serves the model. Raises: RoleError: none does in time, or it is called off."""
        empty = server.FROM_CLIENT.encode(server.Generate(()))
        waiting = self._start(self._ask(empty, False, timeout_s))
        while wait([waiting], _LOOK_S).not_done:
            if called_off():
                waiting.cancel()
                raise RoleError(f"{self} is waited for no longer: the work unit was called off")
        waiting.result()

    def submit(self, requests: Sequence[GenerateRequest]) -> list[Future[Generation]]:
        """As `EngineClient.submit`; each request may go to another worker. Their tokens are not told on the way."""
        return [self._start(self._generate_one(request)) for request in requests]

    def generate(self, requests: Sequence[GenerateRequest], timeout_s: float) -> list[Generation]:
        """As `EngineClient.generate`: these together, and beside nobody else's."""
        found: list[Generation] = self._wait(self._generate(requests, alone=True), timeout_s)
        return found

    def logprobs(
        self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], timeout_s: float
    ) -> list[tuple[float, ...]]:
        """As `EngineClient.logprobs`."""

        async def score() -> list[tuple[float, ...]]:
            answer = await self._ask(server.FROM_CLIENT.encode(server.Score(0, tuple(pairs))), False, self._patience_s)
            assert isinstance(answer, server.Scored)
            return list(answer.logprobs)

        found: list[tuple[float, ...]] = self._wait(score(), timeout_s)
        return found

    def _wait(self, answer: Any, timeout_s: float) -> Any:
        # Longer than the request itself waits, so that its own error is told.
        future = self._start(answer)
        try:
            return future.result(timeout_s + 2 * self._patience_s)
        except TimeoutError:
            future.cancel()
            raise WaitTimeout(f"{self} gave no answer for {timeout_s + 2 * self._patience_s:.0f} s") from None

    def _start(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, cast(Any, self._worker.loop).asyncio_loop)

    async def _generate_one(self, request: GenerateRequest) -> Generation:
        [generation] = await self._generate([request], alone=False)
        return generation

    async def _generate(self, requests: Sequence[GenerateRequest], *, alone: bool) -> list[Generation]:
        numbered = (server.NumberedRequest(n, replace(each, on_tokens=None)) for n, each in enumerate(requests))
        message = server.FROM_CLIENT.encode(server.Generate(tuple(numbered)))
        answer = await self._ask(message, alone, self._patience_s)
        assert isinstance(answer, server.Generated)
        return [each.generation for each in answer.answers]

    async def _ask(self, message: Any, alone: bool, patience_s: float) -> server.FromServer:
        """The answer of one of the workers. Raises: RoleError: none serves the model for so long, or several were lost
        with this request.
        """
        losses, name = list[str](), uuid.uuid4().hex
        deadline = time.monotonic() + patience_s
        while True:
            address = await self._choose()
            if address is None:
                self.answered_s = time.monotonic()  # it is not an engine that is silent
                if time.monotonic() > deadline:
                    raise RoleError(
                        f"no worker has served {self} (explorer.auxiliary_models) for {patience_s:.0f} s, of "
                        f"{self._num_engines} that were asked for (engine_num); {losses[-1] if losses else ''}"
                        f"{len(self._workers)} workers of auxiliary models are there. Their logs say why"
                    )
                await asyncio.sleep(_LOOK_S / 4)
                continue
            self._under_way[address] += 1
            try:
                reply = await self._call(address, name, message, alone)
            except asyncio.CancelledError:
                self._start(self._call_drop(address, name))
                raise
            except (OSError, TimeoutError, RftError) as error:  # of OSError Dask's broken connections are kinds
                reply = {"lost": f"{type(error).__name__}: {error}"}
            finally:
                self._under_way[address] -= 1
            if "answer" in reply:
                self.answered_s = time.monotonic()
                return server.FROM_SERVER.decode(reply["answer"])
            self._absent[address] = time.monotonic() + _LOOK_S
            if "lost" in reply:
                losses.append(f"the last was lost: {reply['lost']}; ")
                deadline = time.monotonic() + patience_s
                if len(losses) >= _MAX_LOSSES:
                    raise RoleError(f"{self}: one request has lost {len(losses)} of its workers in a row; {losses[-1]}")

    async def _call(self, address: str, name: str, message: Any, alone: bool) -> Mapping[str, Any]:
        call = getattr(self._worker.rpc(address), _ASK)
        asking = asyncio.ensure_future(
            call(key=list(self._key), name=name, message=message, alone=alone, timeout_s=self._patience_s)
        )
        try:
            # A machine that has gone without a word is known by the scheduler first.
            while not asking.done():
                await asyncio.wait({asking}, timeout=_LOOK_S)
                if not asking.done() and address not in await self._look():
                    raise ProcessLostError(f"worker {address} is gone")
            # None of a worker that does not know the call: it has not begun to serve.
            return asking.result() or {}
        finally:
            asking.cancel()

    async def _call_drop(self, address: str, name: str) -> None:
        try:
            await asyncio.wait_for(getattr(self._worker.rpc(address), _DROP)(name=name), self._patience_s)
        except (OSError, TimeoutError):
            return  # it is gone, and the request with it

    async def _choose(self) -> str | None:
        """The worker with the least of ours to do, of those that may serve the model; None: there is none now."""
        now = time.monotonic()
        may_serve = [each for each in await self._look() if self._absent.get(each, 0.0) <= now]
        return min(may_serve, key=lambda address: (self._under_way[address], address), default=None)

    async def _look(self) -> frozenset[str]:
        """Addresses of the workers of auxiliary models, as of a moment ago."""
        if time.monotonic() - self._looked_s >= _LOOK_S:
            self._looked_s = time.monotonic()  # before it is answered: one question is enough
            try:
                told = await self._worker.scheduler.identity(n_workers=-1)
            except OSError:  # it is gone, and this worker with it
                return self._workers
            self._workers = frozenset(
                address for address, info in told["workers"].items() if info["resources"].get(AUXILIARY_RESOURCE)
            )
        return self._workers
