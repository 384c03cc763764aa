"""Messages about work units between the driver and explorer workers, and the metrics of an explore step."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from rftdask.buffer.log.schema import Experience, Status
from rftdask.config import Config
from rftdask.data.task_schedule import TaskRef
from rftdask.rollouts.rollout import RolloutTimes
from rftdask.rollouts.runner import UnitOutcome
from rftdask.synchronizer.styles import WeightRequirement

ROW_METRICS = frozenset({"num_prompt_tokens", "num_response_tokens", "prompt_truncated"})
"""Metrics whose value differs from row to row. Any other metric belongs to the rollout and is repeated in each of its
rows, except the metrics that begin with `BRANCHES`."""
COUNT = "/count"
"""Suffix of a metric that exists where only some rollouts report another metric: how many do."""
BRANCHES = "branches/"
"""Prefix of a metric that only one row has: the reason why the row begins where it does."""
_FAILURES = (Status.FAILED, Status.TIMEOUT, Status.POISONED)
AUXILIARY = "auxiliary/"
"""Prefix of the metrics of auxiliary models."""
UnitKey = tuple[str, int, int]
"""(folder, explore step, unit_index): identifies a work unit in its run."""


@dataclass(frozen=True)
class EngineRequest:
    """Request to a worker: use the engines of a run."""

    url: str
    """Run folder."""
    config_fingerprint: str
    threads: int
    """Threads of each engine."""
    log_file: str | None
    """Output file of the engine. None: the worker's output."""


@dataclass(frozen=True)
class RolloutTask(EngineRequest):
    """Request to a worker: run one work unit, which is some tasks of an explore step with all their rollouts.

    The fields determine the result, except for the weights if `weights.exact` is False.
    """

    folder: str
    """Log to commit to: "experiences", or "eval/<taskset>"."""
    explore_step: int
    """Counted from 1. The policy version in evaluations."""
    unit_index: int
    """Counted from 0 in the explore step."""
    tasks: tuple[TaskRef, ...]
    repeat_times: int
    """Number of rollouts of each task."""
    greedy_baseline: bool
    """True: one more rollout of each task, number `repeat_times`, at temperature 0."""
    weights: WeightRequirement
    slots: tuple[int, ...] | None = None
    """Positions of the tasks to run; committed ones are skipped. None: all, so that they sample together."""
    isolated: bool = False
    """True if no other unit may run on the worker, because this one may be what crashes workers."""

    @property
    def is_eval(self) -> bool:
        """True for a unit of an evaluation, which is not trained."""
        return self.folder.startswith("eval/")

    @property
    def key(self) -> UnitKey:
        return self.folder, self.explore_step, self.unit_index


@dataclass
class Sums:
    """Metrics as sums that add up over work units: a metric is its sum divided by a weight.

    Means over the same rollouts share one weight, so a unit that lacks such a metric still counts in its mean.
    """

    sums: dict[str, tuple[float, str]] = field(default_factory=dict)
    """(sum, name of its weight) by metric. "": not divided."""
    weights: dict[str, float] = field(default_factory=dict)

    def put(self, sums: Mapping[str, float], weight: str = "") -> None:
        self.sums |= {name: (float(value), weight) for name, value in sums.items()}

    def __add__(self, other: Sums) -> Sums:
        sums = dict(self.sums)
        for name, (value, weight) in other.sums.items():
            sums[name] = sums.get(name, (0.0, weight))[0] + value, weight
        names = self.weights | other.weights
        return Sums(sums, {name: self.weights.get(name, 0.0) + other.weights.get(name, 0.0) for name in names})

    def metrics(self) -> dict[str, float]:
        """Metrics by name. A sum of weight 0 is 0 and stays 0."""
        return {name: value / (self.weights.get(weight) or 1.0) for name, (value, weight) in self.sums.items()}


@dataclass(frozen=True)
class RolloutResult:
    """Response of a worker to the driver: what a unit has committed, with the sums of its metrics.

    A rollout of several rows counts once. Greedy baselines count only in `num_bytes`.
    """

    key: UnitKey
    shards: tuple[str, ...]
    version: int
    worker: str
    num_rollouts: int = 0
    """0: an earlier attempt had committed the unit."""
    num_bytes: int = 0
    """Size of all committed rows before encoding: tokens, logprobs and text."""
    sums: Sums = field(default_factory=Sums)
    note: str = ""
    """Message for the user, such as that an engine was replaced. "": none."""

    @property
    def auxiliary_sums(self) -> dict[str, float]:
        sums = self.sums.sums.items()
        return {name: value for name, (value, weight) in sums if name.startswith(AUXILIARY) and not weight}


