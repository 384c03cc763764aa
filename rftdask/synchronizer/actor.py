"""Synchronizer: a Dask actor that watches the pointer and answers who waits for a version.

Consumes: the pointer on storage, looked at every `synchronizer.poll_interval_s` and at every hint. Produces: answers to
`wait_for_version`. What unblocks who waits: a version that is new enough, or the deadline, which every wait has.

It keeps nothing that is not on storage, so a new one is as good as the old. It shortens waits and is never needed: the
handle falls back to reading the pointer itself. It knows neither the sync styles nor what the weights are for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from distributed import Client, Future, KilledWorker

from rftdask.errors import RoleError, StorageError, WaitTimeout
from rftdask.storage import Storage, open_storage
from rftdask.synchronizer.published import Published, latest_published

log = logging.getLogger(__name__)

ACTOR_NAME = "rftdask-synchronizer"
"""Name of the Dask dataset that is the actor of the newest generation."""
_LONGEST_CALL_S = 20.0
"""Longest wait inside one call of the actor."""
_LOOK_S = 0.001
"""Shortest pause between two looks at a pointer that is near."""
_SLICE_S = 1.0
"""A handle's wait is cut into slices: between two it looks whether it was called off, and whether the actor missed the
pointer."""
_ANSWER_GRACE_S = 5.0
"""Time beyond a call's own deadline, for the actor to be found and for the answer to travel."""


