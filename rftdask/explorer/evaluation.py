"""Evaluations: which tasksets measure the policy, and what the shards of one evaluation say. Knows no Dask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rftdask.buffer.log.log import ExperienceLog
from rftdask.config import Config
from rftdask.errors import DataError
from rftdask.explorer.repeat_metrics import repeat_metrics

_COLUMNS = ["task_index", "rollout", "turn", "reward", "metrics"]
_OF_TURNS = frozenset({"num_prompt_tokens", "num_response_tokens", "prompt_truncated"})
"""Metrics that each turn has of its own; all others are the rollout's."""


@dataclass(frozen=True)
class EvalTaskset:
    name: str
    number: int
    size: int
    repeat_times: int


def eval_tasksets(config: Config, sizes: Mapping[str, int]) -> tuple[EvalTaskset, ...]:
    """The evaluations of a stage. Raises: DataError: a taskset is empty."""
    tasksets = config.buffer.explorer_input.eval_tasksets
    for taskset in tasksets:
        if not sizes[taskset.name]:
            raise DataError(f"taskset {taskset.name} ({taskset.path}) is empty")
    return tuple(EvalTaskset(t.name, number, sizes[t.name], t.repeat_times) for number, t in enumerate(tasksets))


def evaluation_metrics(log: ExperienceLog, version: int) -> dict[str, float]:
    """Means over all rollouts of the evaluation of `version`, from its shards: one resumed half-way counts whole.

    A batch that ran twice counts once, and so does a rollout of several turns. A failed rollout is no correct answer
    and counts as 0; in training it would be left out. For what several rollouts of a task say see repeats.py.
    """
    shards = {name.batch: name for name in log.shards(version) if name.explore_step == version}
    tasks: dict[int, dict[int, dict[str, float]]] = {}
    num_turns = 0
    sums: dict[str, float] = {}
    for name in shards.values():
        for row in log.read(name).select(_COLUMNS).to_pylist():
            num_turns += 1
            metrics = dict(row["metrics"])
            for metric in metrics.keys() & _OF_TURNS:
                sums[metric] = sums.get(metric, 0.0) + metrics.pop(metric)
            if row["turn"] == 0:
                tasks.setdefault(row["task_index"], {})[row["rollout"]] = {"reward": row["reward"] or 0.0, **metrics}
    rollouts = [[rollouts[number] for number in sorted(rollouts)] for _, rollouts in sorted(tasks.items())]
    names = {"reward", *(metric for task in rollouts for values in task for metric in values)}
    by_name = {metric: [[values.get(metric, 0.0) for values in task] for task in rollouts] for metric in sorted(names)}
    count = sum(map(len, rollouts))
    means = {metric: sum(map(sum, values)) / max(1, count) for metric, values in by_name.items()}
    means.setdefault("accuracy", means["reward"])
    means |= {metric: total / num_turns for metric, total in sums.items()}
    repeats = [repeat_metrics(metric, values) for metric, values in by_name.items()]
    return {**means, "num_rollouts": float(count), **{key: value for each in repeats for key, value in each.items()}}
