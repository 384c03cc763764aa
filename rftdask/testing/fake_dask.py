"""Fake Dask: a client on whose workers every unit has the outcome that a test gives it, at once or when the test says.

It stands for `explorer.DaskClient`, the calls of a distributed.Client that the explorer's loop makes. Nothing runs, and
what a worker would report is reported by the outcome.

    client = FakeClient(died, died)                    # then all else ends well
    explorer = Explorer(client, ...)
    explorer.open()
    explorer.run()
    assert [unit.slots for unit in client.submitted] == [None, None, None]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any, cast

from distributed import KilledWorker
from distributed.scheduler import WorkerState

from rftdask.cluster.dask_client import UnitFuture
from rftdask.processes.dask_task import LEAVING_TOPIC
from rftdask.rollouts.work_unit_task import BEGAN_TOPIC, EXPLORER_RESOURCE, WarmUp
from rftdask.rollouts.work_units import RolloutResult, RolloutTask

WORKER = "tcp://10.0.0.7:4711"
Outcome = Callable[["FakeClient", str, RolloutTask], RolloutResult | Exception | None]
"""(client, key of the Dask task, unit) -> what the unit came to; None: it stays under way, see `FakeClient.pending`."""


class FakeFuture:
    """A future that is done when a test ends it."""

    def __init__(self, key: str, unit: RolloutTask) -> None:
        self.key = key
        self.unit = unit
        self.status = "pending"
        self._outcome: RolloutResult | Exception | None = None
        self._callbacks: list[Callable[[UnitFuture], None]] = []

    def end(self, outcome: RolloutResult | Exception) -> None:
        """Let the Dask task come to this."""
        self._outcome = outcome
        # A lost result is no error of the task: it had ended.
        failed = isinstance(outcome, Exception) and not isinstance(outcome, CancelledError)
        self.status = "error" if failed else "finished"
        for callback in self._callbacks:
            callback(self)

    def add_done_callback(self, callback: Callable[[UnitFuture], None], /) -> None:
        """Called at once for a future that is done, as Dask does."""
        self._callbacks.append(callback)
        if self.status != "pending":
            callback(self)

    def exception(self) -> BaseException | None:
        """The error of the task; None while it is under way."""
        return self._outcome if isinstance(self._outcome, Exception) else None

    def result(self, timeout: float) -> RolloutResult:
        """Raises: the error of the task; TimeoutError, at once, while it is under way."""
        if isinstance(self._outcome, Exception):
            raise self._outcome
        if self._outcome is None:
            raise TimeoutError(f"{self.key} is under way")
        return self._outcome


class FakeClient:
    """One worker, on which units have the outcomes that a test gives, in turn, and then all the same."""

    def __init__(self, *outcomes: Outcome, then: Outcome | None = None, num_engines: int = 1) -> None:
        """then: what units come to after `outcomes`; None: they end well."""
        self.outcomes = list(outcomes)
        self.then = then or ended_well
        self.num_engines = num_engines
        self.submitted: list[RolloutTask] = []
        self.pending: list[FakeFuture] = []
        """Futures of units under way, the first submitted first; a test ends them."""
        self.warming: dict[str, FakeFuture] = {}
        """Futures of warm-ups, by their keys."""
        self.topics: dict[str, Callable[[tuple[float, Any]], None]] = {}

    def end_first(self) -> None:
        """Let the unit that is under way for longest end well."""
        future = self.pending.pop(0)
        future.end(RolloutResult(future.unit.key, ("shard",), 0, WORKER))

    def scheduler_info(self, n_workers: int) -> Mapping[str, Any]:
        """One worker, with as many explorer resources as it has engines."""
        return {"workers": {WORKER: {"name": WORKER, "resources": {EXPLORER_RESOURCE: self.num_engines}}}}

    def submit(
        self, func: Callable[[Any], Any], unit: RolloutTask | WarmUp, /, *, key: str, **options: object
    ) -> FakeFuture:
        """The next outcome, at once; what would run is not called. A warm-up stays under way until the test ends it."""
        if isinstance(unit, WarmUp):
            self.warming[key] = FakeFuture(key, cast(RolloutTask, unit))
            return self.warming[key]
        self.submitted.append(unit)
        future = FakeFuture(key, unit)
        # Ended before the caller has the future, as a quick task may be: its callback must not be missed.
        outcome = (self.outcomes.pop(0) if self.outcomes else self.then)(self, key, unit)
        if outcome is None:
            self.pending.append(future)
        else:
            future.end(outcome)
        return future

    def report(self, topic: str, message: Any) -> None:
        """Report on a topic of Dask's, as a worker does."""
        self.topics[topic]((0.0, message))

    def subscribe_topic(self, topic: str, handler: Callable[[tuple[float, Any]], None], /) -> None:
        """One handler for each topic."""
        self.topics[topic] = handler

    def unsubscribe_topic(self, topic: str, /) -> None:
        """Raises: KeyError: nobody subscribed."""
        del self.topics[topic]

    def cancel(self, futures: list[UnitFuture], /, *, force: bool) -> None:
        """Nothing: what is under way stays so until the test ends it."""
        return


def under_way(client: FakeClient, key: str, unit: RolloutTask) -> None:
    """The unit runs until the test ends it."""


def ended_well(client: FakeClient, key: str, unit: RolloutTask) -> RolloutResult:
    """The unit has committed one shard, named "shard"."""
    return RolloutResult(unit.key, ("shard",), 0, WORKER)


def lost_with_the_result(client: FakeClient, key: str, unit: RolloutTask) -> Exception:
    """The worker was lost after the unit had ended, before its result was fetched."""
    return CancelledError()


def told_to_end(client: FakeClient, key: str, unit: RolloutTask) -> Exception:
    """The worker reported that it was told to end, such as preempted, and was lost."""
    client.report(LEAVING_TOPIC, WORKER)
    return died(client, key, unit)


def died(client: FakeClient, key: str, unit: RolloutTask) -> Exception:
    """The worker began the unit and was lost without a word."""
    client.report(BEGAN_TOPIC, (WORKER, key))
    return KilledWorker(key, cast(WorkerState, SimpleNamespace(address=WORKER)), 0)
