"""Engines of a server: which there are, and the weights that they serve. Here those of this machine; worker_pool.py has
those of Dask's workers.

    starting --> asked (`EnginePool.queue`) <--> loading newer weights
                   |
                   `--> lost --> here: the server ends; on a worker: another one is started, where a worker is

`EnginePool.look` is called a few times a second, and waits for no engine that others can be asked beside. An engine is
asked once it serves the newest weights.
"""

from __future__ import annotations

import asyncio
import logging
import os
from abc import ABC, abstractmethod

from rftdask.config import Config
from rftdask.engines.client import AskedEngine, EngineClient
from rftdask.engines.spec import engine_spec
from rftdask.errors import RoleError, StorageError, WaitTimeout
from rftdask.serve.balance import Balanced
from rftdask.storage import Storage
from rftdask.synchronizer.published import Published, latest_written

log = logging.getLogger(__name__)


class EnginePool(ABC):
    """Example:
    pool = LocalEngines(config, storage, Balanced())
    while ...:
        await pool.look()       # and meanwhile requests go to `pool.queue`
    await pool.close()
    """

    def __init__(self, storage: Storage, queue: Balanced) -> None:
        self._storage, self.queue = storage, queue
        self.weights = Published(0, "", "")
        """The oldest that an engine serves; while none is there, the last that one did."""
        self._loading: dict[AskedEngine, asyncio.Task[None]] = {}

    async def look(self) -> None:
        """Take in who has come and who has gone, and have newer weights loaded.

        Raises: RoleError: there are no engines any more, and there will be none; UserError: none can start.
        """
        for engine in self.queue.take_lost():
            self._take_lost(engine)
        await self._look_for_engines()
        found = await asyncio.to_thread(latest_written, self._storage)
        for engine, loading in list(self._loading.items()):
            if not loading.done():
                continue
            del self._loading[engine]
            try:
                loading.result()
            except StorageError as error:  # removed meanwhile, since there is a newer one
                log.warning("%s goes on with version %d: %s", engine, engine.weights.version, error)
            except (RoleError, WaitTimeout) as error:  # it is lost, or will be as it is closed
                log.warning("%s: %s", engine, error)
                engine.close()
        for engine in self.queue.engines:
            if found is not None and found != engine.weights and engine not in self._loading:
                # In the order of messages: what was asked before is answered by the weights before.
                load = asyncio.to_thread(engine.load, self._storage, found)
                self._loading[engine] = asyncio.create_task(load)
        served = min((engine.weights for engine in self.queue.engines), key=lambda each: each.version, default=None)
        if served is not None and served != self.weights:
            self.weights = served
            log.info("serving version %d", served.version)

    async def close(self) -> None:
        """End the engines, and fail what is under way. Idempotent."""
        await self.queue.close()
        for engine in self.queue.engines:
            engine.close()
        for loading in self._loading.values():
            loading.cancel()

    async def _load_newest(self, engine: AskedEngine) -> None:
        """Have an engine serve what is newest before it is asked. Raises: RoleError, WaitTimeout."""
        found = await asyncio.to_thread(latest_written, self._storage)
        try:
            if found is not None:
                await asyncio.to_thread(engine.load, self._storage, found)
        except StorageError as error:  # removed meanwhile; the next look finds the next one
            log.warning("%s begins with version %d: %s", engine, engine.weights.version, error)

    @abstractmethod
    async def _look_for_engines(self) -> None:
        """Give `queue` those that are ready. Raises: as `look`."""

    @abstractmethod
    def _take_lost(self, engine: AskedEngine) -> None:
        """Told of one that is asked no more. Raises: RoleError: so the server is to end."""


class LocalEngines(EnginePool):
    """Engines that are processes of this one: `explorer.rollout_model.engine_num`, from the start to the end."""

    def __init__(self, config: Config, storage: Storage, queue: Balanced) -> None:
        """Starts them."""
        super().__init__(storage, queue)
        section = config.explorer.rollout_model
        threads = max(1, (os.cpu_count() or 1) // section.engine_num)
        spec = engine_spec(section, config, threads, None)
        self._engines = [EngineClient(spec) for _ in range(section.engine_num)]
        self._have_started = False

    async def _look_for_engines(self) -> None:
        if self._have_started:
            return
        for engine in self._engines:
            await asyncio.to_thread(engine.wait_ready)
            await self._load_newest(engine)
        for engine in self._engines:
            self.queue.add(engine)
        self._have_started = True

    def _take_lost(self, engine: AskedEngine) -> None:
        raise RoleError(f"{engine} has died; the same command goes on")

    async def close(self) -> None:
        """See EnginePool."""
        await super().close()
        for engine in self._engines:
            engine.close()