class Synchronizer:
    """The actor. All methods are coroutines and run on the event loop of its worker; storage is read in a thread."""

    def __init__(self, url: str, poll_interval_s: float) -> None:
        self._storage, self._poll_interval_s = open_storage(url), poll_interval_s
        self._published: Published | None = None
        self._changed, self._nudge, self._starting = asyncio.Condition(), asyncio.Event(), asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def wait_for_version(self, version: int, timeout_s: float) -> Published | None:
        """The newest version once it is `version` or newer, or None after `timeout_s` (bounded by 20 s)."""
        await self._start()

        def reached() -> bool:
            return self._published is not None and self._published.version >= version

        async with self._changed:
            try:
                # Bounded whatever the caller asks, so that calls of handles that died do not pile up here.
                await asyncio.wait_for(self._changed.wait_for(reached), min(timeout_s, _LONGEST_CALL_S))
            except TimeoutError:
                return None
        return self._published

    async def hint(self) -> None:
        """Look now: somebody says that the pointer moved."""
        await self._start()
        self._nudge.set()

    async def close(self) -> None:
        """Stop watching. Idempotent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()

    async def _start(self) -> None:
        # Not in __init__, which runs in a thread without an event loop. The lock: several may be the first to call, and
        # there must not be two watchers.
        async with self._starting:
            if self._task is None and not self._closed:
                await self._look()
                self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while not self._closed:
            with contextlib.suppress(TimeoutError):
                # Hint or timer, whichever is first: hints make it quick, the timer makes it sure.
                await asyncio.wait_for(self._nudge.wait(), self._poll_interval_s)
            self._nudge.clear()
            try:
                await self._look()
            except Exception:  # a watcher that ends would leave all who wait to their deadlines
                log.exception("the synchronizer cannot read %s; it tries again", self._storage.url)

    async def _look(self) -> None:
        try:
            published = await asyncio.to_thread(latest_published, self._storage)
        except StorageError:
            return  # no news; who waits has a deadline of its own
        # By content and not by number: a version that was replaced after damage is news as well.
        if published is not None and published != self._published:
            async with self._changed:
                self._published = published
                self._changed.notify_all()


Result = TypeVar("Result", covariant=True)


class Pending(Protocol[Result]):
    """What `distributed.Future` and `ActorFuture` have in common."""

    def result(self, timeout: float) -> Result:
        """Raises: TimeoutError: it has none in `timeout` seconds."""


class ActorProxy(Protocol):
    """The actor as other processes see it."""

    def hint(self) -> object:
        """See Synchronizer.hint; the answer need not be waited for."""

    def wait_for_version(self, version: int, timeout_s: float) -> Pending[Published | None]:
        """See Synchronizer.wait_for_version."""


class DatasetClient(Protocol):
    """The part of a distributed.Client that a handle uses."""

    def get_dataset(self, name: str, /) -> Pending[ActorProxy]:
        """What was published under that name. Raises: KeyError: nothing was."""


class SyncHandle:
    """A role's way to ask for versions: through the actor while there is one, else by reading the pointer.

    Example: SyncHandle(storage, client).wait_for_version(12, deadline_s=3600)
    """

    def __init__(
        self,
        storage: Storage,
        client: DatasetClient | None,
        poll_interval_s: float = 0.05,
        *,
        is_near: bool = False,
    ) -> None:
        """
        Args:
            client: None: the pointer is read, and no actor asked.
            is_near: the storage is a disk of this machine, where a look takes less than a question to the actor: the
                pointer is read whenever another twentieth of the wait has passed, until that is `poll_interval_s`.
        """
        self._storage, self._is_near = storage, is_near
        self._client = client
        self._poll_interval_s = poll_interval_s
        self._actor: ActorProxy | None = None
        """The actor that answered last; None: not found yet, or it failed the last call."""

    def latest(self) -> Published | None:
        """The newest published version, read from storage."""
        return latest_published(self._storage)

    def wait_for_version(
        self, version: int, deadline_s: float, called_off: Callable[[], bool] = lambda: False
    ) -> Published:
        """Wait until `version` or a newer one is published; the newest.

        Raises: WaitTimeout: not in `deadline_s`; RoleError: `called_off` said meanwhile that nobody wants it any more.
        """
        began = time.monotonic()
        deadline, pause_s = began + deadline_s, _LOOK_S
        newest = self.latest()
        while newest is None or newest.version < version:
            left_s = deadline - time.monotonic()
            if called_off():
                raise RoleError(f"the wait for policy version {version} was called off")
            if left_s <= 0:
                there = "none yet" if newest is None else str(newest.version)
                raise WaitTimeout(
                    f"policy version {version} was not published in {deadline_s:.0f} s; newest: {there}. "
                    "Is the trainer alive? (synchronizer.sync_timeout)"
                )
            if self._is_near and pause_s < self._poll_interval_s:
                time.sleep(min(pause_s, left_s))
                pause_s = max(_LOOK_S, (time.monotonic() - began) / 20)
                newest = self.latest()
                continue
            # The actor may have missed a move of the pointer, or be of an older generation: storage has the last word.
            newest = self._ask_actor(version, left_s) or self.latest()
        return newest

    def hint(self) -> None:
        """Tell the actor that the pointer moved; lost hints cost one poll interval."""
        try:
            self._find_actor().hint()
        except Exception:  # see _ask_actor
            self._actor = None

    def _ask_actor(self, version: int, left_s: float) -> Published | None:
        """One slice of a wait; None: the version is not there yet, or the actor cannot be asked."""
        try:
            timeout_s = min(left_s, _SLICE_S)
            answer = self._find_actor().wait_for_version(version, timeout_s)
            return answer.result(timeout=timeout_s + _ANSWER_GRACE_S)
        except Exception:
            # The decision: whatever ails the actor (lost worker, new generation, closed client), storage has the
            # answer. The pause keeps a handle without an actor from reading the pointer without end.
            self._actor = None
            time.sleep(min(self._poll_interval_s, left_s))
            return None

    def _find_actor(self) -> ActorProxy:
        if self._actor is None:
            if self._client is None:
                raise RuntimeError("no Dask client: the pointer is read directly")
            # By name each time it was lost: by then another generation may have it.
            self._actor = self._client.get_dataset(ACTOR_NAME).result(timeout=_ANSWER_GRACE_S)
        return self._actor


def start_synchronizer(
    client: Client, url: str, poll_interval_s: float, generation: str, workers: list[str]
) -> Future[Synchronizer]:
    """Start the actor of this generation and publish it by name; the future, whose status tells of its death.

    generation: makes the Dask key a new one, since a lost actor's must not be used again; workers: addresses of those
    that it should run on. Raises: WaitTimeout: no worker took it in a minute.
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
    except KilledWorker:
        log.info(
            "the worker of the synchronizer was lost as it started"
        )  # the future's status tells, and nobody needs it
    except TimeoutError as error:
        raise WaitTimeout("the synchronizer did not start in 60 s: no worker took it") from error
    client.publish_dataset(future, name=ACTOR_NAME, override=True)
    return future