def auxiliary_sums(config: Config, outcome: UnitOutcome) -> dict[str, float]:
    """Use of each auxiliary model, such as "auxiliary/judge/calls" and "auxiliary/judge/cost" at the model's prices."""
    models = config.explorer.auxiliary_models
    prices = {model.asked_name: (model.prompt_price, model.response_price) for model in models}
    return {
        f"{AUXILIARY}{model}/{name}": value
        for model, use in outcome.uses.items()
        for name, value in use.sums(*prices[model]).items()
    }


def pass_at_k(num_rollouts: int, num_passed: int, k: int) -> float:
    """Probability that at least one of k rollouts, drawn without replacement, passed: 1 - C(n - c, k) / C(n, k).

    Raises: ValueError: k > num_rollouts. Source: Chen et al. 2021, arXiv:2107.03374, equation 1.
    """
    if not 0 < k <= num_rollouts:
        raise ValueError(f"pass@{k} of {num_rollouts} rollouts: 0 < k <= rollouts must hold")
    return 1.0 - math.comb(num_rollouts - num_passed, k) / math.comb(num_rollouts, k)


def pass_rates(rewards_by_group: Mapping[str, Sequence[float]], threshold: float = 1.0) -> dict[str, float]:
    """Mean pass@k over the groups with k rollouts, for k = 1, 2, 4, ... A rollout passes if reward >= threshold."""
    # Failed rollouts make groups smaller, so each k has its own set of groups.
    largest = max((len(rewards) for rewards in rewards_by_group.values()), default=0)
    rates = {}
    for k in (2**power for power in range(largest.bit_length())):
        groups = [rewards for rewards in rewards_by_group.values() if len(rewards) >= k]
        values = [pass_at_k(len(group), sum(reward >= threshold for reward in group), k) for group in groups]
        rates[f"pass@{k}"] = sum(values) / len(values)
    return rates


