"""Machines: what the workers' meters tell, as rows of metrics; the driver hears it from the scheduler and writes it.

Invariant: the number of rows of a stage grows as the logarithm of its time, so a run of weeks on many workers can
still be read as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rftdask.monitor.metrics import MACHINE, MetricsWriter
from rftdask.processes.dask_task import WorkerInfo
from rftdask.processes.usage import METER
from rftdask.storage import Storage

_EVERY_S = 4.0
_ROWS = 10_000
"""Until there are about so many they come every `_EVERY_S` from each worker, and then ever less often."""


class MachineLog:
    """Example: log = MachineLog(storage); log.note(workers_of(client))  # as often as one likes"""

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._began_s, self._wrote_s = clock, clock(), 0.0
        self._metrics = MetricsWriter(storage, MACHINE, flush_interval_s=_EVERY_S, clock=clock)

    def note(self, workers: Mapping[str, WorkerInfo]) -> None:
        """Write a row for each worker, if it is time. Raises: StorageError."""
        now = self._clock()
        if now - self._wrote_s < max(_EVERY_S, len(workers) * (now - self._began_s) / _ROWS):
            return
        for address, info in workers.items():
            told = info.get("metrics", {}).get(METER)
            if told:  # a worker that has just begun has measured nothing, one of somebody else's cluster has no meter
                self._wrote_s = now
                self._metrics.write(int(now), told, process=str(info["name"]), host=info.get("host", address))

    def close(self) -> None:
        """Make all rows durable. Raises: StorageError."""
        self._metrics.close()
