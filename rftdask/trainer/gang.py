"""Gang: N trainer ranks that start together, and end together at the first error.

The driver submits one supervisor task per rank, each to one worker; the supervisor runs the rank in a child process and
passes its events on. A lost rank ends the gang; the next generation starts on live workers and resumes from storage.
Nothing is kept here that storage does not hold.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from distributed import Client, Future, KilledWorker, Worker, get_worker

from rftdask.errors import FencedError, PeerLostError, RftError, RoleError, UserError, WaitTimeout
from rftdask.monitor.events import Ended, decode
from rftdask.processes.child import LOG_LEVEL, Child
from rftdask.processes.dask_task import make_called_off

TOPIC = "rftdask"
TRAINER_RESOURCE = "trainer"
_SILENCE_S = 1800.0
"""A rank that says nothing for so long hangs; it gives signs of life while it waits for data."""
_POLL_S = 0.5
_CALL_OFF_S = 30.0
_LOOK_S = 0.05
_CAUSE_S = 5.0
"""For the error of the rank that was lost, when others have noticed it first."""
_FAILED = ("error", "cancelled", "lost")
_RESULT_S = 10.0
"""For fetching a result, which is small. Dask itself would try for minutes to fetch it from a worker that died."""

RANK = "rftdask.trainer.rank:serve"
"""What the child process of a rank runs."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankSpec:
    """What one rank is started with; plain values, they travel to the child."""

    config: dict[str, Any]
    url: str
    total_steps: int | None
    rank: int
    world_size: int
    rendezvous: tuple[str, int]
    """Host and port where rank 0 listens."""
    threads: int
    log_file: str | None


def free_address(dask_worker: Worker) -> tuple[str, int]:
    """This host and a port that is free now, on the worker that will run rank 0."""
    host = _host(dask_worker.address)
    with socket.socket() as probe:
        probe.bind((host, 0))
        return host, probe.getsockname()[1]


def _host(address: str) -> str:
    return address.rsplit(":", 1)[0].split("//")[-1]


