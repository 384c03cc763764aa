"""Evaluations: which tasksets measure the policy, and what the shards of one evaluation say. Knows no Dask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rftdask.buffer.log import ExperienceLog
from rftdask.config import Config
from rftdask.errors import DataError


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

    A batch that ran twice counts once. A failed rollout is no correct answer and counts as 0; in training it would be
    left out.
    """
    shards = {name.batch: name for name in log.shards(version) if name.explore_step == version}
    sums: dict[str, float] = {}
    rewards: list[float] = []
    for name in shards.values():
        table = log.read(name)
        rewards.extend(0.0 if reward is None else reward for reward in table.column("reward").to_pylist())
        for pairs in table.column("metrics").to_pylist():
            for metric, value in pairs:
                sums[metric] = sums.get(metric, 0.0) + value
    count = max(1, len(rewards))
    metrics = {"reward": sum(rewards) / count, "num_rollouts": float(len(rewards))}
    metrics.update({name: value / count for name, value in sums.items()})
    metrics.setdefault("accuracy", metrics["reward"])
    return metrics
