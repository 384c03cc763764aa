"""Fake `explorer.dask_client.DaskClient` whose units have the outcomes that a test specifies, at once or on request.

client = FakeClient(died, died)                    # then all else ends well
"""

from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any, cast

from distributed import KilledWorker
from distributed.scheduler import WorkerState

from rftdask.explorer.dask_client import UnitFuture
from rftdask.processes.dask_task import LEAVING_TOPIC
from rftdask.rollouts.work_unit_task import BEGAN_TOPIC, EXPLORER_RESOURCE
from rftdask.rollouts.work_units import EngineRequest, RolloutResult, RolloutTask

WORKER = "tcp://10.0.0.7:4711"
Outcome = Callable[["FakeClient", str, RolloutTask], RolloutResult | Exception | None]
"""(client, key of the Dask task, unit) -> result or error. None: keeps running, see `FakeClient.pending`."""


class FakeFuture:
    def __init__(self, key: str, unit: RolloutTask) -> None:
        self.key = key
        self.unit = unit
        self.status = "pending"
        self._outcome: RolloutResult | Exception | None = None
        self._callbacks: list[Callable[[UnitFuture], None]] = []

    def end(self, outcome: RolloutResult | Exception) -> None:
        self._outcome = outcome
        # A lost result is not an error of the task, which had ended.
        failed = isinstance(outcome, Exception) and not isinstance(outcome, CancelledError)
        self.status = "error" if failed else "finished"
        for callback in self._callbacks:
            callback(self)

    def add_done_callback(self, callback: Callable[[UnitFuture], None], /) -> None:
        self._callbacks.append(callback)
        if self.status != "pending":
            callback(self)

    def exception(self) -> BaseException | None:
        return self._outcome if isinstance(self._outcome, Exception) else None

    def result(self) -> RolloutResult:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        if self._outcome is None:
            raise TimeoutError(f"{self.key} is under way")
        return self._outcome


class FakeClient:
    """Client with one worker, on which units have the given outcomes in turn, then a default outcome."""

    def __init__(self, *outcomes: Outcome, then: Outcome | None = None, num_engines: int = 1) -> None:
        """then: outcome of units after `outcomes`. None: success."""
        self.outcomes = list(outcomes)
        self.then = then or ended_well
        self.num_engines = num_engines
        self.submitted: list[RolloutTask] = []
        self.pending: list[FakeFuture] = []
        """Futures of running units in the order of submission; a test completes them."""
        self.warming: dict[str, FakeFuture] = {}
        """Key -> future of a warm-up."""
        self.topics: dict[str, Callable[[tuple[float, Any]], None]] = {}

    def end_first(self) -> None:
        future = self.pending.pop(0)
        future.end(RolloutResult(future.unit.key, ("shard",), 0, WORKER))

    def scheduler_info(self, n_workers: int) -> Mapping[str, Any]:
        return {"workers": {WORKER: {"name": WORKER, "resources": {EXPLORER_RESOURCE: self.num_engines}}}}

    def submit(self, func: Callable[[Any], Any], unit: EngineRequest, /, *, key: str, **options: object) -> FakeFuture:
        """Take the next outcome without calling the function. A warm-up runs until the test completes it."""
        if not isinstance(unit, RolloutTask):
            self.warming[key] = FakeFuture(key, cast(RolloutTask, unit))
            return self.warming[key]
        self.submitted.append(unit)
        future = FakeFuture(key, unit)
        # Done before the caller has the future, as a quick task may be; its callback must still be called.
        outcome = (self.outcomes.pop(0) if self.outcomes else self.then)(self, key, unit)
        if outcome is None:
            self.pending.append(future)
        else:
            future.end(outcome)
        return future

    def report(self, topic: str, message: Any) -> None:
        self.topics[topic]((0.0, message))

    def subscribe_topic(self, topic: str, handler: Callable[[tuple[float, Any]], None], /) -> None:
        self.topics[topic] = handler

    def unsubscribe_topic(self, topic: str, /) -> None:
        del self.topics[topic]

    def cancel(self, futures: list[UnitFuture], /, *, force: bool) -> None:
        """Do nothing; running units stay so until the test completes them."""
        return


def under_way(client: FakeClient, key: str, unit: RolloutTask) -> None:
    """Outcome: the unit runs until the test completes it."""


def ended_well(client: FakeClient, key: str, unit: RolloutTask) -> RolloutResult:
    """Outcome: the unit has committed one shard, named "shard"."""
    return RolloutResult(unit.key, ("shard",), 0, WORKER)


def lost_with_the_result(client: FakeClient, key: str, unit: RolloutTask) -> Exception:
    """Outcome: the worker was lost after the unit had ended, before its result was fetched."""
    return CancelledError()


def told_to_end(client: FakeClient, key: str, unit: RolloutTask) -> Exception:
    """Outcome: the worker reported a request to end, such as a preemption, and was lost."""
    client.report(LEAVING_TOPIC, WORKER)
    return died(client, key, unit)


def died(client: FakeClient, key: str, unit: RolloutTask) -> Exception:
    """Outcome: the worker began the unit and was lost without a report."""
    client.report(BEGAN_TOPIC, (WORKER, key))
    return KilledWorker(key, cast(WorkerState, SimpleNamespace(address=WORKER)), 0)
