"""Gang: N trainer ranks that start together, and end together at the first error.

The driver submits one supervisor task per rank, each to one worker; the supervisor runs the rank in a child process and
passes its events on. When a process, a worker or the storage is lost, the gang ends, and its next generation resumes
from storage on the workers that live. Any other error would come again, so it ends the run with the rank's own
traceback. Nothing is kept here that storage does not hold.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import psutil
from distributed import Future, KilledWorker, Worker, get_worker

from rftdask.errors import (
    EmptyBatchError,
    FencedError,
    PeerLostError,
    ProcessLostError,
    RftError,
    RoleError,
    StorageError,
    StorageRefusedError,
    UserError,
    WaitTimeout,
)
from rftdask.monitor.events import CODEC, Ended
from rftdask.processes.child import LOG_LEVEL, Child
from rftdask.processes.dask_task import LEAVING_TOPIC, AsksScheduler, host_of, make_cancel_check, workers_of
from rftdask.synchronizer.transports.dask_broadcast import serve_blocks
from rftdask.trainer.flight_recorder import forget, left_behind, recording

TOPIC = "rftdask"
TRAINER_RESOURCE = "trainer"
RANK = "rftdask.trainer.rank:serve"
"""What the child process of a rank runs."""
_SILENCE_S = 1800.0
"""A rank that says nothing for so long hangs; it gives signs of life while it waits for data."""
_POLL_S = 0.5
_CALL_OFF_S = 30.0
_LOOK_S = 0.05
_CAUSE_S = 5.0
"""For the error of the rank that was lost, while its worker lives and others have noticed first."""
_RESULT_S = 10.0
"""For fetching a result, which is small. Dask itself would try for minutes to fetch it from a worker that died."""
MAX_TAKEN = 20
"""Losses without a new step for which a batch system took a worker away (preempted, at its walltime)."""
_FAILED = ("error", "cancelled", "lost")
_LOSSES = (ProcessLostError, StorageError, KilledWorker, CancelledError, OSError)
"""Errors that another try may not meet: a process, its worker or the storage was gone. KilledWorker, CancelledError
and OSError (of which TimeoutError and broken connections are kinds) are what Dask says of a worker that went away."""

log = logging.getLogger(__name__)

T = TypeVar("T")


class DaskClient(AsksScheduler, Protocol):
    """What the driver asks of Dask to run a gang; `distributed.Client` is one."""

    def submit(
        self,
        func: Callable[[RankSpec, str], Ended],
        spec: RankSpec,
        address: str,
        /,
        *,
        key: str,
        workers: list[str],
        allow_other_workers: bool,
        pure: bool,
        retries: int,
        priority: int,
    ) -> Future[Ended]:
        """Run a supervisor on one of `workers`; its future."""

    def run(
        self,
        function: Callable[[Worker], T],
        /,
        *,
        workers: list[str] | None = None,
        on_error: Literal["raise", "ignore"] = "raise",
    ) -> Mapping[str, T]:
        """Call the function in the worker processes, besides any task; its answers by address."""

    def cancel(self, futures: Sequence[Future[Ended]], *, force: bool) -> None:
        """Cancel the tasks; a thread that runs one goes on until it looks."""

    def get_events(self, topic: str) -> Sequence[tuple[float, Any]]:
        """What workers have reported on a topic, with the times."""


@dataclass(frozen=True)
class RankSpec:
    """What one rank is started with; plain values, since they travel to the child process."""

    config: dict[str, Any]
    url: str
    """Of the run folder."""
    total_steps: int | None
    """Steps that the data fills; None: it is not known."""
    world_size: int
    threads: int
    log_folder: str | None
    rank: int = 0
    rendezvous: str = ""
    """Where ranks meet: a folder that only their owner may enter, or the host:port where rank 0 listens."""
    address: str = ""
    """Of its Dask worker."""


def free_address(dask_worker: Worker) -> str:
    """host:port, of this host and a port that is free now, on the worker that will run rank 0."""
    host = host_of(dask_worker.address)
    # Free at this moment, and perhaps taken when rank 0 listens: then the try is lost, and the next has another port.
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


def interface_of(host: str) -> str | None:
    """Name of the network interface with this address, for gloo, which else takes what the host's name stands for."""
    interfaces: Mapping[str, Any] = psutil.net_if_addrs()
    named = ((address.address, name) for name, addresses in interfaces.items() for address in addresses)
    return next((name for address, name in named if address == host), None)


