"""Machines: who worked on a run, with what, and for how long, from the rows that the driver wrote of its workers.

Pure: stages in, values of a page out. Invariant: an hour counts once, and none in which nobody measured anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rftdask.monitor.metrics import MACHINE
from rftdask.reports.run_reader import Stage

_SAYS_NOTHING_S = 120.0
"""Longer without a row than this, and than three of its usual pauses, nobody was there."""


@dataclass(frozen=True)
class Worker:
    """A worker process, as it measured itself last."""

    name: str
    host: str
    seconds: float
    """That it was there."""
    last_s: float
    """Unix seconds of what is told."""
    num_gpus: int
    used: Mapping[str, float]
    """Metrics of `processes.meter` by name."""


def workers_of(stages: Sequence[Stage]) -> list[Worker]:
    """Every worker that was there in one of the stages, by name."""
    import pandas as pd  # late: half a second

    found = []
    rows = [stage.rows(MACHINE) for stage in stages]
    rows = [each for each in rows if "process" in each and len(each)]
    for name, own in pd.concat(rows).groupby("process") if rows else ():
        own = own.sort_values("time_s")
        pauses = own["time_s"].diff().dropna()
        counted = pauses[pauses <= max(_SAYS_NOTHING_S, 3 * pauses.median())] if len(pauses) else pauses
        last = own.iloc[-1]
        numbers = last.drop(["role", "step", "time_s"]).to_dict()
        used = {key: float(v) for key, v in numbers.items() if isinstance(v, float) and v == v}  # not NaN
        num_gpus = int(used.get("num_gpus", 0))
        found.append(Worker(str(name), str(last["host"]), float(counted.sum()), float(last["time_s"]), num_gpus, used))
    return found
