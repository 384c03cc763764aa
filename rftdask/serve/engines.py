"""Engine pool: the engines of a server and the weights that they serve. LocalEngines runs them on this machine;
worker_pool.py runs them on Dask workers.

    starting --> in `EnginePool.queue` <--> loading newer weights
                   |
                   `--> lost --> local: the server ends; on a worker: another engine is started if the worker is alive

`EnginePool.poll` never waits for one engine while others can take requests. An engine takes requests only once it
serves the newest weights.
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
from rftdask.serve.load_balancer import LoadBalancer
from rftdask.storage import Storage
from rftdask.synchronizer.published import Published, latest_written

log = logging.getLogger(__name__)


class EnginePool(ABC):
    """Engines to `poll` several times a second; meanwhile, requests go to `queue`."""

    def __init__(self, storage: Storage, queue: LoadBalancer) -> None:
        self._storage, self.queue = storage, queue
        self.weights = Published(0, "", "")
        """Oldest weights that an engine serves; unchanged while there is no engine."""
        self._loading: dict[AskedEngine, asyncio.Task[None]] = {}

    async def poll(self) -> None:
        """Add engines that are ready, remove lost ones, and start loading newer weights.

        Raises: RoleError: no engine is left and none will come; UserError: none can start.
        """
        for engine in self.queue.take_lost():
            self._handle_lost(engine)
        await self._add_engines()
        newest = await asyncio.to_thread(latest_written, self._storage)
        for engine, loading in list(self._loading.items()):
            if not loading.done():
                continue
            del self._loading[engine]
            try:
                loading.result()
            except StorageError as error:  # removed meanwhile, because a newer version exists
                log.warning("%s continues with version %d: %s", engine, engine.weights.version, error)
            except (RoleError, WaitTimeout) as error:
                log.warning("%s: %s", engine, error)
                engine.close()
        for engine in self.queue.engines:
            if newest is not None and newest != engine.weights and engine not in self._loading:
                # An engine handles messages in order: requests sent before this one use the old weights.
                self._loading[engine] = asyncio.create_task(asyncio.to_thread(engine.load, self._storage, newest))
        oldest = min(
            (engine.weights for engine in self.queue.engines), key=lambda weights: weights.version, default=None
        )
        if oldest is not None and oldest != self.weights:
            self.weights = oldest
            log.info("serving version %d", oldest.version)

    async def close(self) -> None:
        """End the engines and fail running requests. Idempotent."""
        await self.queue.close()
        for engine in self.queue.engines:
            engine.close()
        for loading in self._loading.values():
            loading.cancel()

    async def _load_newest(self, engine: AskedEngine) -> None:
        """Load the newest weights into an engine that takes no requests yet. Raises: RoleError, WaitTimeout."""
        newest = await asyncio.to_thread(latest_written, self._storage)
        try:
            if newest is not None:
                await asyncio.to_thread(engine.load, self._storage, newest)
        except StorageError as error:  # removed meanwhile; the next poll finds a newer version
            log.warning("%s starts with version %d: %s", engine, engine.weights.version, error)

    @abstractmethod
    async def _add_engines(self) -> None:
        """Add ready engines to `queue`. Raises: see `poll`."""

    @abstractmethod
    def _handle_lost(self, engine: AskedEngine) -> None:
        """Handle an engine that was lost. Raises: RoleError: the server must end."""


class LocalEngines(EnginePool):
    """Child processes on this machine: `explorer.rollout_model.engine_num` engines for the server's whole life."""

    def __init__(self, config: Config, storage: Storage, queue: LoadBalancer) -> None:
        super().__init__(storage, queue)
        section = config.explorer.rollout_model
        threads = max(1, (os.cpu_count() or 1) // section.engine_num)
        spec = engine_spec(section, config, threads, None)
        self._engines = [EngineClient(spec) for _ in range(section.engine_num)]
        self._have_started = False

    async def _add_engines(self) -> None:
        if self._have_started:
            return
        for engine in self._engines:
            await asyncio.to_thread(engine.wait_ready)
            await self._load_newest(engine)
        for engine in self._engines:
            self.queue.add(engine)
        self._have_started = True

    def _handle_lost(self, engine: AskedEngine) -> None:
        raise RoleError(f"{engine} has died; run the same command again to continue")

    async def close(self) -> None:
        await super().close()
        for engine in self._engines:
            engine.close()