def active_keys(dask_worker: Worker) -> list[str]:
    """Keys of the tasks whose threads run on the worker, cancelled ones included."""
    return [str(key) for key in dask_worker.active_keys]


def supervise(spec: RankSpec, address: str) -> Ended:
    """The Dask task of one rank: run its child process to the end, pass on its events, return the last one.

    Raises: ProcessLostError: the child died or hangs, the task was called off, or this is not the worker that it was
    meant for; what the rank raised.
    """
    worker = get_worker()
    if worker.address != address:
        # A strict restriction to a worker that died would wait for ever; a loose one may land elsewhere, which is told
        # here.
        raise ProcessLostError(f"rank {spec.rank} was meant for {address}, which is gone; this is {worker.address}")
    is_cancelled = make_cancel_check()
    serve_blocks(worker)  # of weights that the rank holds in the memory of this machine
    # gloo and NCCL know no keys, so they are kept on one interface; the user's own choice stays.
    interface = interface_of(host_of(address))
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else ()
    sockets = {name: os.environ.get(name, interface or "") for name in names}
    # A process of its own: a rank that crashes or is killed must not take the Dask worker with it.
    forget(spec.log_folder, spec.rank)
    child = Child(
        RANK,
        asdict(replace(spec, address=address)),
        name=f"trainer-rank-{spec.rank}",
        threads=spec.threads,
        env={LOG_LEVEL: spec.config["log"]["level"], **sockets, **recording(spec.log_folder)},
        log_file=Path(spec.log_folder, f"trainer-rank-{spec.rank}.log") if spec.log_folder else None,
    )
    heard = time.monotonic()
    try:
        while True:
            try:
                message = child.receive(_POLL_S)
            except WaitTimeout as silence:
                if time.monotonic() - heard > _SILENCE_S:
                    raise ProcessLostError(f"it said nothing for {_SILENCE_S:.0f} s") from silence
                if is_cancelled():
                    raise PeerLostError("it was called off") from None
                continue
            heard = time.monotonic()
            event = CODEC.decode(message)
            # The last message, and the only one whose loss would matter: it is the answer of the task.
            if isinstance(event, Ended):
                return event
            if spec.rank == 0:  # the others have only signs of life to give
                worker.log_event(TOPIC, message)
    except RoleError as error:
        # NCCL's watchdog ends a rank that waits too long, without a word but in its log and this file.
        waited = left_behind(spec.log_folder, spec.rank)
        told = f"{error}\n{waited}" if waited else str(error)
        # Of the same class, since the driver decides by it; now with where it happened.
        raise type(error)(f"rank {spec.rank} on worker {worker.name} ({address}): {told}") from error
    finally:
        child.close()


