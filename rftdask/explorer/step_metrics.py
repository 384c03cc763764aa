"""Totals: what the rollout batches of one explore step or evaluation come to, as metrics. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from rftdask.buffer.log.schema import Status
from rftdask.explorer.worker_task import RolloutResult


@dataclass
class StepTotals:
    """Sums over the rollout batches of one step or evaluation."""

    results: list[RolloutResult] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        total = lambda name: float(sum(getattr(r, name) for r in self.results))  # noqa: E731
        rewards = max(1.0, total("num_rewards"))
        metrics = {
            "reward": total("reward_sum") / rewards,
            "num_rollouts": total("num_rollouts"),
            "response_length": total("num_tokens") / rewards,
            "wait_s": total("time_wait_s"),
            "load_s": total("time_load_s"),
            "generate_s": total("time_generate_s"),
            "step_s": total("time_s"),
            "policy_version": float(max(r.version for r in self.results)),
        }
        metrics["tokens_per_s"] = total("num_tokens") / max(1e-9, total("time_s") - total("time_wait_s"))
        statuses: dict[str, int] = {}
        for result in self.results:
            for status, count in result.num_by_status.items():
                statuses[status] = statuses.get(status, 0) + count
            for name, value in result.metric_sums.items():
                metrics[name] = metrics.get(name, 0.0) + value / rewards
        rollouts = max(1.0, metrics["num_rollouts"])
        for name in sorted({name for result in self.results for name in result.rollout_time_sums}):
            # Per rollout: where its time went, such as rollout/tool_s.
            metrics[f"rollout/{name}"] = sum(r.rollout_time_sums.get(name, 0.0) for r in self.results) / rollouts
        for name in sorted({name for result in self.results for name in result.pass_rates}):
            told = [(r.pass_rates[name], r.num_rollouts) for r in self.results if name in r.pass_rates]
            metrics[name] = sum(rate * count for rate, count in told) / max(1, sum(count for _, count in told))
        metrics["truncated"] = statuses.get(Status.TRUNCATED, 0) / rewards
        metrics["failed"] = sum(statuses.get(s, 0) for s in (Status.FAILED, Status.TIMEOUT, Status.POISONED)) / rollouts
        return metrics
