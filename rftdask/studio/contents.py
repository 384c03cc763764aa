"""Contents: what the pages of one run say, as the values of their templates. The server asks for one page at a time;
the report prints several into one file, so both say the same.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from rftdask.reports.metric_table import DIRECTIONS, METRICS, explain
from rftdask.reports.summary import RunSummary, learned, time_split
from rftdask.studio.answers import TASK_ORDERS, as_passed, distribution, group_outcomes, task_table
from rftdask.studio.curves import timeline_of
from rftdask.studio.folder import Folder
from rftdask.studio.machines import workers_of

if TYPE_CHECKING:
    import pandas as pd

NUM_TASKS = 50
"""On a page of samples."""


def overview(folder: Folder, name: str, summary: RunSummary) -> dict[str, Any]:
    """What happened, where the time went, where it stands."""
    stages = [stage for stage in folder.stages(name) if stage.has_begun]
    lanes, seconds = timeline_of(stages[-1]) if stages else ({}, 0.0)
    return {
        "summary": summary,
        "learned": learned(summary),
        "metrics": METRICS,
        "lanes": lanes,
        "lanes_s": seconds,
        "split": time_split(stages),
        "status": folder.status(name),
    }


def samples(rows: pd.DataFrame, evals: bool, asked: dict[str, str], number: int = 1) -> dict[str, Any]:
    """Tasks by steps. asked: `stage`, `taskset`, `text`, `show` and `order`, "" for any."""
    chosen = {key: asked.get(key, "") for key in ("stage", "taskset", "text", "show")}
    if chosen["show"] == "passed":
        rows = as_passed(rows)
    if chosen["text"]:
        texts = rows["prompt_text"] + "\0" + rows["response_text"]
        rows = rows[texts.str.contains(chosen["text"], case=False, regex=False)]
    menus = {key: sorted(map(str, rows[key].unique())) for key in ("stage", "taskset")}
    for key in menus:
        if chosen[key]:
            rows = rows[rows[key] == chosen[key]]
    table = task_table(rows, order=asked.get("order", ""), first=(number - 1) * NUM_TASKS, size=NUM_TASKS)
    return {
        "evals": evals,
        "chosen": chosen,
        "menus": menus,
        "order": asked.get("order", ""),
        "orders": TASK_ORDERS,
        "table": table,
        "number": number,
        "num_pages": -(-table.num_tasks // NUM_TASKS),
    }


def distributions(rows: pd.DataFrame) -> dict[str, Any]:
    """Rewards and lengths of the rollouts by explore step, and what their groups teach."""
    wanted = {"reward": "Reward", "response_length": "Response length (tokens)", "surprise": "Mean logprob"}
    found = []
    for stage in map(str, rows["stage"].unique()):
        drawn = [distribution(rows, column, label, stage) for column, label in wanted.items()]
        found += [each for each in (drawn[0], group_outcomes(rows, stage), *drawn[1:]) if each is not None]
    return {"found": found}


def cluster(folder: Folder, name: str) -> dict[str, Any]:
    """Who works on it and with what, its jobs and their queue, what it took."""
    workers = workers_of([stage for stage in folder.stages(name) if stage.has_begun])
    return {
        "jobs": folder.jobs(name),
        "status": folder.status(name),
        "workers": workers,
        "hours": sum(worker.seconds for worker in workers) / 3600,
        "gpu_hours": sum(worker.num_gpus * worker.seconds for worker in workers) / 3600,
    }


def about(folder: Folder, name: str, summary: RunSummary) -> dict[str, Any]:
    """What its numbers mean, where its experiences went, what it was made of."""
    # Metrics are columns of floats; tags, such as the taskset, are text.
    measured = {
        str(column)
        for stage in folder.stages(name)
        for column in stage.metrics
        if stage.metrics[column].dtype.kind == "f" and column not in ("step", "time_s")
    }
    order = {metric: number for number, metric in enumerate(METRICS)}
    # Those of the package first, in the order of METRICS; then those of workflows and operators.
    names = sorted(measured, key=lambda metric: (explain(metric) is None, order.get(metric, len(order)), metric))
    return {
        "summary": summary,
        "told": [(metric, explain(metric)) for metric in names],
        "directions": DIRECTIONS,
        "machine": f"{platform.system()} {platform.machine()}",
    }