@dataclass(frozen=True, kw_only=True)
class Gang:
    """Runs the ranks to the end, and restarts all of them from storage when one is lost.

    Example: Gang(client=client, spec=spec, max_restarts=3, ...).run() == Ended(step=40, stopped=False)
    """

    client: DaskClient
    spec: RankSpec
    """Of every rank but for its number and the place where they meet."""
    max_restarts: int
    """After so many without a new step the next loss ends the run."""
    newest_step: Callable[[], int]
    """The newest step that was taken and written down, as storage has it."""
    worker_deadline_s: float
    """How long the workers may take to join."""
    note: Callable[[str], None]
    """Told of restarts."""
    cancelled: Callable[[], bool]
    """The run is over, so trying ends."""
    stopping: Callable[[], bool] = lambda: False
    """It is to end; ranks see that for themselves, so this is for the time when there are none."""

    def run(self) -> Ended | None:
        """How rank 0 ended; None: the run was to end while no rank was at work.

        Raises: RoleError: a rank raised what a restart does not mend, or was lost too often; FencedError; UserError.
        """
        generation, reached = 0, self.newest_step()
        # Since the last new step: why the ranks were lost, by whether a batch system took a worker away on its own.
        losses: dict[bool, int] = {False: 0, True: 0}
        while True:
            generation += 1
            addresses: list[str] = []  # of this try, which may end before there are any
            try:
                addresses = self._wait_for_workers()
                if not addresses:
                    return None
                # mkdtemp's folders are their owner's alone.
                with tempfile.TemporaryDirectory(prefix="rftdask-ranks-", ignore_cleanup_errors=True) as folder:
                    rendezvous = self._meeting_place(addresses, folder)
                    key = f"trainer-{generation}-{time.time_ns()}"  # of which none is used again
                    # All at once: ranks wait for each other when they start, so one alone would only run into its
                    # deadline.
                    futures = [
                        self.client.submit(
                            supervise,
                            replace(self.spec, rank=rank, rendezvous=rendezvous),
                            address,
                            key=f"{key}-rank-{rank}",
                            workers=[address],
                            allow_other_workers=True,
                            pure=False,
                            retries=0,
                            priority=100,
                        )
                        for rank, address in enumerate(addresses)
                    ]
                    try:
                        return self._watch(futures, addresses)
                    finally:
                        # Also after success: a rank that still runs would meet those of the next stage.
                        self._call_off(futures)
            except StorageRefusedError:
                raise
            except (*_LOSSES, WaitTimeout) as loss:
                # Ranks that take steps between their losses are a healthy run on a busy machine; those that are lost
                # again and again at the same step are not.
                newest = reached
                with suppress(StorageError):  # perhaps the loss itself
                    newest = self.newest_step()
                if newest > reached:
                    reached, losses = newest, {False: 0, True: 0}
                taken = any(address in addresses for _, address in self.client.get_events(LEAVING_TOPIC))
                losses[taken] += 1
                most = MAX_TAKEN if taken else self.max_restarts
                if losses[taken] > most or self.cancelled():
                    raise RoleError(
                        f"the trainer failed {losses[taken]} times without a new step (it is at step {reached}); the "
                        f"last time: {loss}"
                    ) from loss
                self.note(f"trainer restarts from its newest checkpoint ({losses[taken]} of {most}): {loss}")

    def _meeting_place(self, addresses: Sequence[str], folder: str) -> str:
        """Where ranks meet: `folder` on one machine, else a port of the first worker's."""
        # Loopback addresses: all workers are of this machine.
        if all(host_of(address).startswith("127.") for address in addresses):
            return folder
        try:
            return str(self.client.run(free_address, workers=[addresses[0]])[addresses[0]])
        except (OSError, KeyError) as error:
            text = f"trainer worker {addresses[0]} was lost before its rank started: {error}"
            raise ProcessLostError(text) from error

    def _watch(self, futures: Sequence[Future[Ended]], addresses: Sequence[str]) -> Ended:
        """Wait until all ranks have ended, or one has failed. Raises: the error that the others follow from."""
        changed = threading.Event()
        for future in futures:
            future.add_done_callback(lambda _: changed.set())
        while True:
            done = all(future.done() for future in futures)  # before the look at failures, which then misses none
            if any(future.status in _FAILED for future in futures):
                raise self._cause(futures, addresses)
            if done:
                try:
                    result: Ended = futures[0].result(timeout=_RESULT_S)
                except TimeoutError as error:
                    raise ProcessLostError("rank 0 ended, and its worker was lost with the result") from error
                return result
            if self.cancelled():
                raise RoleError("the run ended while the trainer was at work")
            changed.wait(_POLL_S)
            changed.clear()

    def _cause(self, futures: Sequence[Future[Ended]], addresses: Sequence[str]) -> BaseException:
        """Of the errors of the ranks the one that the others follow from.

        A rank whose peer went away says so at once; what took the peer away may be told a moment later. It is waited
        for only while its worker lives, since a worker that is gone tells nothing.
        """
        deadline = time.monotonic() + _CAUSE_S
        while True:
            causes = [_error(rank, future) for rank, future in enumerate(futures) if future.status in _FAILED]
            found = [cause for cause in causes if not isinstance(cause, PeerLostError)]
            found.sort(key=lambda cause: isinstance(cause, _LOSSES))  # what a restart does not mend comes first
            workers = workers_of(self.client)
            gone = [
                ProcessLostError(f"rank {rank} was lost with its worker {address}")
                for rank, address in enumerate(addresses)
                if address not in workers and futures[rank].status not in _FAILED
            ]
            if found or gone or len(causes) == len(futures) or time.monotonic() > deadline:
                return (found or gone or causes)[0]
            time.sleep(_LOOK_S)

    def _call_off(self, futures: Sequence[Future[Ended]]) -> None:
        """Cancel the supervisors and wait until no worker runs one, so that ranks do not meet those of the next try.

        Raises: ProcessLostError: one still runs after 30 s.
        """
        # Dask cannot end a running thread: the supervisor sees that its task is cancelled, ends its child and returns.
        self.client.cancel(futures, force=True)
        keys = {str(future.key) for future in futures}
        deadline = time.monotonic() + _CALL_OFF_S
        while time.monotonic() < deadline:
            # Asked in the workers themselves: the scheduler has forgotten a cancelled task whose thread still runs.
            running = self.client.run(active_keys, on_error="ignore")
            if not any(keys & set(active) for active in running.values()):
                return
            time.sleep(_LOOK_S)
        raise ProcessLostError(
            f"ranks of the trainer still run {_CALL_OFF_S:.0f} s after they were called off: {sorted(keys)}"
        )

    def _wait_for_workers(self) -> list[str]:
        """Addresses of as many workers as there are ranks; none: it is not worth waiting for them any more.

        Raises: WaitTimeout: too few joined.
        """
        deadline = time.monotonic() + self.worker_deadline_s
        while True:
            if self.stopping() or self.cancelled():
                return []
            workers = workers_of(self.client)
            # By address, so that ranks of one machine are neighbors, who exchange the most.
            able = sorted(a for a, info in workers.items() if info["resources"].get(TRAINER_RESOURCE))
            # More may have come than are needed, such as the one that takes the place of a
            # lost one: the rest wait for a loss.
            if len(able) >= self.spec.world_size:
                return able[: self.spec.world_size]
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"{len(able)} of {self.spec.world_size} trainer workers joined in {self.worker_deadline_s:.0f} "
                    "s; start more workers, or lower trainer.num_ranks: checkpoints are read at any number of ranks"
                )
            time.sleep(_LOOK_S)


def _error(rank: int, future: Future[Ended]) -> BaseException:
    """Why a rank's task has failed: a loss, or what the rank raised with the advice to go with it."""
    if future.status != "error":
        return ProcessLostError(f"rank {rank}'s task is {future.status}: its worker or the scheduler was lost")
    error = future.exception()
    if isinstance(error, KilledWorker):
        lost = error.last_worker
        return ProcessLostError(f"rank {rank} on worker {lost.name} ({lost.address}) was lost with its worker")
    if isinstance(error, FencedError | UserError | StorageError | ProcessLostError | EmptyBatchError):
        return error
    # Of our own errors the text says it all; of others the class is half of what there is to know.
    text = str(error) if isinstance(error, RftError) else f"rank {rank} failed: {type(error).__name__}: {error}"
    if isinstance(error, _LOSSES):
        return ProcessLostError(text)
    return RoleError(f"{text}\na restart would meet this error again: mend its cause, then run the same command again")
