"""Gang: N trainer ranks that start together, and end together at the first error.

The driver submits one supervisor task per rank, each to one worker; the supervisor runs the rank in a child process and
forwards its events. If a process, a worker or the storage is lost, the gang ends, and a new one resumes from storage on
the remaining workers. Any other error would recur, so it ends the run with the rank's traceback.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from distributed import Client, Future, KilledWorker, Worker, get_worker

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
from rftdask.processes.dask_task import LEAVING_TOPIC, fetch, host_of, make_cancel_check, workers_of
from rftdask.storage.temporary import TemporaryFolder
from rftdask.synchronizer.transports.dask_broadcast import serve_blocks
from rftdask.trainer.flight_recorder import forget, left_behind, recording

TOPIC = "rftdask"
TRAINER_RESOURCE = "trainer"
RANK = "rftdask.trainer.rank:serve"
"""Entry point of a rank's child process."""
_HEARTBEAT_TIMEOUT_S = 1800.0
"""Seconds without a message after which a rank counts as hung; ranks send heartbeats while they wait for data."""
_MESSAGE_INTERVAL_S = 0.5
_CANCEL_TIMEOUT_S = 30.0
_POLL_INTERVAL_S = 0.05
_CAUSE_TIMEOUT_S = 5.0
"""Seconds to wait for the error of the rank that failed first, if its peers report their loss of it before."""
_RESULT_TIMEOUT_S = 600.0  # seconds to fetch a result, which is small, while Dask knows of no lost worker
MAX_TAKEN = 20
"""Largest number of losses without a new step to a batch system that takes workers (preemption, walltime)."""
_FAILED = ("error", "cancelled", "lost")
_LOSSES = (ProcessLostError, StorageError, KilledWorker, CancelledError, OSError)
"""Errors that a restart may avoid: a process, its worker or the storage was lost. Dask raises KilledWorker,
CancelledError and OSError (including TimeoutError and broken connections) for a lost worker."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankSpec:
    """Arguments of a rank; plain values, since they are sent to the child process."""

    config: dict[str, Any]
    url: str
    """URL of the run folder."""
    total_steps: int | None
    """Steps of whole batches in the data; None: unknown."""
    world_size: int
    threads: int
    log_folder: str | None
    rank: int = 0
    rendezvous: str = ""
    """Private folder of the user, or host:port where rank 0 listens."""
    address: str = ""
    """Address of its Dask worker."""


def free_address(dask_worker: Worker) -> str:
    """Return host:port with a free port of this host; runs on the worker of rank 0."""
    host = host_of(dask_worker.address)
    # If the port is taken before rank 0 listens, the attempt fails, and the next one gets another port.
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


def interface_of(host: str) -> str | None:
    """Return the network interface with this address, for gloo, which otherwise resolves the host's name."""
    interfaces: Mapping[str, Any] = psutil.net_if_addrs()
    named = ((address.address, name) for name, addresses in interfaces.items() for address in addresses)
    return next((name for address, name in named if address == host), None)


def active_keys(dask_worker: Worker) -> list[str]:
    """Return the keys of tasks that run on the worker, including cancelled ones."""
    return [str(key) for key in dask_worker.active_keys]


