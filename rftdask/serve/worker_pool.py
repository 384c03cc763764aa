"""Worker pool: the engines of a server that are on Dask's workers, wherever those are; the server's side of
worker_engine.py.

Which workers there are Dask says: those that hold the resource of explorers, each of which has one engine. A worker
that joins is asked once its engine serves the newest weights; one that is lost costs no call (balance.py), and a worker
whose engine has ended gets another one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import astuple, replace
from typing import Any

from distributed import connect
from distributed.comm.core import Comm

from rftdask.cluster.base import Cluster
from rftdask.cluster.layout import EXPLORER_RESOURCE
from rftdask.engines.base import GenerateRequest, Generation, OnTokens
from rftdask.engines.client import LOAD_TIMEOUT_S
from rftdask.engines.server import Drop, Generate, Generated, NumberedRequest
from rftdask.errors import ProcessLostError, RftError, RoleError, StorageError, UserError, WaitTimeout
from rftdask.explorer.worker_task import WarmUp
from rftdask.processes.dask_task import workers_of
from rftdask.serve.balance import Balanced, ServedEngine
from rftdask.serve.engines import EnginePool
from rftdask.serve.worker_engine import (
    FROM_SERVER,
    FROM_WORKER,
    OPERATION,
    FromWorker,
    Gone,
    Hosted,
    Load,
    Loaded,
    host_engines,
)
from rftdask.storage import Storage
from rftdask.weights.published import Published

_LOOK_AT_WORKERS_S = 1.0
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
        # Both by the address of the worker, which is in one of them at most.
        self._starting: dict[str, asyncio.Task[WorkerEngine]] = {}
        self._asked: dict[str, WorkerEngine] = {}
        self._again_s: dict[str, float] = {}
        """When one may be started again, where it failed."""
        self._num_failures = 0
        """Starts in a row that failed."""
        self._looked_s = -_LOOK_AT_WORKERS_S
        self._lacks_since_s = time.monotonic()

    async def _look_for_engines(self) -> None:
        for address, starting in list(self._starting.items()):
            if starting.done():
                del self._starting[address]
                self._take_started(address, starting)
        now = time.monotonic()
        if self._asked:
            self._lacks_since_s = now
        elif now - self._lacks_since_s > self._cluster.worker_deadline_s + LOAD_TIMEOUT_S:
            raise RoleError(f"no explorer worker has had an engine for {now - self._lacks_since_s:.0f} s")
        if now - self._looked_s < _LOOK_AT_WORKERS_S:
            return
        self._looked_s = now
        self._cluster.check()
        there = await asyncio.to_thread(self._addresses)
        # What Dask has given up may hang, and still have a connection: what is under way there goes elsewhere.
        for address in self._asked.keys() - there:
            self._asked[address].close()
        for address in self._starting.keys() - there:
            self._starting[address].cancel()
        for address in sorted(there - self._starting.keys() - self._asked.keys()):
            if self._again_s.get(address, now) <= now:
                self._starting[address] = asyncio.create_task(self._start(address))

    def _addresses(self) -> set[str]:
        found = workers_of(self._cluster.client)
        return {address for address, told in found.items() if told["resources"].get(EXPLORER_RESOURCE)}

    async def _start(self, address: str) -> WorkerEngine:
        """An engine on a worker that serves the newest weights. Raises: RftError; OSError: the worker is not there."""
        client = self._cluster.client
        try:
            await asyncio.to_thread(client.run, host_engines, workers=[address])
        except Exception as error:  # whatever the call raised there, such as where rftdask is another one
            raise RoleError(f"it cannot be asked to start one: {type(error).__name__}: {error}") from error
        engine = await WorkerEngine.open(address, client.connection_args, self._run)
        try:
            await self._load_newest(engine)
        except BaseException:
            engine.close()
            raise
        return engine

    def _take_started(self, address: str, starting: asyncio.Task[WorkerEngine]) -> None:
        try:
            self._asked[address] = engine = starting.result()
        except asyncio.CancelledError:
            return
        except (RftError, OSError) as error:
            self._again_s[address] = time.monotonic() + _AGAIN_S
            self._num_failures += 1
            log.warning("worker %s has no engine: %s", address, error)
            if isinstance(error, UserError) and not self._asked:
                raise
            if self._num_failures >= MAX_FAILURES and not self._asked:
                raise RoleError(f"{self._num_failures} engines in a row did not start; the last: {error}") from error
        else:
            self._num_failures = 0
            self.queue.add(engine)
            log.info("%s is asked from now on", engine)

    def _take_lost(self, engine: ServedEngine) -> None:
        log.warning("%s is asked no more; what it was asked goes elsewhere", engine)
        engine.close()  # also one that hangs
        self._asked = {address: each for address, each in self._asked.items() if each is not engine}

    async def close(self) -> None:
        """See EnginePool."""
        for starting in self._starting.values():
            starting.cancel()
        await super().close()


class WorkerEngine:
    """An engine on a Dask worker, over a connection to it; on the event loop on which it was opened, but for `load`.

    It is lost when the connection ends, and then everything that was asked of it fails with the same error.
    """

    def __init__(self, address: str, comm: Comm) -> None:
        """See `open`."""
        self._name, self._comm = f"the engine of worker {address}", comm
        self.cache_tokens: int | None = None
        self.weights = Published(0, "", "")
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._num_asked = 0
        self._ready = Future[Any]()
        self._asked: dict[int, Future[Any]] = {0: self._ready}
        """What is not answered yet; by 0 whether it is ready."""
        self._listeners: dict[int, OnTokens] = {}
        """Who takes the tokens of those that stream."""
        self._failure: RftError | None = None
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    @classmethod
    async def open(cls, address: str, connection_args: Mapping[str, Any], run: WarmUp) -> WorkerEngine:
        """The engine that a worker starts for this, once it is ready. Raises: UserError, RoleError; OSError."""
        comm = await connect(address, **connection_args)
        await comm.write({"op": OPERATION, "run": astuple(run), "reply": False})
        engine = cls(address, comm)
        await engine.wait_ready()
        return engine

    async def wait_ready(self) -> None:
        """Wait until the model is loaded and has answered. Raises: UserError, RoleError: why not; it is closed then."""
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._ready), LOAD_TIMEOUT_S)
        except TimeoutError:
            raise RoleError(f"{self} was not ready in {LOAD_TIMEOUT_S:.0f} s") from None
        finally:
            if self.alive() and (self._ready.cancelled() or not self._ready.done()):
                self.close()

    def submit(self, requests: Sequence[GenerateRequest]) -> list[Future[Generation]]:
        """As EngineClient.submit."""
        futures = [Future[Any]() for _ in requests]
        if self._failure is not None:
            for future in futures:
                future.set_exception(self._failure)
            return futures
        numbered = []
        for request, future in zip(requests, futures, strict=True):
            number = self._number(future)
            if request.on_tokens is not None:
                self._listeners[number] = request.on_tokens
            plain = NumberedRequest(number, replace(request, on_tokens=None), request.on_tokens is not None)
            numbered.append(plain)

            def drop(future: Future[Any], number: int = number) -> None:
                self._listeners.pop(number, None)
                if future.cancelled() and self._asked.pop(number, None) is not None:
                    self._outbox.put_nowait(FROM_SERVER.encode(Drop((number,))))

            future.add_done_callback(drop)
        self._outbox.put_nowait(FROM_SERVER.encode(Generate(tuple(numbered))))
        return futures

    def load(self, storage: Storage, published: Published) -> None:
        """As EngineClient.load; its worker reads the version from the same storage. From another thread."""
        loaded: Future[Any] = Future()

        def ask() -> None:
            if self._failure is not None:
                loaded.set_exception(self._failure)
            else:
                self._outbox.put_nowait(FROM_SERVER.encode(Load(self._number(loaded), published.version)))

        self._loop.call_soon_threadsafe(ask)
        try:
            loaded.result(LOAD_TIMEOUT_S)
        except TimeoutError:
            raise WaitTimeout(f"{self} did not load version {published.version} in {LOAD_TIMEOUT_S:.0f} s") from None
        self.weights = published

    def alive(self) -> bool:
        """See ServedEngine."""
        return self._failure is None

    def close(self) -> None:
        """End the connection, and the engine with it. Idempotent."""
        self._fail(ProcessLostError(f"{self} was closed"))

    def __str__(self) -> str:
        return self._name

    def _number(self, future: Future[Any]) -> int:
        self._num_asked += 1
        self._asked[self._num_asked] = future
        return self._num_asked

    async def _write(self) -> None:
        with suppress(OSError):  # of which Dask's broken connections are kinds; who reads tells why
            while True:
                messages = [await self._outbox.get()]
                while not self._outbox.empty():
                    messages.append(self._outbox.get_nowait())
                await self._comm.write(messages)

    async def _read(self) -> None:
        try:
            while self._failure is None:
                for plain in await self._comm.read():
                    self._take(FROM_WORKER.decode(plain))
        except OSError as error:
            self._fail(ProcessLostError(f"{self} is lost: {error}"))

    def _take(self, message: FromWorker) -> None:
        if isinstance(message, Generated):
            for sampled in message.sampled:
                if (listener := self._listeners.get(sampled.number)) is not None:
                    listener(sampled.tokens)
            for answer in message.answers:
                self._answer(answer.number, answer.generation)
        elif isinstance(message, Gone):
            # Of one that was ready it is as with any other loss: it may do better on another machine.
            is_users = message.is_users and 0 in self._asked
            self._fail((UserError if is_users else ProcessLostError)(f"{self}: {message.why}"))
        elif isinstance(message, Hosted):
            self._name = f"{message.name} of worker {self._comm.peer_address}"
            self.cache_tokens = message.cache_tokens
            self._answer(0, None)
        elif isinstance(message, Loaded):
            self._answer(message.number, None)
        elif (future := self._asked.pop(message.number, None)) is not None:
            future.set_exception(StorageError(message.why))

    def _answer(self, number: int, answer: Any) -> None:
        future = self._asked.pop(number, None)
        # False for one that was cancelled meanwhile: its answer is dropped.
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(answer)

    def _fail(self, error: RftError) -> None:
        # The first error is the cause; what fails after it fails because of it.
        self._failure = self._failure or error
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(self._failure)
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._comm.abort()