def summarize_unit(unit: RolloutTask, outcome: UnitOutcome) -> RolloutResult:
    """Sums over the rollouts of a unit. The caller adds the times of the engine and the names of the shards."""
    rows_by_rollout: dict[tuple[str, int], list[Experience]] = defaultdict(list)
    for experience in outcome.experiences:
        if experience.rollout < unit.repeat_times:  # a greedy baseline is not a sample
            rows_by_rollout[experience.group_id, experience.rollout].append(experience)
    counts: Counter[str] = Counter()
    num_by_status: Counter[Status] = Counter()
    rewards_by_group: dict[str, list[float]] = defaultdict(list)
    branch_sums: dict[str, float] = defaultdict(float)
    reports: dict[str, list[float]] = defaultdict(list)  # values of a metric, one for each rollout that reports it
    row_metric_sums: dict[str, float] = defaultdict(float)
    rewards_of_truths: list[float] = []
    for (group_id, _), rows in rows_by_rollout.items():
        num_by_status[rollout_status(rows)] += 1
        counts["sampled_tokens"] += sum(map(num_sampled_tokens, rows))
        trained = [row for row in rows if row.status.trainable and row.reward is not None]
        counts["trained_tokens"] += sum(map(num_sampled_tokens, trained))
        counts["turns"] += sum(1 if row.turns is None else len(row.turns) for row in trained)
        counts["rows"] += len(trained)
        for number, row in enumerate(trained):
            for name, value in row.metrics.items():
                if name in ROW_METRICS:
                    row_metric_sums[name] += value
                elif name.startswith(BRANCHES):
                    branch_sums[name] += value
                elif number == 0 and math.isfinite(value):  # every row repeats the metrics of the rollout
                    reports[name].append(value)
        if trained and (reward := trained[0].reward) is not None:
            rewards_by_group[group_id].append(reward)
            if trained[0].equals_truth:
                rewards_of_truths.append(reward)
    # Each task has `repeat_times` samples, then its greedy baseline if any; times are in this order.
    per_task = unit.repeat_times + unit.greedy_baseline
    times = [times for number, times in enumerate(outcome.times) if number % per_task < unit.repeat_times]
    rewards = [reward for group in rewards_by_group.values() for reward in group]
    num_rollouts = len(rows_by_rollout)
    rates = pass_rates(rewards_by_group)

    # The package's own metrics come last, so that a metric of a workflow cannot replace them.
    sums = Sums(
        weights={
            "rollouts": float(num_rollouts),
            "rewarded": float(len(rewards)),
            "rows": float(counts["rows"]),
            "sampled_tokens": float(counts["sampled_tokens"]),
            **dict.fromkeys(rates, float(num_rollouts)),
            **{f"{name}{COUNT}": float(len(values)) for name, values in reports.items()},
        }
    )
    for name, values in reports.items():
        sums.put({name: sum(values)}, f"{name}{COUNT}")
    sums.put(branch_sums, "rewarded")
    sums.put(row_metric_sums, "rows")
    time_names = [time.name for time in fields(RolloutTimes)]
    sums.put({f"rollout/{name}": sum(getattr(time, name) for time in times) for name in time_names}, "rollouts")
    for name, rate in rates.items():
        sums.put({name: rate * num_rollouts}, name)
    for group_id, group_rewards in rewards_by_group.items():
        taskset = f"taskset/{group_id.partition('/')[0]}"  # the name of a taskset has no slash
        sums += Sums({f"{taskset}/reward": (sum(group_rewards), taskset)}, {taskset: len(group_rewards)})
    own = {
        "reward": sum(rewards),
        "num_turns": counts["turns"],
        "response_length": counts["trained_tokens"],
        "truncated": num_by_status[Status.TRUNCATED],
    }
    sums.put(own, "rewarded")
    if rewards and (unpaid := rewards_of_truths.count(min(rewards))) and min(rewards) < max(rewards):
        sums.put({"unpaid_truths": unpaid})
    sums.put({"failed": sum(num_by_status[status] for status in _FAILURES)}, "rollouts")
    num_bytes = sum(
        4 * len(e.tokens) + 4 * len(e.rollout_logprobs) + len(e.prompt_text) + len(e.response_text) + len(e.truth)
        for e in outcome.experiences
    )
    return RolloutResult(unit.key, (), 0, "", num_rollouts, num_bytes, sums)


def num_sampled_tokens(row: Experience) -> int:
    """Number of tokens of a row that the policy sampled, trained or not."""
    if row.turns is None:
        return len(row.tokens) - row.prompt_length
    return sum(turn.end - turn.start for turn in row.turns)


def rollout_status(rows: Sequence[Experience]) -> Status:
    trainable = [row.status for row in rows if row.status.trainable]
    if not trainable:
        return rows[0].status
    return Status.TRUNCATED if Status.TRUNCATED in trainable else Status.OK


def step_metrics(results: Sequence[RolloutResult], step_s: float) -> dict[str, float]:
    """Metrics of an explore step, as defined in reports/metrics.toml, from the results of its units, at least one.

    step_s: seconds since the previous step was complete. A metric of a workflow is its mean over the trainable rollouts
    that report it as a finite number; if not all do, <metric>/count is their number.
    """
    total = Sums()
    always = ("reward", "num_turns", "response_length", "truncated", "failed", "wait_s", "load_s", "generate_s")
    total.put(dict.fromkeys(always, 0.0))
    for result in results:
        total += result.sums
    weights = defaultdict(float, total.weights)
    tasksets = [name for name in weights if name.startswith("taskset/")]
    if len(tasksets) == 1:
        del total.sums[f"{tasksets[0]}/reward"]
    metrics = total.metrics()
    for name, (_, weight) in total.sums.items():
        if weight == f"{name}{COUNT}" and weights[weight] < weights["rewarded"]:
            metrics[weight] = weights[weight]
    return metrics | {
        "num_rollouts": weights["rollouts"],
        "policy_version": float(max(result.version for result in results)),
        "step_s": step_s,
        "tokens_per_s": weights["sampled_tokens"] / max(1e-9, weights["engine_s"] - metrics["wait_s"]),
    }
