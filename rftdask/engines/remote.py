"""Remote engines: client and server side of an engine on another Dask worker.

    client (RemoteEngine)                    worker of the engine (RemoteEngineServer)
    an operation of the worker      -->      a handler, which selects the engine
                                    <--      Ready, or Gone
    Generate, Drop, Score, Load     -->
                                    <--      Generated, Scored, Loaded, NotLoaded; Gone

Messages are those of an engine process (server.py), except for weights, which both sides read from storage. They use a
Dask connection with the TLS and keys of its cluster, whose holders may run code on the worker anyway.

Invariant: pending calls fail as soon as the connection or the engine ends; requests that are cancelled or whose client
is gone leave the engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Set
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from distributed import connect
from distributed.comm.core import Comm

from rftdask.data.images import ImageFolder
from rftdask.engines.base import Generation
from rftdask.engines.client import LOAD_TIMEOUT_S, AskedEngine, EngineClient
from rftdask.engines.server import Answer, Drop, Generate, Generated, Loaded, Ready, Sampled, Score, Scored
from rftdask.errors import ProcessLostError, RftError, RoleError, StorageError, UserError
from rftdask.processes.messages import Codec
from rftdask.storage import Storage
from rftdask.synchronizer.published import Published, read_published


@dataclass(frozen=True)
class Load:
    """Serve a published version. The reply is `Loaded` or `NotLoaded`."""

    number: int
    version: int


@dataclass(frozen=True)
class NotLoaded:
    """The version is gone, damaged or cannot be loaded; the engine keeps its weights."""

    number: int
    why: str


@dataclass(frozen=True)
class Gone:
    """There is no engine, or it has ended. The last message."""

    why: str
    is_users: bool = False
    """True if the error will repeat until the user fixes its cause."""


FromAsker: TypeAlias = Generate | Drop | Score | Load
FROM_ASKER: Codec[FromAsker] = Codec(Generate, Drop, Score, Load)
FromWorker: TypeAlias = Ready | Generated | Scored | Loaded | NotLoaded | Gone
FROM_WORKER: Codec[FromWorker] = Codec(Ready, Generated, Scored, Loaded, NotLoaded, Gone)


async def _write(comm: Comm, outbox: asyncio.Queue[list[Any]]) -> None:
    try:
        with suppress(OSError):  # Dask's connection is broken
            while True:
                messages = [await outbox.get()]
                while not outbox.empty():
                    messages.append(outbox.get_nowait())
                await comm.write(messages)
    finally:
        comm.abort()  # the reader fails: nobody would send its requests


# ---- client


class RemoteEngine(AskedEngine):
    """Engine on a Dask worker, over a connection. Opened (`open`) and closed on one event loop."""

    def __init__(self, address: str, comm: Comm) -> None:
        super().__init__()
        self._name, self._comm = f"the engine of worker {address}", comm
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(_write(comm, self._outbox))]

    @classmethod
    async def open(cls, address: str, connection_args: Mapping[str, Any], operation: dict[str, Any]) -> RemoteEngine:
        """Engine of a worker, once it is ready. operation: "op", the name of the handler, and its arguments.

        Raises: UserError, RoleError; OSError: the worker cannot be reached.
        """
        comm = await connect(address, **connection_args)
        await comm.write(operation)
        engine = cls(address, comm)
        await engine.wait_ready()
        return engine

    async def wait_ready(self) -> None:
        """Wait until the engine is ready. Raises: UserError, RoleError: it failed, and this client is closed."""
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._ready), LOAD_TIMEOUT_S)
        except TimeoutError:
            self.close()
            raise RoleError(f"{self} was not ready in {LOAD_TIMEOUT_S:.0f} s") from None
        except BaseException:
            self.close()
            raise

    async def wait_lost(self) -> None:
        """Wait until the engine is lost or closed."""
        await asyncio.wait(self._tasks[:1])

    def load(self, storage: Storage, published: Published) -> None:
        """Like EngineClient.load; the worker reads the version from the same storage. Call from another thread."""
        self._wait(self._ask(partial(Load, version=published.version)), LOAD_TIMEOUT_S)
        self.weights = published

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._fail(ProcessLostError(f"{self} was closed"))

    def __str__(self) -> str:
        return self._name

    def _send(self, message: FromAsker) -> None:
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, FROM_ASKER.encode(message))

    async def _read(self) -> None:
        try:
            while self.alive():
                # A worker without the operation returns nothing.
                for plain in await self._comm.read() or [FROM_WORKER.encode(Gone("it serves no engine"))]:
                    message = FROM_WORKER.decode(plain)
                    if isinstance(message, Gone):
                        # After it was ready this is a loss like any other: a retry on another machine may succeed.
                        is_users = message.is_users and not self._ready.done()
                        self._fail((UserError if is_users else ProcessLostError)(f"{self}: {message.why}"))
                        return
                    if isinstance(message, NotLoaded):
                        with self._lock:
                            future = self._asked.pop(message.number, Future())
                        future.set_exception(StorageError(message.why))
                        continue
                    if isinstance(message, Ready):
                        self._name = f"{message.name} of worker {self._comm.peer_address}"
                    self._take(message)
        except Exception as error:  # the connection ended or sent garbage; otherwise the error would be lost
            self._fail(ProcessLostError(f"{self} is lost: {error}"))

    def _fail(self, error: RftError) -> None:
        super()._fail(error)
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._comm.abort()


class RemoteEngines:
    """Engines of workers that come and go, one per worker; call `look` now and then. Used on one event loop."""

    def __init__(self, open_engine: Callable[[str], Coroutine[Any, Any, RemoteEngine]], again_s: float) -> None:
        """open_engine: of the worker at an address. again_s: seconds before a retry after RftError or OSError."""
        self._open_engine, self._again_s = open_engine, again_s
        self._kept: dict[str, asyncio.Task[None]] = {}  # by worker address
        self._engines: list[RemoteEngine] = []

    @property
    def alive(self) -> list[RemoteEngine]:
        """Engines that can be used."""
        return [engine for engine in self._engines if engine.alive()]

    def look(self, there: Set[str]) -> None:
        """Update the set of workers."""
        # A worker that Dask has given up may hang with an open connection; its requests go elsewhere.
        for address in self._kept.keys() - there:
            self._kept[address].cancel()
        self._kept = {address: kept for address, kept in self._kept.items() if address in there and not kept.done()}
        for address in sorted(there - self._kept.keys()):
            self._kept[address] = asyncio.create_task(self._keep(address))

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self.look(frozenset())

    async def _keep(self, address: str) -> None:
        try:
            engine = await self._open_engine(address)
        except (RftError, OSError):  # the worker is gone or has no engine
            await asyncio.sleep(self._again_s)
            return
        self._engines.append(engine)
        try:
            await engine.wait_lost()
        finally:
            self._engines.remove(engine)
            engine.close()


# ---- worker of the engine


class RemoteEngineServer:
    """Serves an engine of this worker to one remote client: `begin` or, if there is no engine, `end`, then `run`.

    Runs on the event loop of the worker; only `begin` and `end` may be called from any thread.
    """

    _storage: Storage

    def __init__(self, comm: Comm, *, alone: asyncio.Lock | None = None, may_load: bool = False) -> None:
        """alone: lock of an engine that serves one call at a time. None: calls share the engine."""
        self._comm, self._alone, self._may_load = comm, alone, may_load
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._under_way: dict[int, Future[Any] | asyncio.Task[None]] = {}
        self._engine: EngineClient | None = None
        self.over = threading.Event()
        """Set when the client is gone or has been notified of the end of the engine."""

    def begin(self, engine: EngineClient, storage: Storage) -> None:
        """Serve requests with `engine`, which is ready. storage: run folder with weights and images."""
        self._engine, self._storage = engine, storage
        self._tell(Ready(engine.cache_tokens, str(engine)))

    def end(self, error: RftError) -> None:
        """Report that there is no engine or that it has ended. Only the first error is sent."""
        if not self.over.is_set():
            self.over.set()
            self._tell(Gone(str(error), isinstance(error, UserError)))

    async def run(self) -> None:
        """Serve until the client closes the connection."""
        writing = asyncio.create_task(_write(self._comm, self._outbox))
        try:
            while True:
                for plain in await self._comm.read():
                    if not self.over.is_set():
                        await self._take(FROM_ASKER.decode(plain))
        except OSError:  # includes Dask's broken connections
            return
        finally:
            self.over.set()
            writing.cancel()
            for each in list(self._under_way.values()):
                each.cancel()
            self._comm.abort()

    def _tell(self, message: FromWorker) -> None:
        with suppress(RuntimeError):  # the worker and its event loop have ended
            self._loop.call_soon_threadsafe(self._outbox.put_nowait, FROM_WORKER.encode(message))

    async def _take(self, message: FromAsker) -> None:
        engine = self._engine
        assert engine is not None, "Ready comes first"
        if isinstance(message, Drop):
            for number in message.numbers:
                if (asked := self._under_way.pop(number, None)) is not None:
                    asked.cancel()
        elif isinstance(message, Score):
            self._follow(message.number, engine.score(message.pairs))
        elif isinstance(message, Load):
            threading.Thread(target=self._load, args=(engine, message), name="remote-load", daemon=True).start()
        elif self._alone is None:
            if names := [name for each in message.requests for name in each.request.images]:
                # The client stores them in the run folder before the request.
                try:
                    await asyncio.to_thread(ImageFolder().fetch, self._storage, names)
                except RftError as error:
                    return self.end(error)
            self._submit(engine, message)
        else:
            waiting = asyncio.create_task(self._submit_alone(engine, message, self._alone))
            self._under_way |= {each.number: waiting for each in message.requests}

    def _submit(self, engine: EngineClient, message: Generate) -> list[Future[Generation]]:
        def send_tokens(number: int, tokens: tuple[int, ...]) -> None:
            self._tell(Generated((), (Sampled(number, tokens),)))

        listeners = [partial(send_tokens, each.number) if each.streams else None for each in message.requests]
        requests = [replace(each.request, on_tokens=on) for each, on in zip(message.requests, listeners, strict=True)]
        futures = engine.submit(requests)
        for asked, future in zip(message.requests, futures, strict=True):
            self._follow(asked.number, future)
        return futures

    async def _submit_alone(self, engine: EngineClient, message: Generate, alone: asyncio.Lock) -> None:
        async with alone:
            await asyncio.wait([asyncio.wrap_future(future) for future in self._submit(engine, message)])

    def _follow(self, number: int, future: Future[Any]) -> None:
        self._under_way[number] = future
        future.add_done_callback(partial(self._answer, number))

    def _answer(self, number: int, future: Future[Any]) -> None:
        # Called from a thread of the engine client.
        self._under_way.pop(number, None)
        try:
            found = future.result()
        except CancelledError:
            return
        except RftError as error:
            # For all pending requests: the engine has ended, which is reported once.
            self.end(error)
        else:
            is_score = isinstance(found, Scored)
            self._tell(replace(found, number=number) if is_score else Generated((Answer(number, found),)))

    def _load(self, engine: EngineClient, message: Load) -> None:
        try:
            if not self._may_load:
                raise StorageError(f"{engine} does not accept weights from this client")
            published = read_published(self._storage, message.version)
            if published is None:
                raise StorageError(f"weights of version {message.version} no longer exist")
            engine.load(self._storage, published)
        except StorageError as error:
            self._tell(NotLoaded(message.number, str(error)))
        except Exception as error:  # after which an engine must not be used; otherwise a bug would end only this thread
            self.end(error if isinstance(error, RftError) else RftError(f"{type(error).__name__}: {error}"))
        else:
            self._tell(Loaded(message.number, message.version))
