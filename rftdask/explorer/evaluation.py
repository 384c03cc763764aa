"""Evaluations: due versions and tasksets, their waiting work units, and their metrics.

The explorer takes units from the queue and reports the committed ones; this module does not know workers. Invariant: an
evaluation is recorded from storage once all its units are committed, so one that was resumed half-way counts whole.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, product
from statistics import fmean, pstdev

from rftdask.buffer.log import open_log
from rftdask.buffer.log.log import ExperienceLog
from rftdask.config import Config
from rftdask.data.task_schedule import TaskRef
from rftdask.errors import DataError
from rftdask.monitor.metrics import read_metrics
from rftdask.rollouts.work_units import COUNT, ROW_METRICS, RolloutTask
from rftdask.storage import Storage
from rftdask.synchronizer.published import published_versions
from rftdask.synchronizer.styles import WeightRequirement, make_sync_rules

MakeUnit = Callable[[str, int, int, Sequence[TaskRef], int, WeightRequirement], RolloutTask]
"""(folder of the log, policy version, unit_index, tasks, repeat_times, weights) -> the work unit."""
Record = Callable[[str, int, Mapping[str, float]], None]
"""(name of the taskset, policy version, metrics), called once for each complete evaluation."""


class EvaluationQueue:
    """Evaluations of a stage: done, running and waiting."""

    def __init__(
        self,
        storage: Storage,
        config: Config,
        sizes: Mapping[str, int],
        versions: Sequence[int],
        make_unit: MakeUnit,
        record: Record,
    ) -> None:
        """sizes: number of tasks by name of the taskset; versions: versions to evaluate in mode bench. Empty: every
        `explorer.eval_interval`. Raises: DataError: a taskset is empty.
        """
        self._storage, self._config, self._versions = storage, config, versions
        self._make_unit, self._record = make_unit, record
        self._tasksets = config.buffer.explorer_input.eval_tasksets
        """The number of a taskset is its position here."""
        for taskset in self._tasksets:
            if not sizes[taskset.name]:
                raise DataError(f"taskset {taskset.name} ({taskset.path}) is empty")
        self._sizes = [sizes[taskset.name] for taskset in self._tasksets]
        # As many rollouts as a unit of training, so that an evaluation needs no more memory.
        rollouts_per_unit = config.tasks_per_unit * config.algorithm.repeat_times
        self._tasks_per_unit = [max(1, rollouts_per_unit // taskset.repeat_times) for taskset in self._tasksets]
        # Only versions that the trainer publishes can be evaluated: multiples of both intervals.
        self._interval = math.lcm(config.explorer.eval_interval, make_sync_rules(config).trainer_sync_interval)
        self._published: tuple[int, list[int]] = (0, [])
        """Newest version at the last listing of published versions, and that listing; for training on a dataset."""
        self._done: set[tuple[int, int]] = set()
        """(version, number of the taskset) of complete evaluations."""
        self._num_open: dict[tuple[int, int], int] = {}
        """Number of running or waiting units by (version, number of the taskset)."""
        self.waiting: deque[RolloutTask] = deque()
        self._auxiliary_sums: dict[tuple[str, int], dict[str, float]] = {}
        """Use of auxiliary models by evaluations that are not recorded yet, by (folder of the log, version)."""
        self._oldest = 0
        """Oldest version whose weights existed at the call of `read`."""

    def read(self) -> None:
        """Find complete evaluations, and record those without metrics. Versions whose weights are gone are skipped."""
        # Read once: from now on the explorer keeps the weights that due evaluations need.
        self._oldest = min(published_versions(self._storage), default=0)
        for number, taskset in enumerate(self._tasksets):
            units: dict[int, set[int]] = {}
            for name in open_log(self._storage, self._config, f"eval/{taskset.name}").shards(0):
                units.setdefault(name.explore_step, set()).add(name.unit)
            num_units = -(-self._sizes[number] // self._tasks_per_unit[number])
            self._done |= {(version, number) for version, indices in units.items() if len(indices) == num_units}
        # The driver may have died between the last unit and the metrics; bench reports earlier evaluations again.
        recorded: set[tuple[int, str]] = set()
        # Rows that a trainer wrote for held-out data have no taskset.
        if self._done and "taskset" in (rows := read_metrics(self._storage, "eval")):
            recorded = set(zip(rows["step"], rows["taskset"], strict=True))
        for version, number in sorted(self._done):
            if version in self._versions or (version, self._tasksets[number].name) not in recorded:
                self._record_from_log(self._tasksets[number].name, version)

    def add_due(self, newest: int, ended_at: int | None) -> None:
        """Add the units of due evaluations to the queue.

        Args: newest: newest published version; ended_at: last version of the run. None: not known yet.
        """
        for version, number in list(self._due(newest, ended_at)):
            tasks = [TaskRef(number, 0, index) for index in range(self._sizes[number])]
            size, taskset = self._tasks_per_unit[number], self._tasksets[number]
            parts = [tasks[start : start + size] for start in range(0, len(tasks), size)]
            # Marks the evaluation as running, so that the next call does not add it again.
            self._num_open[version, number] = len(parts)
            # Exact: an evaluation measures one version, not the newest when its unit runs.
            weights, folder = WeightRequirement(version, exact=True), f"eval/{taskset.name}"
            for unit_index, part in enumerate(parts):
                self.waiting.append(self._make_unit(folder, version, unit_index, part, taskset.repeat_times, weights))

    def count(self, unit: RolloutTask, auxiliary_sums: Mapping[str, float]) -> None:
        """Add the use of auxiliary models by a unit (`RolloutResult.auxiliary_sums`), which rows do not contain."""
        sums = self._auxiliary_sums.setdefault((unit.folder, unit.explore_step), {})
        for name, value in auxiliary_sums.items():
            sums[name] = sums.get(name, 0.0) + value

    def finish(self, unit: RolloutTask) -> None:
        """Count a committed unit. The evaluation is recorded when it was the last one."""
        names = [f"eval/{taskset.name}" for taskset in self._tasksets]
        # The explore step of an evaluation is the policy version, see RolloutTask.
        key = (unit.explore_step, names.index(unit.folder))
        self._num_open[key] -= 1
        if not self._num_open[key]:
            del self._num_open[key]
            self._done.add(key)
            self._record_from_log(self._tasksets[key[1]].name, unit.explore_step)

    def is_empty(self, newest: int, ended_at: int | None) -> bool:
        return not self.waiting and next(self._due(newest, ended_at), None) is None

    def versions_in_use(self, newest: int, ended_at: int | None) -> list[int]:
        """Versions whose weights units need that do not run yet."""
        waiting = [unit.weights.version for unit in self.waiting]
        return waiting + [version for version, _ in self._due(newest, ended_at)]

    def _due(self, newest: int, ended_at: int | None) -> Iterator[tuple[int, int]]:
        # (version, number of the taskset) of evaluations that can run now and have not begun.
        versions = list(self._versions)
        if not versions:
            versions = [0] if self._config.explorer.eval_on_startup else []
            if self._config.evaluates_training and self._config.eval_interval:
                # List the versions, because an earlier start may have published at other intervals or not at all.
                if newest != self._published[0]:
                    self._published = newest, published_versions(self._storage)
                versions.extend(v for v in self._published[1] if v and v % self._config.eval_interval == 0)
            elif self._config.mode == "both":
                # From the oldest existing weights on; those of earlier versions were removed.
                first = -(-self._oldest // self._interval) * self._interval or self._interval
                versions.extend(range(first, newest + 1, self._interval))
            if self._config.has_both_roles and ended_at and ended_at not in versions:
                versions.append(ended_at)
        for key in product(versions, range(len(self._tasksets))):
            if key not in self._done and key not in self._num_open:
                yield key

    def _record_from_log(self, taskset: str, version: int) -> None:
        log = open_log(self._storage, self._config, f"eval/{taskset}")
        metrics = evaluation_metrics(log, version, detailed=self._config.monitor.detailed_stats)
        self._record(taskset, version, metrics | self._auxiliary_sums.pop((f"eval/{taskset}", version), {}))


def evaluation_metrics(log: ExperienceLog, version: int, *, detailed: bool = False) -> dict[str, float]:
    """Means over all rollouts of the evaluation of `version`, read from its shards; see also `repeat_metrics`.

    A unit that ran twice counts once, and so does a rollout of several rows. A failed rollout counts as 0, unlike in
    training, where it is left out. `num_rollouts` is the number of rollouts. A rollout that ended well counts only in
    the metrics that it reports as finite numbers; if not all do, <metric>/count is the number of rollouts that count.
    detailed: also the maximum, the minimum and the standard deviation over all rollouts (`monitor.detailed_stats`).
    """
    # One shard per unit, if several contain the same rollouts.
    shards = {name.unit: name for name in log.shards(version) if name.explore_step == version}
    tasks: dict[int, dict[int, dict[str, float]]] = {}
    num_rows = 0
    row_sums: dict[str, float] = {}
    for name in shards.values():
        for row in log.read(name).select(["task_index", "rollout", "turn", "reward", "metrics"]).to_pylist():
            num_rows += 1
            metrics = dict(row["metrics"])
            # Every row repeats the metrics of its rollout, which count once; metrics of rows are summed over all rows.
            for metric in metrics.keys() & ROW_METRICS:
                row_sums[metric] = row_sums.get(metric, 0.0) + metrics.pop(metric)
            if row["turn"] == 0:
                reports = {metric: value for metric, value in metrics.items() if math.isfinite(value)}
                tasks.setdefault(row["task_index"], {})[row["rollout"]] = {"reward": row["reward"], **reports}
    rollouts = [[rollouts[number] for number in sorted(rollouts)] for _, rollouts in sorted(tasks.items())]
    names = {"reward", *(metric for task in rollouts for values in task for metric in values)}
    by_name: dict[str, list[list[float]]] = {}
    for metric in sorted(names):
        counted = [[one for one in task if metric in one or one["reward"] is None] for task in rollouts]
        by_name[metric] = [[values.get(metric) or 0.0 for values in task] for task in counted]
    num_rollouts = sum(map(len, rollouts))
    counts = {metric: sum(map(len, values)) for metric, values in by_name.items()}
    means = {metric: sum(map(sum, values)) / max(1, counts[metric]) for metric, values in by_name.items()}
    means |= {f"{metric}{COUNT}": float(count) for metric, count in counts.items() if count < num_rollouts}
    means.setdefault("accuracy", means["reward"])
    means |= {metric: total / num_rows for metric, total in row_sums.items()}
    means["num_rollouts"] = float(num_rollouts)
    for metric, values in by_name.items():
        means |= repeat_metrics(metric, list(filter(None, values)))
        if detailed and (flat := list(chain.from_iterable(values))):
            means |= {f"{metric}/max": max(flat), f"{metric}/min": min(flat), f"{metric}/std": pstdev(flat)}
    return means


def repeat_metrics(name: str, values_by_task: Sequence[Sequence[float]]) -> dict[str, float]:
    """Statistics of the n rollouts of a task, as means over the tasks: mean@n, std@n, best@k and worst@k.

    Names and meanings as in Trinity-RFT: best@k and worst@k are those of k rollouts drawn with replacement from a
    task's n, for k = 2, 4, 8, ... below n, and n. Trinity-RFT estimates them by 1,000 random draws; here they are the
    exact expectations. std@n divides by n.
    """
    num_rollouts = max(map(len, values_by_task), default=0)
    if not num_rollouts:
        return {}
    metrics = {
        f"{name}/mean@{num_rollouts}": fmean(map(fmean, values_by_task)),
        f"{name}/std@{num_rollouts}": fmean(map(pstdev, values_by_task)),
    }
    sizes = [2**power for power in range(1, num_rollouts.bit_length()) if 2**power < num_rollouts]
    for k in [*sizes, num_rollouts] if num_rollouts > 1 else []:
        metrics[f"{name}/best@{k}"] = fmean(expected_best(values, k) for values in values_by_task)
        metrics[f"{name}/worst@{k}"] = -fmean(expected_best([-v for v in values], k) for values in values_by_task)
    return metrics


def expected_best(values: Sequence[float], k: int) -> float:
    """Expected largest of k values drawn with replacement: sum_i x_(i) * ((i / n)^k - ((i - 1) / n)^k), ascending."""
    count = len(values)
    # The probability that all k drawn values are among the `rank` smallest.
    shares = [(rank / count) ** k for rank in range(count + 1)]
    return sum(value * (shares[i + 1] - shares[i]) for i, value in enumerate(sorted(values)))
