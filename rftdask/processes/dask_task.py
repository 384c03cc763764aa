"""What a Dask task can know of itself, and others of its worker. Dask cannot stop a running thread, so a task that
waits has to look. And which workers there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypedDict

LEAVING_TOPIC = "rftdask-leaving"
"""Where it is said of a worker, by its address, that it was told to end by who gave it, and not for what it runs."""

_TRIES = 100
"""To hear of the workers; where the scheduler does not answer any more, what was heard last stays."""


class WorkerInfo(TypedDict):
    """A worker, as `Client.scheduler_info` tells of it; the scheduler tells more."""

    name: str | int
    """Its address where it was given none; an int in Dask's own clusters."""
    resources: Mapping[str, float]
    """How much of each resource it has, whatever runs: {"explorer": 1.0}."""
    host: str
    """Its address on the network."""
    metrics: Mapping[str, Any]
    """Of its last heartbeat, what its `Meter` told among them."""


class AsksScheduler(Protocol):
    """The part of a distributed.Client that `workers_of` uses."""

    def scheduler_info(self, n_workers: int) -> Mapping[str, Any]:
        """What the scheduler tells of itself and of so many workers; -1: of all."""


def workers_of(client: AsksScheduler) -> Mapping[str, WorkerInfo]:
    """The workers that have joined and are not lost, by address, such as "tcp://10.0.0.7:4001"."""
    workers: Mapping[str, WorkerInfo] = {}
    for _ in range(_TRIES):
        told = client.scheduler_info(n_workers=-1)
        workers = told["workers"]
        # The client keeps what it heard last, and asks by itself as well, for none of the workers: such an answer that
        # came in between counts them all the same.
        if len(workers) >= told.get("n_workers", 0):
            break
    return workers


def host_of(address: str) -> str:
    """The host in an address of Dask's, such as tcp://10.0.0.7:4001."""
    return address.rsplit(":", 1)[0].split("//")[-1]


def make_called_off() -> Callable[[], bool]:
    """To be called in a task: a function that tells whether the task was cancelled since, or its worker is closing."""
    from distributed import get_worker  # late: a rank needs this module for its addresses, and Dask for nothing
    from distributed.core import Status  # late: as above

    worker = get_worker()
    key = worker.get_current_task()

    def called_off() -> bool:
        # Dask forgets nothing of a worker that closes, as it does when its scheduler is lost, and waits half a minute
        # for its threads.
        if worker.status in (Status.closing, Status.closed, Status.failed):
            return True
        # Gone, or cancelled and still running: Dask forgets a cancelled task once its thread has returned.
        state = worker.state.tasks.get(key)
        return state is None or state.state == "cancelled"

    return called_off
