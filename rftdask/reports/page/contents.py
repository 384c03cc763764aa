"""Contents: the template values of the pages that the studio and the report file have in common.

Pure: stages, rows and statuses in, template values out.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rftdask.monitor.metrics import MACHINE
from rftdask.reports.jobs import RunJobs
from rftdask.reports.metric_table import DIRECTIONS, METRICS, explain
from rftdask.reports.page.answers import TASK_ORDERS, as_passed, distribution, group_outcomes, task_table
from rftdask.reports.page.curves import timeline_of
from rftdask.reports.run_reader import StageReader
from rftdask.reports.status import StageStatus
from rftdask.reports.summary import RunSummary, learned, time_split

if TYPE_CHECKING:
    import pandas as pd

NUM_TASKS = 50
_MAX_PAUSE_S = 120.0
"""A worker was absent during a pause longer than this and than three of its usual pauses between rows."""


def overview(stages: Sequence[StageReader], status: Sequence[StageStatus], summary: RunSummary) -> dict[str, Any]:
    begun = [stage for stage in stages if stage.has_begun]
    lanes, seconds = timeline_of(begun[-1]) if begun else ({}, 0.0)
    return {
        "summary": summary,
        "learned": learned(summary),
        "metrics": METRICS,
        "lanes": lanes,
        "lanes_s": seconds,
        "split": time_split(begun),
        "status": status,
    }


def samples(rows: pd.DataFrame, evals: bool, query: Mapping[str, str], number: int = 1) -> dict[str, Any]:
    """Values of page `number` of the tasks by step.

    Args: query: `stage`, `taskset`, `text`, `show` and `order`; "" or a missing key matches everything.
    """
    chosen = {key: query.get(key, "") for key in ("stage", "taskset", "text", "show")}
    if chosen["show"] == "passed":
        rows = as_passed(rows)
    if chosen["text"]:
        texts = rows["prompt_text"] + "\0" + rows["response_text"]
        rows = rows[texts.str.contains(chosen["text"], case=False, regex=False)]
    menus = {key: sorted(map(str, rows[key].unique())) for key in ("stage", "taskset")}
    for key in menus:
        if chosen[key]:
            rows = rows[rows[key] == chosen[key]]
    order = query.get("order", "")
    table = task_table(rows, order=order, first=(number - 1) * NUM_TASKS, size=NUM_TASKS)
    return {
        "evals": evals,
        "chosen": chosen,
        "menus": menus,
        "order": order,
        "orders": TASK_ORDERS,
        "table": table,
        "number": number,
        "num_pages": -(-table.num_tasks // NUM_TASKS),
    }


def distributions(rows: pd.DataFrame) -> dict[str, Any]:
    columns = {"reward": "Reward", "response_length": "Response length (tokens)", "surprise": "Mean logprob"}
    drawn = []
    for stage in map(str, rows["stage"].unique()):
        reward, *others = [distribution(rows, column, label, stage) for column, label in columns.items()]
        drawn += [part for part in (reward, group_outcomes(rows, stage), *others) if part is not None]
    return {"distributions": drawn}


def cluster(stages: Sequence[StageReader], status: Sequence[StageStatus], jobs: RunJobs) -> dict[str, Any]:
    workers = workers_of([stage for stage in stages if stage.has_begun])
    return {
        "jobs": jobs,
        "status": status,
        "workers": workers,
        "hours": sum(worker.seconds for worker in workers) / 3600,
        "gpu_hours": sum(worker.num_gpus * worker.seconds for worker in workers) / 3600,
    }


def about(stages: Sequence[StageReader], summary: RunSummary) -> dict[str, Any]:
    # Metrics are columns of floats; tags such as the taskset are text.
    measured = {
        str(column)
        for stage in stages
        for column in stage.metrics
        if stage.metrics[column].dtype.kind == "f" and column not in ("step", "time_s")
    }
    order = {metric: number for number, metric in enumerate(METRICS)}
    # The package's metrics come first, in the order of METRICS, before those of workflows and operators.
    names = sorted(measured, key=lambda metric: (explain(metric) is None, order.get(metric, len(order)), metric))
    return {
        "summary": summary,
        "explained": [(metric, explain(metric)) for metric in names],
        "directions": DIRECTIONS,
        "machine": f"{platform.system()} {platform.machine()}",
    }


@dataclass(frozen=True)
class Worker:
    """A worker process according to its newest measurement."""

    name: str
    host: str
    seconds: float
    """Time for which the worker was present."""
    last_s: float
    """Unix seconds of the newest measurement."""
    num_gpus: int
    used: Mapping[str, float]
    """Metrics of `processes.gpus.Meter` by name."""


def workers_of(stages: Sequence[StageReader]) -> list[Worker]:
    """List the workers of these stages by name. Time counts once, and only while the worker measured itself."""
    import pandas as pd  # late: half a second

    workers = []
    rows = [rows for stage in stages if "process" in (rows := stage.rows(MACHINE)) and len(rows)]
    for name, group in pd.concat(rows).groupby("process") if rows else ():
        group = group.sort_values("time_s")
        pauses = group["time_s"].diff().dropna()
        counted = pauses[pauses <= max(_MAX_PAUSE_S, 3 * pauses.median())] if len(pauses) else pauses
        last = group.iloc[-1]
        numbers = last.drop(["role", "step", "time_s"]).to_dict()
        used = {key: float(v) for key, v in numbers.items() if isinstance(v, float) and not pd.isna(v)}
        num_gpus = int(used.get("num_gpus", 0))
        workers.append(
            Worker(str(name), str(last["host"]), float(counted.sum()), float(last["time_s"]), num_gpus, used)
        )
    return workers
