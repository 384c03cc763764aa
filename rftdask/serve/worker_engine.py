"""Engine of a Dask worker, for a server elsewhere: the messages between the two, and the worker's side of them.

    server                                  worker
    "rftdask_engine", WarmUp       -->      starts an engine
                                   <--      Hosted, or Gone
    Generate, Drop, Load           -->
                                   <--      Generated, Loaded, NotLoaded, ...; Gone

They go over a connection of Dask's own, with its keys: who has those may run code on the worker anyway. The engine
lives as long as the connection: a server that ends, or is killed, leaves none behind.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from distributed import Status, Worker
from distributed.comm.core import Comm

from rftdask.data.images import ImageFolder
from rftdask.engines.base import GenerateRequest, Generation
from rftdask.engines.client import EngineClient
from rftdask.engines.server import Answer, Drop, Generate, Generated, NumberedRequest, Sampled
from rftdask.errors import RftError, StorageError, UserError
from rftdask.explorer.worker_task import WarmUp, own_engine
from rftdask.processes.messages import Codec
from rftdask.storage import open_storage
from rftdask.weights.published import read_published

OPERATION = "rftdask_engine"
_LOOK_S = 0.2
"""Between two looks whether the engine lives."""


@dataclass(frozen=True)
class Load:
    """Serve a version that was published. Answered by `Loaded` or `NotLoaded`."""

    number: int
    version: int


@dataclass(frozen=True)
class Hosted:
    """The engine is ready; the first message of all."""

    name: str
    cache_tokens: int | None
    """See Engine."""


@dataclass(frozen=True)
class Loaded:
    number: int


@dataclass(frozen=True)
class NotLoaded:
    """The version is not there any more, or damaged; the engine serves what it served."""

    number: int
    why: str


@dataclass(frozen=True)
class Gone:
    """There is no engine, or none any more; the last message of all."""

    why: str
    is_users: bool
    """Whether it would come again until the user mends it."""


FROM_SERVER: Codec[Generate | Drop | Load] = Codec(Generate, Drop, Load)
FromWorker: TypeAlias = Hosted | Generated | Loaded | NotLoaded | Gone
FROM_WORKER: Codec[FromWorker] = Codec(Hosted, Generated, Loaded, NotLoaded, Gone)


def host_engines(dask_worker: Worker) -> None:
    """Have a worker start an engine for each server that asks for one, from here on. Idempotent."""
    dask_worker.handlers[OPERATION] = _host


async def _host(comm: Comm, run: Sequence[Any]) -> Status:
    """Host an engine until the connection ends."""
    await _Host(comm, WarmUp(*run)).run()
    return Status.dont_reply


class _Host:
    """One engine for one server; on the event loop of the worker, but for what it waits for, which has threads."""

    def __init__(self, comm: Comm, run: WarmUp) -> None:
        self._comm, self._run = comm, run
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[FromWorker] = asyncio.Queue()
        self._under_way: dict[int, Future[Generation]] = {}
        self._engine: EngineClient | None = None
        self._failure: RftError | None = None
        self._woken = threading.Event()
        """Set when the server has gone, or the engine has failed."""
        self._is_over = False
        """Whether the server has gone."""

    async def run(self) -> None:
        writing = asyncio.create_task(self._write())
        # A daemon: a model that takes minutes to load does not hold up the end of the worker.
        threading.Thread(target=self._hold_engine, name="hosted-engine", daemon=True).start()
        try:
            while True:
                for plain in await self._comm.read():
                    await self._take(FROM_SERVER.decode(plain))
        except OSError:  # of which Dask's broken connections are kinds
            return
        except RftError as error:  # an image cannot be had
            await self._comm.write([FROM_WORKER.encode(Gone(str(error), False))])
        finally:
            self._is_over = True
            self._woken.set()
            writing.cancel()
            for future in list(self._under_way.values()):
                future.cancel()
            self._comm.abort()

    async def _write(self) -> None:
        while True:
            messages = [await self._outbox.get()]
            while not self._outbox.empty():
                messages.append(self._outbox.get_nowait())
            try:
                await self._comm.write(list(map(FROM_WORKER.encode, messages)))
            except OSError:
                return  # who reads hears of it, too

    def _tell(self, message: FromWorker) -> None:
        # From any thread.
        with suppress(RuntimeError):  # the worker has ended, and its event loop
            self._loop.call_soon_threadsafe(self._outbox.put_nowait, message)

    def _hold_engine(self) -> None:
        failure: RftError | None = None
        try:
            with own_engine(self._run, lambda: self._is_over) as engine:
                self._engine = engine
                self._tell(Hosted(str(engine), engine.cache_tokens))
                while engine.alive() and not self._is_over and self._failure is None:
                    self._woken.wait(_LOOK_S)
                failure = self._failure
        except RftError as error:
            failure = error
        except Exception as error:  # of ours: nobody else would hear of it
            failure = RftError(f"{type(error).__name__}: {error}")
        if not self._is_over:
            self._tell(Gone(str(failure or "its process has ended"), isinstance(failure, UserError)))

    async def _take(self, message: Generate | Drop | Load) -> None:
        assert self._engine is not None, "Hosted comes first"
        if isinstance(message, Drop):
            for number in message.numbers:
                if (future := self._under_way.pop(number, None)) is not None:
                    future.cancel()
        elif isinstance(message, Load):
            threading.Thread(target=self._load, args=(self._engine, message), name="hosted-load", daemon=True).start()
        else:
            if names := [name for each in message.requests for name in each.request.images]:
                # The server keeps them in the run folder before it asks.
                await asyncio.to_thread(ImageFolder().fetch, open_storage(self._run.url), names)
            futures = self._engine.submit([self._streamed(each) for each in message.requests])
            for asked, future in zip(message.requests, futures, strict=True):
                self._under_way[asked.number] = future
                future.add_done_callback(partial(self._answer, asked.number))

    def _streamed(self, asked: NumberedRequest) -> GenerateRequest:
        if not asked.streams:
            return asked.request
        return replace(
            asked.request,
            on_tokens=lambda tokens: self._tell(Generated((), (Sampled(asked.number, tokens),))),
        )

    def _answer(self, number: int, future: Future[Generation]) -> None:
        # From a thread of the engine's client.
        self._under_way.pop(number, None)
        try:
            generation = future.result()
        except CancelledError:
            return
        except RftError as error:
            # Of all that is under way: the engine has ended, and the server is told so once.
            self._failure = self._failure or error
            self._woken.set()
        else:
            self._tell(Generated((Answer(number, generation),)))

    def _load(self, engine: EngineClient, message: Load) -> None:
        storage = open_storage(self._run.url)
        try:
            published = read_published(storage, message.version)
            if published is None:
                raise StorageError(f"weights of version {message.version} are not there any more")
            engine.load(storage, published)
        except StorageError as error:
            self._tell(NotLoaded(message.number, str(error)))
        except RftError as error:  # after which an engine is not to be used
            self._failure = self._failure or error
            self._woken.set()
        else:
            self._tell(Loaded(message.number))
