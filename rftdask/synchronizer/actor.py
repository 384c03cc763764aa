"""Synchronizer: a Dask actor that watches the weights pointer and wakes waiting explorers.

Consumes: the pointer on storage, polled every `synchronizer.poll_interval_s` and at every hint. Produces: results of
`wait_for_version`. A wait ends with a version that is new enough, or at its deadline.

The actor holds no state beyond storage, so it can be replaced at any time. It only shortens waits: without it, handles
read the pointer themselves. It knows neither the sync styles nor what the weights are used for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from distributed import Client, Future, KilledWorker

from rftdask.errors import RoleError, StorageError, WaitTimeout
from rftdask.processes.dask_task import fetch
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.published import Published, latest_published

log = logging.getLogger(__name__)

ACTOR_NAME = "rftdask-synchronizer"
"""Name of the Dask dataset that holds the newest generation's actor."""
_LONGEST_CALL_S = 20.0
"""Longest wait in one actor call, in seconds."""
_MIN_PAUSE_S = 0.001
"""Shortest pause in seconds between two reads of a pointer on a local disk."""
_SLICE_S = 1.0
"""Seconds per actor call of a handle's wait. Between calls the handle checks for cancellation and reads the pointer."""
_ANSWER_GRACE_S = 5.0
"""Seconds beyond a call's own timeout, to find the actor and to transfer the result."""


class Synchronizer:
    """The actor. Methods are coroutines on the event loop of its worker; storage is read in a thread."""

    def __init__(self, url: str, poll_interval_s: float) -> None:
        self._storage, self._poll_interval_s = open_storage(url), poll_interval_s
        self._published: Published | None = None
        self._changed, self._nudge, self._starting = asyncio.Condition(), asyncio.Event(), asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def wait_for_version(self, version: int, timeout_s: float) -> Published | None:
        """Newest version once it is at least `version`; None after `timeout_s` (at most 20 s)."""
        await self._start()

        def reached() -> bool:
            return self._published is not None and self._published.version >= version

        async with self._changed:
            try:
                # Bounded, so that calls of dead handles do not pile up here.
                await asyncio.wait_for(self._changed.wait_for(reached), min(timeout_s, _LONGEST_CALL_S))
            except TimeoutError:
                return None
        return self._published

    async def hint(self) -> None:
        """Read the pointer now, because it has moved."""
        await self._start()
        self._nudge.set()

    async def close(self) -> None:
        """Stop watching. Idempotent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()

    async def _start(self) -> None:
        # Not in __init__, which runs in a thread without an event loop. The lock keeps concurrent first calls from
        # starting two watchers.
        async with self._starting:
            if self._task is None and not self._closed:
                await self._look()
                self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while not self._closed:
            with contextlib.suppress(TimeoutError):
                # Whichever comes first: a hint shortens the wait, the timer guarantees it ends.
                await asyncio.wait_for(self._nudge.wait(), self._poll_interval_s)
            self._nudge.clear()
            try:
                await self._look()
            except Exception:  # if the watcher ended, every waiting call would run into its deadline
                log.exception("the synchronizer cannot read %s; retrying", self._storage.url)

    async def _look(self) -> None:
        try:
            published = await asyncio.to_thread(latest_published, self._storage)
        except StorageError:
            return  # unchanged; every waiting call has a deadline
        # Compared by content, not by number, so that a version replaced after damage counts as a change.
        if published is not None and published != self._published:
            async with self._changed:
                self._published = published
                self._changed.notify_all()


class SyncHandle:
    """Waits for versions on behalf of a role: through the actor if it answers, else by reading the pointer.

    Example: SyncHandle(storage, client).wait_for_version(12, deadline_s=3600)
    """

    def __init__(
        self, storage: Storage, client: Client | None, poll_interval_s: float = 0.05, *, is_near: bool = False
    ) -> None:
        """
        Args:
            client: Dask client to find the actor with. None: only read the pointer.
            is_near: True if the storage is a local disk, where reading the pointer is cheaper than an actor call.
                The pause between reads is 1/20 of the time waited so far, until it reaches `poll_interval_s`.
        """
        self._storage, self._is_near = storage, is_near
        self._client = client
        self._poll_interval_s = poll_interval_s
        self._actor: Any = None
        """Dask's proxy of the actor after a successful call. None: not looked up yet, or the last call failed."""

    def latest(self) -> Published | None:
        return latest_published(self._storage)

    def wait_for_version(
        self, version: int, deadline_s: float, is_cancelled: Callable[[], bool] = lambda: False
    ) -> Published:
        """Wait until `version` or a newer one is published, and return the newest.

        Raises: WaitTimeout: none within `deadline_s` seconds. RoleError: `is_cancelled` returned True.
        """
        began = time.monotonic()
        deadline, pause_s = began + deadline_s, _MIN_PAUSE_S
        newest = self.latest()
        while newest is None or newest.version < version:
            left_s = deadline - time.monotonic()
            if is_cancelled():
                raise RoleError(f"the wait for policy version {version} was cancelled")
            if left_s <= 0:
                latest = "none yet" if newest is None else str(newest.version)
                raise WaitTimeout(
                    f"policy version {version} was not published within {deadline_s:.0f} s; newest: {latest}. "
                    "Check that the trainer is alive, or raise synchronizer.sync_timeout"
                )
            if self._is_near and pause_s < self._poll_interval_s:
                time.sleep(min(pause_s, left_s))
                pause_s = max(_MIN_PAUSE_S, (time.monotonic() - began) / 20)
                newest = self.latest()
                continue
            # The actor may be of an older generation or have missed a move; storage is authoritative.
            newest = self._ask_actor(version, left_s) or self.latest()
        return newest

    def hint(self) -> None:
        """Notify the actor that the pointer moved. A lost hint costs one poll interval."""
        try:
            self._find_actor().hint()
        except Exception:  # see _ask_actor
            self._actor = None

    def _ask_actor(self, version: int, left_s: float) -> Published | None:
        """One slice of a wait. None: the version is not published yet, or the actor does not answer."""
        try:
            timeout_s = min(left_s, _SLICE_S)
            answer = self._find_actor().wait_for_version(version, timeout_s)
            published: Published | None = answer.result(timeout=timeout_s + _ANSWER_GRACE_S)
            return published
        except Exception:
            # Whatever failed (lost worker, new generation, closed client), storage has the result. The pause keeps a
            # handle without an actor from reading the pointer in a tight loop.
            self._actor = None
            time.sleep(min(self._poll_interval_s, left_s))
            return None

    def _find_actor(self) -> Any:
        if self._actor is None:
            if self._client is None:
                raise RuntimeError("no Dask client; reading the pointer instead")
            # Looked up again after each failure, since a new generation may own the name by then.
            self._actor = fetch(self._client.get_dataset(ACTOR_NAME)).result(_ANSWER_GRACE_S)
        return self._actor


def start_synchronizer(
    client: Client, url: str, poll_interval_s: float, generation: str, workers: list[str]
) -> Future[Synchronizer]:
    """Start the actor of this generation, publish it by name, and return its future, whose status shows its death.

    Args:
        generation: part of the Dask key, since the key of a lost actor must not be reused.
        workers: preferred worker addresses.
    Raises: WaitTimeout: no worker started it within a minute.
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
        fetch(future).result(60)
    except KilledWorker:
        # The status of the future shows the loss, and no role depends on the actor.
        log.info("the worker of the synchronizer was lost during its start")
    except TimeoutError as error:
        raise WaitTimeout("the synchronizer did not start within 60 s: no worker accepted it") from error
    client.publish_dataset(future, name=ACTOR_NAME, override=True)
    return future