def interface_of(host: str) -> str | None:
    """Name of the network interface with this address, for gloo, which else takes what the host's name stands for."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return name
    return None


def active_keys(dask_worker: Worker) -> list[Any]:
    """Keys of the tasks whose threads run on the worker, cancelled ones included."""
    return list(dask_worker.active_keys)


def supervise(spec: RankSpec, address: str) -> Ended:
    """The Dask task of one rank: run its child to the end, pass on its events, return its result.

    Raises: RoleError: the child died or failed, or this is not the worker it was meant for; WaitTimeout: it hangs.
    """
    worker = get_worker()
    if worker.address != address:
        # A strict restriction to a worker that died would wait for ever; a loose one may land elsewhere, which is told
        # here.
        raise RoleError(f"rank {spec.rank} was meant for {address}, which is gone; this is {worker.address}")
    try:
        return _supervise(worker, spec, address)
    except (RoleError, WaitTimeout) as error:
        raise type(error)(f"rank {spec.rank} on worker {worker.name} ({address}): {error}") from error


def _supervise(worker: Worker, spec: RankSpec, address: str) -> Ended:
    called_off = make_called_off()
    interface = interface_of(_host(address))
    child = Child(
        RANK,
        asdict(spec),
        name=f"trainer-rank-{spec.rank}",
        threads=spec.threads,
        env={LOG_LEVEL: spec.config["log"]["level"], **({"GLOO_SOCKET_IFNAME": interface} if interface else {})},
        log_file=Path(spec.log_file) if spec.log_file else None,
    )
    heard = time.monotonic()
    try:
        while True:
            try:
                message = child.receive(_POLL_S)
            except WaitTimeout:
                if time.monotonic() - heard > _SILENCE_S:
                    raise WaitTimeout(f"it said nothing for {_SILENCE_S:.0f} s") from None
                if called_off():
                    raise PeerLostError("it was called off") from None
                continue
            heard = time.monotonic()
            event = decode(message)
            if isinstance(event, Ended):
                return event
            if spec.rank == 0:
                worker.log_event(TOPIC, message)
    finally:
        child.close()


class Gang:
    """Runs the ranks to the end, restarting all of them from storage when one is lost.

    Example: Gang(client, make_spec=..., world_size=1, max_restarts=3).run() == Ended(step=40, stopped=False)
    """

    def __init__(
        self,
        client: Client,
        make_spec: Callable[[int, tuple[str, int]], RankSpec],
        *,
        world_size: int,
        max_restarts: int,
        worker_deadline_s: float,
        note: Callable[[str], None],
        cancelled: Callable[[], bool],
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """make_spec: (rank, rendezvous) -> spec; note: told of restarts; cancelled: the run is over, stop trying;
        stopping: it is to end; ranks see that for themselves, so this is for the time when there are none.
        """
        self._client = client
        self._make_spec = make_spec
        self._world_size = world_size
        self._max_restarts = max_restarts
        self._worker_deadline_s = worker_deadline_s
        self._note = note
        self._cancelled = cancelled
        self._stopping = stopping
        self._generation = 0

    def run(self) -> Ended | None:
        """The result of rank 0; None: it was to end while no rank was at work. Raises: RoleError: out of restarts, with
        the last cause; FencedError; UserError.
        """
        while True:
            try:
                return self._run_generation()
            except (FencedError, UserError):
                raise
            except (RftError, CancelledError) as error:
                self._generation += 1
                if self._generation > self._max_restarts or self._cancelled():
                    raise RoleError(f"the trainer failed {self._generation} times; the last time: {error}") from error
                self._note(
                    f"trainer restarts from its newest checkpoint ({self._generation} of {self._max_restarts}): {error}"
                )

    def _run_generation(self) -> Ended | None:
        addresses = self._wait_for_workers()
        if not addresses:
            return None
        try:
            rendezvous = self._client.run(free_address, workers=addresses[:1])[addresses[0]]
        except (OSError, KeyError) as error:
            raise RoleError(f"trainer worker {addresses[0]} was lost before its rank started: {error}") from error
        futures = [
            self._client.submit(
                supervise,
                self._make_spec(rank, rendezvous),
                address,
                key=f"trainer-{self._generation}-{time.time_ns()}-rank-{rank}",
                workers=[address],
                allow_other_workers=True,
                pure=False,
                retries=0,
                priority=100,
            )
            for rank, address in enumerate(addresses)
        ]
        changed = threading.Event()
        for future in futures:
            future.add_done_callback(lambda _: changed.set())
        try:
            while True:
                done = all(future.done() for future in futures)  # before the look at failures, which then misses none
                failed = [f for f in futures if f.status in _FAILED]
                if failed:
                    raise self._cause_of(futures)
                if done:
                    return _result(futures[0])
                if self._cancelled():
                    raise RoleError("the run ended while the trainer was at work")
                changed.wait(_POLL_S)
                changed.clear()
        finally:
            self._client.cancel(futures, force=True)
            self._wait_until_called_off({future.key for future in futures})

    def _cause_of(self, futures: list[Future]) -> BaseException:
        """Of the errors of the ranks the one that the others follow from, which may come a moment after them."""
        deadline = time.monotonic() + _CAUSE_S
        while True:
            causes = [_cause(rank, future) for rank, future in enumerate(futures) if future.status in _FAILED]
            found = [cause for cause in causes if not isinstance(cause, PeerLostError)]
            if found or len(causes) == len(futures) or time.monotonic() > deadline:
                return (found or causes)[0]
            time.sleep(_LOOK_S)

    def _wait_until_called_off(self, keys: set[Any]) -> None:
        """Until no worker runs a supervisor of this generation, so that its ranks do not meet those of the next."""
        deadline = time.monotonic() + _CALL_OFF_S
        while time.monotonic() < deadline:
            running = self._client.run(active_keys, on_error="ignore")
            if not any(keys & set(found) for found in running.values()):
                return
            time.sleep(_LOOK_S)
        raise WaitTimeout(
            f"ranks of the trainer still run {_CALL_OFF_S:.0f} s after they were called off: {sorted(keys)}"
        )

    def _wait_for_workers(self) -> list[str]:
        """Empty: it is not worth waiting for them any more."""
        deadline = time.monotonic() + self._worker_deadline_s
        while True:
            if self._stopping():
                return []
            workers = self._client.scheduler_info(n_workers=-1)["workers"]
            able = sorted(a for a, info in workers.items() if info["resources"].get(TRAINER_RESOURCE))
            if len(able) >= self._world_size:
                return able[: self._world_size]
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"{len(able)} of {self._world_size} trainer workers joined in {self._worker_deadline_s:.0f} s; "
                    "start more workers, or lower trainer.num_ranks: checkpoints are read at any number of ranks"
                )
            time.sleep(_LOOK_S)


def _result(future: Future) -> Ended:
    try:
        result: Ended = future.result(timeout=_RESULT_S)
        return result
    except TimeoutError as error:
        raise RoleError("rank 0 ended, and its worker was lost with the result") from error


def _cause(rank: int, future: Future) -> BaseException:
    if future.status == "error":
        error = future.exception()
        if isinstance(error, KilledWorker):
            lost = error.last_worker
            return RoleError(f"rank {rank} on worker {lost.name} ({lost.address}) was lost with its worker")
        return (
            error if isinstance(error, RftError) else RoleError(f"rank {rank} failed: {type(error).__name__}: {error}")
        )
    return RoleError(f"rank {rank}'s task is {future.status}: its worker or the scheduler was lost")
