"""Remote: how an engine is asked that lives on another Dask worker; both sides of it.

    asker (RemoteEngine)                     the engine's worker (Answering)
    an operation of the worker      -->      a handler, which says whose engine is meant
                                    <--      Ready, or Gone
    Generate, Drop, Score, Load     -->
                                    <--      Generated, Scored, Loaded, NotLoaded; Gone

Messages are those of an engine's process (server.py), but for weights, which both sides read from storage. They go over
a connection of Dask's own, with the TLS and keys of its cluster: who has those may run code on the worker anyway. Who
starts the engine and ends it, the handler knows; which worker is asked, and what becomes of a request that is lost with
one, the asker does.

Invariant: what is asked and not answered fails as soon as the connection ends, or the engine does; and what nobody
waits for any more, also because its asker has gone, leaves the engine.
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
    """Serve a version that was published. Answered by `Loaded` or `NotLoaded`."""

    number: int
    version: int


@dataclass(frozen=True)
class NotLoaded:
    """The version is not there any more, or damaged, or not to be loaded; the engine serves what it served."""

    number: int
    why: str


@dataclass(frozen=True)
class Gone:
    """There is no engine, or none any more; the last message of all."""

    why: str
    is_users: bool = False
    """Whether it would come again until the user mends it."""


FromAsker: TypeAlias = Generate | Drop | Score | Load
FROM_ASKER: Codec[FromAsker] = Codec(Generate, Drop, Score, Load)
FromWorker: TypeAlias = Ready | Generated | Scored | Loaded | NotLoaded | Gone
FROM_WORKER: Codec[FromWorker] = Codec(Ready, Generated, Scored, Loaded, NotLoaded, Gone)


async def _write(comm: Comm, outbox: asyncio.Queue[list[Any]]) -> None:
    with suppress(OSError):  # of which Dask's broken connections are kinds; who reads hears of it, too
        while True:
            messages = [await outbox.get()]
            while not outbox.empty():
                messages.append(outbox.get_nowait())
            await comm.write(messages)


# ---- the asker


class RemoteEngine(AskedEngine):
    """An engine on a Dask worker, over a connection to it. Made, opened and closed on one event loop.

    Example:
        engine = await RemoteEngine.open(address, worker.connection_args, {"op": "serve_me", "key": "judge"})
        generations = await asyncio.gather(*map(asyncio.wrap_future, engine.submit(requests)))
        engine.close()
    """

    def __init__(self, address: str, comm: Comm) -> None:
        """See `open`."""
        super().__init__()
        self._name, self._comm = f"the engine of worker {address}", comm
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(_write(comm, self._outbox))]

    @classmethod
    async def open(cls, address: str, connection_args: Mapping[str, Any], operation: dict[str, Any]) -> RemoteEngine:
        """The engine that a worker has for this, once it is ready. operation: "op", the name of the handler, and what
        it takes. Raises: UserError, RoleError; OSError: the worker is not there.
        """
        comm = await connect(address, **connection_args)
        await comm.write(operation)
        engine = cls(address, comm)
        await engine.wait_ready()
        return engine

    async def wait_ready(self) -> None:
        """Wait until the model is loaded and has answered. Raises: UserError, RoleError: why not; it is closed then."""
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._ready), LOAD_TIMEOUT_S)
        except TimeoutError:
            self.close()
            raise RoleError(f"{self} was not ready in {LOAD_TIMEOUT_S:.0f} s") from None
        except BaseException:
            self.close()
            raise

    async def wait_lost(self) -> None:
        """Wait until it is lost, or closed."""
        await asyncio.wait(self._tasks[:1])

    def load(self, storage: Storage, published: Published) -> None:
        """As EngineClient.load; its worker reads the version from the same storage. From another thread."""
        self._wait(self._ask(partial(Load, version=published.version)), LOAD_TIMEOUT_S)
        self.weights = published

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._fail(ProcessLostError(f"{self} was closed"))

    def __str__(self) -> str:
        return self._name

    def _send(self, message: FromAsker) -> None:
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, FROM_ASKER.encode(message))

    async def _read(self) -> None:
        try:
            while self.alive():
                # Nothing of a worker that does not know the operation.
                for plain in await self._comm.read() or [FROM_WORKER.encode(Gone("it serves none"))]:
                    message = FROM_WORKER.decode(plain)
                    if isinstance(message, Gone):
                        # Of one that was ready it is as with any other loss: it may do better on another machine.
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
        except Exception as error:  # the connection has ended, or says what it should not: nobody else would hear of it
            self._fail(ProcessLostError(f"{self} is lost: {error}"))

    def _fail(self, error: RftError) -> None:
        super()._fail(error)
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._comm.abort()


class RemoteEngines:
    """The engines of workers that come and go, one of each. On one event loop.

    Example:
        engines = RemoteEngines(open_engine, again_s=10.0)
        engines.look(addresses)     # now and then
        engines.alive               # those that may be asked
        engines.close()
    """

    def __init__(self, open_engine: Callable[[str], Coroutine[Any, Any, RemoteEngine]], again_s: float) -> None:
        """open_engine: opens that of the worker at an address; again_s: pause before it is opened again where that has
        raised RftError or OSError.
        """
        self._open_engine, self._again_s = open_engine, again_s
        self._kept: dict[str, asyncio.Task[None]] = {}
        """By the address of the worker."""
        self._engines: list[RemoteEngine] = []

    @property
    def alive(self) -> list[RemoteEngine]:
        """Those that may be asked."""
        return [engine for engine in self._engines if engine.alive()]

    def look(self, there: Set[str]) -> None:
        """Take in which workers there are."""
        # What Dask has given up may hang, and still have a connection: what is under way there goes elsewhere.
        for address in self._kept.keys() - there:
            self._kept[address].cancel()
        self._kept = {address: kept for address, kept in self._kept.items() if address in there and not kept.done()}
        for address in sorted(there - self._kept.keys()):
            self._kept[address] = asyncio.create_task(self._keep(address))

    def close(self) -> None:
        """End the connections. Idempotent."""
        self.look(frozenset())

    async def _keep(self, address: str) -> None:
        """Open the engine of a worker, and keep it until it is lost."""
        try:
            engine = await self._open_engine(address)
        except (RftError, OSError):  # the worker is gone, or has none
            await asyncio.sleep(self._again_s)
            return
        self._engines.append(engine)
        try:
            await engine.wait_lost()
        finally:
            self._engines.remove(engine)
            engine.close()


# ---- the engine's worker


class Answering:
    """An engine of this worker, as one asker elsewhere is answered by it; on the event loop of the worker, but for
    `begin` and `end`, which any thread may call.

    Example:
        async def handler(comm, key):
            answering = Answering(comm)
            answering.begin(engine, storage)    # or, where there is none: answering.end(error)
            await answering.run()               # until the asker has gone
            return Status.dont_reply
    """

    _storage: Storage

    def __init__(self, comm: Comm, *, alone: asyncio.Lock | None = None, may_load: bool = False) -> None:
        """alone: held by one call at a time, of those that share the engine with nobody; None: calls share it;
        may_load: whether the asker may have weights loaded.
        """
        self._comm, self._alone, self._may_load = comm, alone, may_load
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._under_way: dict[int, Future[Any] | asyncio.Task[None]] = {}
        self._engine: EngineClient | None = None
        self.over = threading.Event()
        """Set when the asker has gone, or was told that the engine has."""

    def begin(self, engine: EngineClient, storage: Storage) -> None:
        """The engine is ready, and asked from now on. storage: the run folder, which has weights and images."""
        self._engine, self._storage = engine, storage
        self._tell(Ready(engine.cache_tokens, str(engine)))

    def end(self, error: RftError) -> None:
        """There is no engine, or none any more; only the first error is told."""
        if not self.over.is_set():
            self.over.set()
            self._tell(Gone(str(error), isinstance(error, UserError)))

    async def run(self) -> None:
        """Answer until the connection ends, which the asker does."""
        writing = asyncio.create_task(_write(self._comm, self._outbox))
        try:
            while True:
                for plain in await self._comm.read():
                    if not self.over.is_set():
                        await self._take(FROM_ASKER.decode(plain))
        except OSError:  # of which Dask's broken connections are kinds
            return
        finally:
            self.over.set()
            writing.cancel()
            for each in list(self._under_way.values()):
                each.cancel()
            self._comm.abort()

    def _tell(self, message: FromWorker) -> None:
        with suppress(RuntimeError):  # the worker has ended, and its event loop
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
                # The asker keeps them in the run folder before it asks.
                try:
                    await asyncio.to_thread(ImageFolder().fetch, self._storage, names)
                except RftError as error:
                    return self.end(error)
            self._submit(engine, message)
        else:
            waiting = asyncio.create_task(self._submit_alone(engine, message, self._alone))
            self._under_way |= {each.number: waiting for each in message.requests}

    def _submit(self, engine: EngineClient, message: Generate) -> list[Future[Generation]]:
        def told(number: int, tokens: tuple[int, ...]) -> None:
            self._tell(Generated((), (Sampled(number, tokens),)))

        listeners = [partial(told, each.number) if each.streams else None for each in message.requests]
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
        # From a thread of the engine's client.
        self._under_way.pop(number, None)
        try:
            found = future.result()
        except CancelledError:
            return
        except RftError as error:
            # Of all that is under way: the engine has ended, and the asker is told so once.
            self.end(error)
        else:
            is_score = isinstance(found, Scored)
            self._tell(replace(found, number=number) if is_score else Generated((Answer(number, found),)))

    def _load(self, engine: EngineClient, message: Load) -> None:
        try:
            if not self._may_load:
                raise StorageError(f"{engine} keeps the weights that it has")
            published = read_published(self._storage, message.version)
            if published is None:
                raise StorageError(f"weights of version {message.version} are not there any more")
            engine.load(self._storage, published)
        except StorageError as error:
            self._tell(NotLoaded(message.number, str(error)))
        except RftError as error:  # after which an engine is not to be used
            self.end(error)
        else:
            self._tell(Loaded(message.number, message.version))