def supervise(spec: RankSpec, address: str) -> Ended:
    """Run the child process of one rank, forward its events, and return the last one; a Dask task.

    Raises: ProcessLostError: the child died or hangs, the task was cancelled, or it runs on another worker than
    intended; errors of the rank.
    """
    worker = get_worker()
    if worker.address != address:
        # Submitted with allow_other_workers, since a task that is bound to a dead worker would wait forever.
        raise ProcessLostError(f"rank {spec.rank} was meant for {address}, but Dask placed it on {worker.address}")
    is_cancelled = make_cancel_check()
    serve_blocks(worker)  # of weights that the rank holds in memory
    # gloo and NCCL have no authentication, so they are bound to one interface; the user's values win.
    interface = interface_of(host_of(address))
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else ()
    sockets = {name: os.environ.get(name, interface or "") for name in names}
    forget(spec.log_folder, spec.rank)
    child = Child(
        RANK,
        asdict(replace(spec, address=address)),
        name=f"trainer-rank-{spec.rank}",
        threads=spec.threads,
        env={LOG_LEVEL: spec.config["log"]["level"], **sockets, **recording(spec.log_folder)},
        log_file=Path(spec.log_folder, f"trainer-rank-{spec.rank}.log") if spec.log_folder else None,
    )
    last_message = time.monotonic()
    try:
        while True:
            try:
                message = child.receive(_MESSAGE_INTERVAL_S)
            except WaitTimeout as error:
                if time.monotonic() - last_message > _HEARTBEAT_TIMEOUT_S:
                    text = f"no heartbeat from rank {spec.rank} for {_HEARTBEAT_TIMEOUT_S:.0f} s"
                    raise ProcessLostError(text) from error
                if is_cancelled():
                    raise PeerLostError("the task was cancelled") from None
                continue
            last_message = time.monotonic()
            event = CODEC.decode(message)
            if isinstance(event, Ended):
                return event
            if spec.rank == 0:  # the other ranks only send heartbeats
                worker.log_event(TOPIC, message)
    except RoleError as error:
        # NCCL's watchdog ends a rank that waits too long; only this file and the log show it.
        calls = left_behind(spec.log_folder, spec.rank)
        text = f"{error}\n{calls}" if calls else str(error)
        # The driver decides by the class, so it is kept.
        raise type(error)(f"rank {spec.rank} on worker {worker.name} ({address}): {text}") from error
    finally:
        child.close()


