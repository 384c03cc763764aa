"""Synchronizer: a Dask actor that watches the pointer and answers who waits for a version.

It keeps nothing that is not on storage, so a new one is as good as the old. It shortens waits and is never needed: the
handle falls back to reading the pointer itself. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from rftdask.errors import RoleError, StorageError, WaitTimeout
from rftdask.storage import Storage, open_storage
from rftdask.weights.published import Published, latest_published

log = logging.getLogger(__name__)

ACTOR_NAME = "rftdask-synchronizer"
_LONGEST_CALL_S = 20.0
_SLICE_S = 1.0
"""Of a wait: as often it looks whether it was called off, and whether the actor missed the pointer."""
_ANSWER_GRACE_S = 5.0


class Synchronizer:
    """The actor. All methods are coroutines and run on the event loop of its worker; storage is read in a thread."""

    def __init__(self, url: str, poll_interval_s: float) -> None:
        self._url = url
        self._poll_interval_s = poll_interval_s
        self._published: Published | None = None
        self._storage: Storage | None = None
        self._changed: asyncio.Condition | None = None
        self._task: asyncio.Task[None] | None = None
        self._nudge: asyncio.Event | None = None
        self._starting = asyncio.Lock()
        self._closed = False

    async def latest(self) -> Published | None:
        """The newest published version known here."""
        await self._start()
        return self._published

    async def wait_for_version(self, version: int, timeout_s: float) -> Published | None:
        """The newest version once it is `version` or newer, or None after `timeout_s` (bounded by 20 s)."""
        await self._start()
        assert self._changed is not None
        async with self._changed:
            try:
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: self._reached(version)), min(timeout_s, _LONGEST_CALL_S)
                )
            except TimeoutError:
                return None
        return self._published

    async def hint(self) -> None:
        """Somebody says that the pointer moved: look now."""
        await self._start()
        assert self._nudge is not None
        self._nudge.set()

    async def close(self) -> None:
        """Stop watching. Idempotent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()

    def _reached(self, version: int) -> bool:
        return self._published is not None and self._published.version >= version

    async def _start(self) -> None:
        # Not in __init__, which runs in a thread without an event loop. The lock: several may be the first to call.
        async with self._starting:
            if self._task is None and not self._closed:
                self._storage = open_storage(self._url)
                self._changed = asyncio.Condition()
                self._nudge = asyncio.Event()
                await self._look()
                self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        assert self._nudge is not None
        while not self._closed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._nudge.wait(), self._poll_interval_s)
            self._nudge.clear()
            try:
                await self._look()
            except Exception:  # a watcher that ends would leave all who wait to their deadlines
                log.exception("the synchronizer cannot read %s; it tries again", self._url)

    async def _look(self) -> None:
        assert self._storage is not None and self._changed is not None
        try:
            found = await asyncio.to_thread(latest_published, self._storage)
        except StorageError:
            return  # no news; who waits has a deadline of its own
        if found is not None and (self._published is None or found != self._published):
            async with self._changed:
                self._published = found
                self._changed.notify_all()


class SyncHandle:
    """How a role asks for versions: through the actor while there is one, else by reading the pointer.

    Example: SyncHandle(storage, client).wait_for_version(12, deadline_s=3600)
    """

    def __init__(self, storage: Storage, client: Any, poll_interval_s: float = 0.05) -> None:
        """client: a distributed.Client, or None to read the pointer only."""
        self._storage = storage
        self._client = client
        self._poll_interval_s = poll_interval_s
        self._actor: Any = None

    def latest(self) -> Published | None:
        return latest_published(self._storage)

    def wait_for_version(
        self, version: int, deadline_s: float, called_off: Callable[[], bool] = lambda: False
    ) -> Published:
        """The newest version once `version` or a newer one is published.

        Raises: WaitTimeout: not in `deadline_s`; RoleError: `called_off` said meanwhile that nobody wants it any more.
        """
        end = time.monotonic() + deadline_s
        found = self.latest()
        while found is None or found.version < version:
            left = end - time.monotonic()
            if called_off():
                raise RoleError(f"the wait for policy version {version} was called off")
            if left <= 0:
                newest = "none yet" if found is None else str(found.version)
                raise WaitTimeout(
                    f"policy version {version} was not published in {deadline_s:.0f} s; newest: {newest}. "
                    "Is the trainer alive? (synchronizer.sync_timeout)"
                )
            found = self._ask(version, left) or self.latest()
        return found

    def hint(self) -> None:
        """Tell the actor that the pointer moved; lost hints cost one poll interval."""
        try:
            self._connect()
            self._actor.hint()
        except Exception:
            self._actor = None

    def _ask(self, version: int, left_s: float) -> Published | None:
        try:
            self._connect()
            timeout_s = min(left_s, _SLICE_S)
            answer: Published | None = self._actor.wait_for_version(version, timeout_s).result(
                timeout=timeout_s + _ANSWER_GRACE_S
            )
            return answer
        except Exception:
            # The decision: whatever ails the actor (lost worker, new generation, closed client), storage has the
            # answer.
            self._actor = None
            time.sleep(min(self._poll_interval_s, left_s))
            return None

    def _connect(self) -> None:
        if self._actor is None:
            if self._client is None:
                raise RuntimeError("no Dask client: the pointer is read directly")
            self._actor = self._client.get_dataset(ACTOR_NAME).result(timeout=_ANSWER_GRACE_S)


def start_synchronizer(client: Any, url: str, poll_interval_s: float, generation: str, workers: list[str]) -> Any:
    """Start the actor of this generation and publish it by name; the future, whose status tells of its death.

    A new key for each generation: a lost actor's key must not be used again. Raises: WaitTimeout.
    """
    future = client.submit(
        Synchronizer,
        url,
        poll_interval_s,
        actor=True,
        key=f"synchronizer-{generation}",
        workers=workers,
        allow_other_workers=True,
    )
    try:
        future.result(timeout=60)
    except TimeoutError as error:
        raise WaitTimeout("the synchronizer did not start in 60 s: no worker took it") from error
    client.publish_dataset(future, name=ACTOR_NAME, override=True)
    return future
