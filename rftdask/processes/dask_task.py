"""Dask's view of workers and of the running task. Dask cannot stop a running thread, so a waiting task has to check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol, TypedDict, TypeVar

from rftdask.storage.base import in_daemon

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")

LEAVING_TOPIC = "rftdask-leaving"
"""Topic with the addresses of workers that their batch system ends, so that their tasks are not crash suspects."""

_MAX_ATTEMPTS = 100
"""Requests for a list of workers. The newest answer counts if the scheduler no longer answers."""


class WorkerInfo(TypedDict):
    """A worker in `Client.scheduler_info`, which has more keys."""

    name: str | int
    """Its address if it has no name; an int in Dask's own clusters."""
    resources: Mapping[str, float]
    """Total amount of each resource, used or free: {"explorer": 1.0}."""
    host: str
    """Its network address."""
    status: str
    """"running", or "init" for a moment after it has joined; others take no tasks either."""
    metrics: Mapping[str, Any]
    """Metrics of its last heartbeat, including those of its `Meter`."""


class AsksScheduler(Protocol):
    """The part of a distributed.Client that `workers_of` uses."""

    def scheduler_info(self, n_workers: int) -> Mapping[str, Any]:
        """State of the scheduler and of `n_workers` workers; -1: all workers."""


def workers_of(client: AsksScheduler) -> Mapping[str, WorkerInfo]:
    """The connected workers by address, such as "tcp://10.0.0.7:4001"."""
    workers: Mapping[str, WorkerInfo] = {}
    for _ in range(_MAX_ATTEMPTS):
        info = client.scheduler_info(n_workers=-1)
        workers = info["workers"]
        # The client returns its last answer, and also sends its own requests for zero workers. Such an answer in
        # between still has the number of all workers.
        if len(workers) >= info.get("n_workers", 0):
            break
    return workers


def host_of(address: str) -> str:
    """Host of a Dask address such as tcp://10.0.0.7:4001."""
    return address.rsplit(":", 1)[0].split("//")[-1]


class Fetchable(Protocol[T_co]):
    """The part of a `distributed.Future` that `fetch` uses."""

    def result(self) -> T_co:
        """Return the result of the task. Raises: what the task raised; CancelledError: it was lost."""


def fetch(future: Fetchable[T]) -> Future[T]:
    """Begin to fetch the result of a Dask task; call `result(timeout_s)` of what this returns any number of times.

    Never give Dask the timeout: in distributed 2026.7 and 2026.8, one result that times out while it waits behind five
    others makes every later result of its client raise. Here a thread waits, and stays behind if its caller gives up.
    """
    return in_daemon(future.result, "fetch-result")


def make_cancel_check() -> Callable[[], bool]:
    """Return a function that is True once the current Dask task is cancelled or its worker closes."""
    from distributed import get_worker  # late: ranks import this module and do not need Dask
    from distributed.core import Status  # late: as above

    worker = get_worker()
    key = worker.get_current_task()

    def is_cancelled() -> bool:
        # A closing worker keeps its tasks, for example after the loss of its scheduler, and waits half a minute for
        # its threads.
        if worker.status in (Status.closing, Status.closed, Status.failed):
            return True
        # Dask forgets a cancelled task once its thread has returned.
        state = worker.state.tasks.get(key)
        return state is None or state.state == "cancelled"

    return is_cancelled
