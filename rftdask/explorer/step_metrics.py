"""Step metrics: what the work units of one explore step come to, as the numbers that are recorded. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rftdask.buffer.log.schema import Status
from rftdask.explorer.worker_task import RolloutResult


def step_metrics(results: Sequence[RolloutResult]) -> dict[str, float]:
    """The metrics of an explore step, from the results of its units, at least one.

    - reward, and every metric of a workflow: mean over the rollouts that may be trained, each once, whatever its turns
    - num_prompt_tokens, num_response_tokens, prompt_truncated: mean over the turns of those rollouts
    - response_length: response tokens of such a rollout, all its turns together, mean
    - truncated: share of those that met the token limit; failed: share of all rollouts that failed, timed out or were
      set aside as poisoned
    - rollout/<time>: seconds per rollout, such as rollout/tool_s; pass@k: mean over the tasks
    - wait_s, load_s, generate_s, step_s: seconds, summed over the units; tokens_per_s: of one engine, while it had its
      weights
    """

    def total(values: Sequence[float]) -> float:
        return float(sum(values))

    num_rewards = max(1.0, total([r.num_rewards for r in results]))
    num_rollouts = total([r.num_rollouts for r in results])
    num_tokens = total([r.num_tokens for r in results])
    step_s, wait_s = total([r.time_s for r in results]), total([r.time_wait_s for r in results])
    num_by_status = _sum_by_name([r.num_by_status for r in results])
    num_failed = sum(num_by_status.get(s, 0.0) for s in (Status.FAILED, Status.TIMEOUT, Status.POISONED))
    num_turns = max(1.0, total([r.num_turns for r in results]))
    metrics = {name: value / num_rewards for name, value in _sum_by_name([r.metric_sums for r in results]).items()}
    turn_sums = _sum_by_name([r.turn_metric_sums for r in results])
    metrics |= {name: value / num_turns for name, value in turn_sums.items()}
    time_sums = _sum_by_name([r.rollout_time_sums for r in results])
    metrics |= {f"rollout/{name}": value / max(1.0, num_rollouts) for name, value in time_sums.items()}
    for name in sorted({name for result in results for name in result.pass_rates}):
        # Units have equal numbers of tasks but for the last; rollouts of each task are as many everywhere.
        rates = [(r.pass_rates[name], r.num_rollouts) for r in results if name in r.pass_rates]
        metrics[name] = sum(rate * count for rate, count in rates) / max(1, sum(count for _, count in rates))
    # Last: a metric of a workflow does not replace one of these by its name.
    return metrics | {
        "reward": total([r.reward_sum for r in results]) / num_rewards,
        "num_rollouts": num_rollouts,
        "response_length": total([r.num_trained_tokens for r in results]) / num_rewards,
        "truncated": num_by_status.get(Status.TRUNCATED, 0.0) / num_rewards,
        "failed": num_failed / max(1.0, num_rollouts),
        "policy_version": float(max(r.version for r in results)),
        "wait_s": wait_s,
        "load_s": total([r.time_load_s for r in results]),
        "generate_s": total([r.time_generate_s for r in results]),
        "step_s": step_s,
        "tokens_per_s": num_tokens / max(1e-9, step_s - wait_s),
    }


def _sum_by_name(mappings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums
