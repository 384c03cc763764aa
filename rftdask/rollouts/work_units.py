"""Work units as messages between driver and explorer workers, and the metrics of an explore step made from them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from rftdask.buffer.log.schema import Experience, Status
from rftdask.config import Config
from rftdask.data.task_schedule import TaskRef
from rftdask.rollouts.rollout import RolloutTimes
from rftdask.rollouts.runner import UnitOutcome
from rftdask.synchronizer.styles import WeightRequirement

ROW_METRICS = frozenset({"num_prompt_tokens", "num_response_tokens", "prompt_truncated"})
"""Metrics that each row has for itself; every other metric is the rollout's, and stands in each of its rows, but for
those that begin with `BRANCHES`."""


BRANCHES = "branches/"
"""Before the reason why a row begins where it does, in a metric of that row alone."""


UnitKey = tuple[str, int, int]
"""(folder, explore step, unit_index): names a work unit in its run."""


@dataclass(frozen=True)
class RolloutTask:
    """One work unit, some tasks of an explore step with all their rollouts, or a slot of it: what is sent to a worker.

    Everything that decides what it gives, save the weights if `weights.exact` is False. The config itself stays in the
    run folder: see `run_folder.read_config`.
    """

    url: str
    """Run folder."""
    config_fingerprint: str
    folder: str
    """Log to commit to: "experiences", or "eval/<taskset>"."""
    explore_step: int
    """Counted from 1; for evaluations the policy version."""
    unit_index: int
    """Counted from 0 in the explore step."""
    tasks: tuple[TaskRef, ...]
    repeat_times: int
    """Number of rollouts of each task."""
    greedy_baseline: bool
    """One more rollout of each task, at temperature 0: rollout number `repeat_times`."""
    weights: WeightRequirement
    threads: int
    """Threads of the engine."""
    log_file: str | None
    """File that the engine writes to; None: its output is the worker's."""
    slots: tuple[int, ...] | None = None
    """Places of the only tasks to run, of those that are not committed; None: all, so that they sample side by side."""
    alone: bool = False
    """Whether nothing may run beside it, since it may be what ends workers."""

    @property
    def is_eval(self) -> bool:
        """True for a unit of an evaluation, which is not trained."""
        return self.folder.startswith("eval/")

    @property
    def key(self) -> UnitKey:
        """Names the unit in its run."""
        return self.folder, self.explore_step, self.unit_index


@dataclass(frozen=True)
class RolloutResult:
    """Answer of a worker to the driver: counts and times of a unit, whose experiences are on storage.

    A rollout of several rows counts as one rollout here. The greedy baseline is in none of
    the counts, but in `num_bytes`.
    """

    key: UnitKey
    shards: tuple[str, ...]
    version: int
    worker: str
    num_rollouts: int = 0
    num_by_status: Mapping[str, int] = field(default_factory=dict)
    """Number of rollouts by status; see `rollout_status`."""
    num_tokens: int = 0
    """Sampled tokens of all turns of all rollouts."""
    num_bytes: int = 0
    """Size of all that was committed: tokens, logprobs and text, before any encoding."""
    num_rewards: int = 0
    """Number of rollouts that may be trained, which have a reward; the sums below are over them."""
    num_trained_tokens: int = 0
    """Sampled tokens of their turns that may be trained."""
    reward_sum: float = 0.0
    metric_sums: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the rollouts with a reward, each rollout once, by name."""
    num_turns: int = 0
    """Turns of the rollouts with a reward."""
    num_rows: int = 0
    """Their rows."""
    row_metric_sums: Mapping[str, float] = field(default_factory=dict)
    """Metrics in ROW_METRICS, summed over those rows."""
    time_wait_s: float = 0.0
    """Seconds of waiting for the weights to be published, and for the turn on a shared device."""
    time_load_s: float = 0.0
    """Seconds of starting the engine and loading weights."""
    time_generate_s: float = 0.0
    """Seconds in which the policy's engine had something to do."""
    time_s: float = 0.0
    """Seconds from the beginning to the commit."""
    time_engine_s: float = 0.0
    """Those of them that no other unit of the worker has counted: units may overlap."""
    request_s: float = 0.0
    """Seconds that requests were under way in the engine, each for itself, since a unit ended there last."""
    slot_s: float = 0.0
    """Seconds since then, times the slots of the engine: what `request_s` could have been."""
    rollout_time_sums: Mapping[str, float] = field(default_factory=dict)
    """Seconds by name of a field of RolloutTimes, summed over the rollouts."""
    pass_rates: Mapping[str, float] = field(default_factory=dict)
    """pass@k by name, mean over the tasks."""
    reward_sums: Mapping[str, float] = field(default_factory=dict)
    """By the name of the taskset, over its rollouts that may be trained."""
    reward_counts: Mapping[str, float] = field(default_factory=dict)
    """How many those are."""
    auxiliary_sums: Mapping[str, float] = field(default_factory=dict)
    """What auxiliary models were asked for: "judge/calls", and the other names of a ModelUse."""
    note: str = ""
    """News that people should know, such as that the engine had died; "": none."""


def auxiliary_sums(config: Config, outcome: UnitOutcome) -> dict[str, float]:
    """What the auxiliary models were asked for, at their prices; see `RolloutResult.auxiliary_sums`."""
    prices = {
        model.asked_name: (model.prompt_price, model.response_price) for model in config.explorer.auxiliary_models
    }
    return {
        f"{model}/{name}": value
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
    """Mean pass@k over the groups with at least k rollouts, for k = 1, 2, 4, ...; passed: a reward >= threshold."""
    # Groups may be of different sizes, where rollouts have failed: each k is over those that have as many.
    largest = max((len(rewards) for rewards in rewards_by_group.values()), default=0)
    rates = {}
    k = 1
    while k <= largest:
        values = [
            pass_at_k(len(rewards), sum(reward >= threshold for reward in rewards), k)
            for rewards in rewards_by_group.values()
            if len(rewards) >= k
        ]
        rates[f"pass@{k}"] = sum(values) / len(values)
        k *= 2
    return rates


def summarize_unit(unit: RolloutTask, outcome: UnitOutcome) -> RolloutResult:
    """Counts and sums over the rollouts of a unit; times and the names of its shards are not filled in."""
    rows_by_rollout: dict[tuple[str, int], list[Experience]] = {}
    for experience in outcome.experiences:
        if experience.rollout < unit.repeat_times:  # a greedy baseline is no sample
            rows_by_rollout.setdefault((experience.group_id, experience.rollout), []).append(experience)
    # Counts over rollouts, each of which is its rows; then times, which rollouts have in the order of the unit.
    num_by_status: dict[str, int] = defaultdict(int)
    rewards_by_group: dict[str, list[float]] = defaultdict(list)
    metric_sums: dict[str, float] = defaultdict(float)
    row_metric_sums: dict[str, float] = defaultdict(float)
    num_tokens = num_trained_tokens = num_turns = num_rows = 0
    for (group_id, _), rows in rows_by_rollout.items():
        num_by_status[str(rollout_status(rows))] += 1
        num_tokens += sum(map(num_sampled_tokens, rows))
        trained = [row for row in rows if row.status.trainable and row.reward is not None]
        num_trained_tokens += sum(map(num_sampled_tokens, trained))
        num_turns += sum(1 if row.turns is None else len(row.turns) for row in trained)
        num_rows += len(trained)
        for number, row in enumerate(trained):
            for name, value in row.metrics.items():
                if name in ROW_METRICS:
                    row_metric_sums[name] += value
                elif number == 0 or name.startswith(BRANCHES):  # else it stands in every row, and is the rollout's
                    metric_sums[name] += value
        if trained and (reward := trained[0].reward) is not None:
            rewards_by_group[group_id].append(reward)
    # Of each task `repeat_times` samples, then its greedy baseline if there is one.
    per_task = unit.repeat_times + unit.greedy_baseline
    # By position: the outcome has the times of rollouts in the order in which the runner made them.
    times = [times for number, times in enumerate(outcome.times) if number % per_task < unit.repeat_times]
    rewards = [reward for group in rewards_by_group.values() for reward in group]
    return RolloutResult(
        unit.key,
        shards=(),
        version=0,
        worker="",
        num_rollouts=len(rows_by_rollout),
        num_by_status=dict(num_by_status),
        num_tokens=num_tokens,
        num_bytes=sum(
            4 * len(e.tokens) + 4 * len(e.rollout_logprobs) + len(e.prompt_text) + len(e.response_text) + len(e.truth)
            for e in outcome.experiences
        ),
        num_rewards=len(rewards),
        num_trained_tokens=num_trained_tokens,
        reward_sum=float(sum(rewards)),
        metric_sums=dict(metric_sums),
        num_turns=num_turns,
        num_rows=num_rows,
        row_metric_sums=dict(row_metric_sums),
        rollout_time_sums={t.name: float(sum(getattr(each, t.name) for each in times)) for t in fields(RolloutTimes)},
        pass_rates=pass_rates(rewards_by_group),
        reward_sums=_by_taskset(rewards_by_group, sum),
        reward_counts=_by_taskset(rewards_by_group, len),
    )


def _by_taskset(
    rewards_by_group: Mapping[str, Sequence[float]], measure: Callable[[Sequence[float]], float]
) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for group_id, rewards in rewards_by_group.items():
        found[group_id.partition("/")[0]] += float(measure(rewards))  # no name of a taskset has a slash
    return dict(found)


def num_sampled_tokens(row: Experience) -> int:
    """Tokens of a row that the policy sampled, trained or not."""
    if row.turns is None:
        return len(row.tokens) - row.prompt_length
    return sum(turn.end - turn.start for turn in row.turns)


def rollout_status(rows: Sequence[Experience]) -> Status:
    """The status of a rollout: truncated if a row of it was, ok if any other may be trained, else its first row's."""
    trainable = [row.status for row in rows if row.status.trainable]
    if not trainable:
        return rows[0].status
    return Status.TRUNCATED if Status.TRUNCATED in trainable else Status.OK


def step_metrics(results: Sequence[RolloutResult], step_s: float) -> dict[str, float]:
    """The metrics of an explore step, from the results of its units, at least one, and its wall time in seconds.

    - reward, and every metric of a workflow: mean over the rollouts that may be trained, each once, whatever its turns
    - num_turns: calls of the policy in such a rollout, mean; branches/<reason>: rows of it that begin where they do
      because a prompt did not go on where a turn had ended, mean
    - num_prompt_tokens, num_response_tokens, prompt_truncated: mean over the rows of those rollouts
    - response_length: response tokens of such a rollout, all its turns together, mean
    - taskset/<name>/reward: mean over such rollouts of one taskset, in steps that had tasks of several
    - truncated: share of those that met the token limit; failed: share of all rollouts that failed, timed out or were
      set aside as poisoned
    - rollout/<time>: seconds per rollout, such as rollout/tool_s; pass@k: mean over the tasks
    - wait_s, load_s, generate_s: seconds of engines, summed over the units, which run side by side
    - tokens_per_s: of one engine, while it had its weights
    - occupancy: requests under way in an engine, as a share of its slots, mean over the time; not of a model behind an
      API
    - auxiliary/<name>/...: calls, failures, tokens and cost of an auxiliary model, summed over all rollouts and their
      attempts, but for those of units that were lost
    - step_s: wall time since the step before was complete
    """

    def total(values: Sequence[float]) -> float:
        return float(sum(values))

    def by_name(mappings: Sequence[Mapping[str, float]]) -> dict[str, float]:
        # A dict for a set that keeps its order, so that every step has its metrics in the same order.
        return {
            name: sum(each.get(name, 0.0) for each in mappings) for name in {n: None for each in mappings for n in each}
        }

    num_rewards = max(1.0, total([r.num_rewards for r in results]))
    num_rollouts = total([r.num_rollouts for r in results])
    num_tokens = total([r.num_tokens for r in results])
    engine_s, wait_s = total([r.time_engine_s for r in results]), total([r.time_wait_s for r in results])
    num_by_status = by_name([r.num_by_status for r in results])
    num_failed = sum(num_by_status.get(s, 0.0) for s in (Status.FAILED, Status.TIMEOUT, Status.POISONED))
    num_rows = max(1.0, total([r.num_rows for r in results]))
    slot_s = total([r.slot_s for r in results])
    # Means over rollouts, then over rows, then seconds; sums of units are added first, so that a small unit counts
    # less.
    metrics = {name: value / num_rewards for name, value in by_name([r.metric_sums for r in results]).items()}
    row_sums = by_name([r.row_metric_sums for r in results])
    metrics |= {name: value / num_rows for name, value in row_sums.items()}
    time_sums = by_name([r.rollout_time_sums for r in results])
    metrics |= {f"rollout/{name}": value / max(1.0, num_rollouts) for name, value in time_sums.items()}
    for name in sorted({name for result in results for name in result.pass_rates}):
        # Units have equal numbers of tasks but for the last; rollouts of each task are as many everywhere.
        rates = [(r.pass_rates[name], r.num_rollouts) for r in results if name in r.pass_rates]
        metrics[name] = sum(rate * count for rate, count in rates) / max(1, sum(count for _, count in rates))
    reward_sums, reward_counts = by_name([r.reward_sums for r in results]), by_name([r.reward_counts for r in results])
    if len(reward_sums) > 1:
        metrics |= {f"taskset/{name}/reward": value / reward_counts[name] for name, value in reward_sums.items()}
    metrics |= {f"auxiliary/{name}": value for name, value in by_name([r.auxiliary_sums for r in results]).items()}
    # Last: a metric of a workflow does not replace one of these by its name.
    return metrics | {
        "reward": total([r.reward_sum for r in results]) / num_rewards,
        "num_rollouts": num_rollouts,
        "num_turns": total([r.num_turns for r in results]) / num_rewards,
        "response_length": total([r.num_trained_tokens for r in results]) / num_rewards,
        "truncated": num_by_status.get(Status.TRUNCATED, 0.0) / num_rewards,
        "failed": num_failed / max(1.0, num_rollouts),
        "policy_version": float(max(r.version for r in results)),
        "wait_s": wait_s,
        "load_s": total([r.time_load_s for r in results]),
        "generate_s": total([r.time_generate_s for r in results]),
        "step_s": step_s,
        "tokens_per_s": num_tokens / max(1e-9, engine_s - wait_s),
        **({"occupancy": total([r.request_s for r in results]) / slot_s} if slot_s else {}),
    }