@dataclass(kw_only=True)
class Gang:
    """Runs the ranks to their end, and restarts all of them from storage if one is lost."""

    client: Client
    spec: RankSpec
    """Spec of the ranks, without number and rendezvous."""
    max_restarts: int
    """Restarts allowed without a new step; the next loss ends the run."""
    newest_step: Callable[[], int]
    """Returns the newest completed step in storage."""
    worker_deadline_s: float
    """Seconds to wait for the workers to join."""
    note: Callable[[str], None]
    """Called with a message at each restart."""
    cancelled: Callable[[], bool]
    """Returns True if the run is over, so that no restart is tried."""
    stopping: Callable[[], bool] = lambda: False
    """Returns True if the run was asked to stop; only used before ranks start, since ranks check for themselves."""
    num_missing: int = 0
    """Number of workers for which the start of the ranks waits."""

    def run(self) -> Ended | None:
        """Run the ranks; returns the final event of rank 0, or None if the run stopped before any rank started.

        Raises: RoleError: a rank raised an error that a restart does not avoid, or was lost too often; FencedError;
        UserError.
        """
        reached = self.newest_step()
        losses = {False: 0, True: 0}  # since the last new step, by whether a batch system took a worker
        while True:
            addresses: list[str] = []
            try:
                addresses = self._wait_for_workers()
                if not addresses:
                    return None
                # Folders of mkdtemp are private to their owner.
                with TemporaryFolder("ranks") as folder:
                    rendezvous = self._rendezvous(addresses, folder)
                    key = f"trainer-{time.time_ns()}"  # unique
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
                        self._cancel(futures)
            except StorageRefusedError:
                raise
            except (*_LOSSES, WaitTimeout) as loss:
                # Only losses without progress count against the limit.
                newest = reached
                with suppress(StorageError):  # storage may be what was lost
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

    def _rendezvous(self, addresses: Sequence[str], folder: str) -> str:
        """Return `folder` if all workers are on this machine, else host:port on the first worker."""
        if all(host_of(address).startswith("127.") for address in addresses):
            return folder
        try:
            return str(self.client.run(free_address, workers=[addresses[0]])[addresses[0]])
        except (OSError, KeyError) as error:
            text = f"trainer worker {addresses[0]} was lost before its rank started: {error}"
            raise ProcessLostError(text) from error

    def _watch(self, futures: Sequence[Future[Ended]], addresses: Sequence[str]) -> Ended:
        """Wait until all ranks have ended, or one has failed. Raises: the error that caused the others."""
        changed, fetched, deadline = threading.Event(), None, 0.0
        for future in futures:
            future.add_done_callback(lambda _: changed.set())
        while True:
            done = all(future.done() for future in futures)  # before checking failures, so that none is missed
            if any(future.status in _FAILED for future in futures):
                raise self._cause(futures, addresses)
            if done:
                fetched, deadline = fetched or fetch(futures[0]), deadline or time.monotonic() + _RESULT_TIMEOUT_S
                with suppress(TimeoutError):
                    return fetched.result(_MESSAGE_INTERVAL_S)
                if time.monotonic() > deadline:
                    raise ProcessLostError(f"rank 0 ended, but its result did not arrive in {_RESULT_TIMEOUT_S:.0f} s")
            if self.cancelled():
                raise RoleError("the run ended while the trainer was at work")
            changed.wait(_MESSAGE_INTERVAL_S)
            changed.clear()

    def _cause(self, futures: Sequence[Future[Ended]], addresses: Sequence[str]) -> BaseException:
        """Return the error that caused those of the other ranks, which may arrive after their report of a lost peer."""
        deadline = time.monotonic() + _CAUSE_TIMEOUT_S
        while True:
            errors = [_error(rank, future) for rank, future in enumerate(futures) if future.status in _FAILED]
            causes = [error for error in errors if not isinstance(error, PeerLostError)]
            causes.sort(key=lambda error: isinstance(error, _LOSSES))  # errors that a restart does not avoid first
            workers = workers_of(self.client)
            lost_workers = [
                ProcessLostError(f"rank {rank} was lost with its worker {address}")
                for rank, address in enumerate(addresses)
                if address not in workers and futures[rank].status not in _FAILED
            ]
            if causes or lost_workers or len(errors) == len(futures) or time.monotonic() > deadline:
                return (causes or lost_workers or errors)[0]
            time.sleep(_POLL_INTERVAL_S)

    def _cancel(self, futures: Sequence[Future[Ended]]) -> None:
        """Cancel the supervisors, and wait until none is running, so that ranks do not meet the next ones."""
        # Dask cannot end a running thread: the supervisor sees that its task is cancelled, ends its child and returns.
        self.client.cancel(futures, force=True)
        keys = {str(future.key) for future in futures}
        deadline = time.monotonic() + _CANCEL_TIMEOUT_S
        while time.monotonic() < deadline:
            # The workers are asked, since the scheduler forgets cancelled tasks whose threads still run.
            if not any(keys & set(active) for active in self.client.run(active_keys, on_error="ignore").values()):
                return
            time.sleep(_POLL_INTERVAL_S)
        raise ProcessLostError(
            f"trainer ranks are still running {_CANCEL_TIMEOUT_S:.0f} s after they were cancelled: {sorted(keys)}"
        )

    def _wait_for_workers(self) -> list[str]:
        """Return the addresses of one worker per rank; [] if the run stops or is over."""
        deadline = time.monotonic() + self.worker_deadline_s
        while True:
            if self.stopping() or self.cancelled():
                return []
            workers = workers_of(self.client)
            # Sorted, so that ranks of one machine are neighbors, which communicate the most.
            # Dask would place the rank of a worker that has joined and is not running yet on another one.
            running = (a for a, info in workers.items() if info["status"] == "running")
            able = sorted(a for a in running if workers[a]["resources"].get(TRAINER_RESOURCE))
            self.num_missing = max(0, self.spec.world_size - len(able))
            # Surplus workers replace lost ones.
            if not self.num_missing:
                return able[: self.spec.world_size]
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"{len(able)} of {self.spec.world_size} trainer workers joined in {self.worker_deadline_s:.0f} "
                    "s; start more workers, or lower trainer.num_ranks: checkpoints are read at any number of ranks"
                )
            time.sleep(_POLL_INTERVAL_S)


def _error(rank: int, future: Future[Ended]) -> BaseException:
    """Return the error of a failed task: a loss, or the rank's own error with advice."""
    if future.status != "error":
        return ProcessLostError(f"rank {rank}'s task is {future.status}: its worker or the scheduler was lost")
    error = future.exception()
    if isinstance(error, KilledWorker):
        worker = error.last_worker
        return ProcessLostError(f"rank {rank} on worker {worker.name} ({worker.address}) was lost with its worker")
    if isinstance(error, FencedError | UserError | StorageError | ProcessLostError | EmptyBatchError):
        return error
    # The texts of our own errors are complete; those of others need their class.
    text = str(error) if isinstance(error, RftError) else f"rank {rank} failed: {type(error).__name__}: {error}"
    if isinstance(error, _LOSSES):
        return ProcessLostError(text)
    return RoleError(f"{text}\na restart would meet this error again: fix its cause, then run the same command again")
