"""Machine metrics: the measurements of the workers' meters as rows of metrics, which the driver gets from the
scheduler.

Invariant: the number of rows grows with the logarithm of a stage's time, so the metrics of a run of weeks on many
workers still fit into memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rftdask.monitor.metrics import MACHINE, MetricsWriter
from rftdask.processes.dask_task import WorkerInfo
from rftdask.processes.usage import METER
from rftdask.storage import Storage

_INTERVAL_S = 4.0
_MAX_DENSE_ROWS = 10_000
"""Each worker has a row every `_INTERVAL_S` up to about this many rows, and then increasingly rarely."""


class MachineLog:
    """Example: log = MachineLog(storage); log.note(workers_of(client))  # at any rate"""

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._began_s, self._wrote_s = clock, clock(), 0.0
        self._metrics = MetricsWriter(storage, MACHINE, flush_interval_s=_INTERVAL_S, clock=clock)

    def note(self, workers: Mapping[str, WorkerInfo]) -> None:
        """Write a row per worker if the interval has passed. Raises: StorageError."""
        now = self._clock()
        if now - self._wrote_s < max(_INTERVAL_S, len(workers) * (now - self._began_s) / _MAX_DENSE_ROWS):
            return
        for address, info in workers.items():
            measured = info.get("metrics", {}).get(METER)
            if measured:  # new workers have no measurements yet, and workers of a foreign cluster have no meter
                self._wrote_s = now
                self._metrics.write(int(now), measured, process=str(info["name"]), host=info.get("host", address))

    def close(self) -> None:
        """Make all rows durable. Raises: StorageError."""
        self._metrics.close()
