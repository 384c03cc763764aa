"""The part of a Dask client that the roles use; `distributed.Client` satisfies it, and tests pass fakes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rftdask.processes.dask_task import AsksScheduler
from rftdask.rollouts.work_units import EngineRequest, RolloutResult


class UnitFuture(Protocol):
    """The part of a distributed.Future that the loop uses."""

    @property
    def key(self) -> object:
        """The key that the unit was submitted with."""

    @property
    def status(self) -> str | None:
        """pending, finished, error, cancelled or lost."""
        ...

    def add_done_callback(self, callback: Callable[[UnitFuture], None], /) -> object:
        """Call `callback` with the future once it is done, at once if it is; from another thread."""

    def exception(self) -> BaseException | None:
        """Exception of the task. None: no exception."""

    def result(self) -> RolloutResult:
        """Raises: CancelledError: it was lost; what the task raised."""
        ...


class DaskClient(AsksScheduler, Protocol):
    """The part of a distributed.Client that the loop uses."""

    def submit(
        self,
        func: Callable[[Any], Any],
        request: EngineRequest,
        /,
        *,
        key: str,
        resources: Mapping[str, float],
        workers: Sequence[str],
        priority: int,
        pure: bool,
        retries: int,
    ) -> UnitFuture:
        """Run a unit, or a warm-up, on one of `workers`, by their addresses, that has the resources."""

    def cancel(self, futures: list[UnitFuture], /, *, force: bool) -> object:
        """Cancel the tasks; running ones notice it at their next check."""

    def subscribe_topic(self, topic: str, handler: Callable[[tuple[float, Any]], None], /) -> object:
        """Call `handler` with (time, message) for reports of workers on the topic, from Dask's thread."""

    def unsubscribe_topic(self, topic: str, /) -> object:
        """Take no more reports on the topic."""
