"""Fake Dask: a client with one worker on which every unit has the outcome that a test gives it, at once.

It stands for `explorer.DaskClient`, the calls of a distributed.Client that the explorer's loop makes. Nothing runs: a
future is done when it is made, and what a worker would report is reported by the outcome.

    client = FakeClient(died, died)                    # then all else ends well
    Explorer(client, ...).run()
    assert [unit.slots for unit in client.submitted] == [None, None, None]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any, cast

from distributed import KilledWorker
from distributed.scheduler import WorkerState

from rftdask.explorer.explorer import UnitFuture
from rftdask.explorer.worker_task import BEGAN_TOPIC, EXPLORER_RESOURCE, RolloutResult, RolloutTask
from rftdask.processes.dask_task import LEAVING_TOPIC

WORKER = "tcp://10.0.0.7:4711"
Outcome = Callable[["FakeClient", str, RolloutTask], RolloutResult | Exception]
"""(client, key of the Dask task, unit) -> what the unit came to."""


class FakeFuture:
    """A future that is done when it is made."""

    def __init__(self, key: str, outcome: RolloutResult | Exception) -> None:
        self.key = key
        self._outcome = outcome
        # A lost result is no error of the task: it had ended.
        failed = isinstance(outcome, Exception) and not isinstance(outcome, CancelledError)
        self.status = "error" if failed else "finished"

    def add_done_callback(self, callback: Callable[[UnitFuture], None], /) -> None:
        callback(self)

    def exception(self) -> BaseException | None:
        return self._outcome if isinstance(self._outcome, Exception) else None

    def result(self, timeout: float) -> RolloutResult:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class FakeClient:
    """One worker, on which units have the outcomes that a test gives, in turn, and then end well."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes = list(outcomes)
        self.submitted: list[RolloutTask] = []
        self.topics: dict[str, Callable[[tuple[float, Any]], None]] = {}

    def scheduler_info(self, *, n_workers: int) -> Mapping[str, Any]:
        return {"workers": {WORKER: {"resources": {EXPLORER_RESOURCE: 1}}}}

    def submit(
        self, func: Callable[[RolloutTask], RolloutResult], unit: RolloutTask, /, *, key: str, **options: Any
    ) -> FakeFuture:
        self.submitted.append(unit)
        outcome = self.outcomes.pop(0) if self.outcomes else ended_well
        return FakeFuture(key, outcome(self, key, unit))

    def report(self, topic: str, message: Any) -> None:
        """Report on a topic of Dask's, as a worker does."""
        self.topics[topic]((0.0, message))

    def subscribe_topic(self, topic: str, handler: Callable[[tuple[float, Any]], None], /) -> None:
        self.topics[topic] = handler

    def unsubscribe_topic(self, topic: str, /) -> None:
        del self.topics[topic]

    def cancel(self, futures: list[UnitFuture], /, *, force: bool) -> None:
        return


def ended_well(client: FakeClient, key: str, unit: RolloutTask) -> RolloutResult:
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
