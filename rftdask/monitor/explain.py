"""Explanations of metrics: the one place that names those which plots, reports and documentation know, and that says
when their numbers mean that a run learns nothing.

Roles may write more metrics than these; such metrics are stored and tracked all the same, but nobody explains them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

Direction = Literal["up", "down", "watch"]


@dataclass(frozen=True)
class Metric:
    """One explained metric."""

    label: str
    formula: str
    unit: str
    direction: Direction
    """Where it should go; "watch": neither is better, but a jump tells something."""
    advice: str = ""
    """How to read an odd value."""


METRICS: dict[str, Metric] = {
    "reward": Metric(
        "Reward",
        "mean of the rewards of all trainable rollouts in the batch, each once, whatever its turns",
        "reward units",
        "up",
        "Flat at its minimum: the tasks are too hard for the policy or the reward function rejects every answer.",
    ),
    "reward_std": Metric(
        "Reward spread",
        "mean over groups of the standard deviation of the rewards within one group",
        "reward units",
        "watch",
        "Near 0 nothing can be learned: all siblings of a group got the same reward.",
    ),
    "flat_groups": Metric(
        "Groups without spread",
        "groups of several rollouts that all got the same reward / such groups",
        "fraction, 0 to 1",
        "down",
        "At 1 nothing is learned: the tasks are too easy or too hard, or the reward tells no two answers apart.",
    ),
    "accuracy": Metric("Accuracy", "correct answers / answers, over the whole eval taskset", "fraction, 0 to 1", "up"),
    "loss": Metric(
        "Loss",
        "the loss whose gradient was taken: policy loss + KL and entropy terms, over trained tokens",
        "nats",
        "watch",
        "In reinforcement learning it need not fall; in SFT and DPO it should.",
    ),
    "reward_accuracy": Metric(
        "Preferences in order",
        "pairs whose chosen response has the higher reward / pairs; kto: responses on the side of their verdict",
        "fraction, 0 to 1",
        "up",
        "At 0.5 nothing is learned. dpo begins at 0, since policy and reference are equal.",
    ),
    "eval_loss": Metric(
        "Held-out loss",
        "the same loss on the rows of buffer.trainer_input.eval_buffer, which are not trained, without dropout",
        "nats",
        "down",
        "Rising while the loss falls: the policy learns its rows by heart; stop earlier or take more data.",
    ),
    "policy_loss": Metric("Policy loss", "the loss without its KL and entropy terms", "nats", "watch"),
    "kl": Metric(
        "KL to the reference",
        "estimate of KL(policy || reference) per token, from policy_logprobs and ref_logprobs",
        "nats per token",
        "watch",
        "A fast rise: the policy leaves the reference; raise the KL coefficient or lower the learning rate.",
    ),
    "entropy": Metric(
        "Entropy",
        "mean over trained tokens of -sum_v p(v) log p(v)",
        "nats per token",
        "watch",
        "Falling to 0 early: the policy no longer explores.",
    ),
    "grad_norm": Metric(
        "Gradient norm",
        "L2 norm of the gradient of all parameters, before clipping",
        "L2 norm",
        "watch",
        "Spikes: lower the learning rate or check the batch for outliers.",
    ),
    "clip_fraction": Metric(
        "Clipped tokens",
        "trained tokens whose probability ratio was clipped / trained tokens",
        "fraction, 0 to 1",
        "watch",
        "Above about 0.2 the steps are too large or the data too stale.",
    ),
    "mismatch_kl": Metric(
        "Mismatch of trainer and engine",
        "mean over sampled trained tokens of w - 1 - log w, w = p_trainer / p_engine of the sampled token",
        "nats per token",
        "watch",
        "Above 0.01 at staleness 0 the engine computes another policy than the trainer; both in float32 give 1e-10.",
    ),
    "lr": Metric("Learning rate", "step size the optimizer used", "-", "watch"),
    "staleness": Metric(
        "Staleness",
        "mean over the batch of trainer's policy_version - min_policy_version",
        "optimizer steps",
        "down",
        "0 is on-policy; the bound in the configuration is never passed.",
    ),
    "staleness_max": Metric("Largest staleness", "largest staleness in the batch", "optimizer steps", "down"),
    "response_length": Metric(
        "Response length",
        "mean number of response tokens of a rollout, all its turns together",
        "tokens",
        "watch",
        "Growing into the token limit: see the truncated share.",
    ),
    "truncated": Metric(
        "Truncated responses", "rollouts that met the token limit / rollouts", "fraction, 0 to 1", "down"
    ),
    "failed": Metric("Failed rollouts", "rollouts that failed or timed out / rollouts", "fraction, 0 to 1", "down"),
    "tokens_per_s": Metric(
        "Throughput",
        "trainer: tokens trained / step_s; explorer: response tokens of one engine / seconds that it had its weights",
        "tokens per second",
        "up",
    ),
    "step_s": Metric("Time of a step", "wall time from the end of one step to the end of the next", "seconds", "down"),
    "wait_s": Metric(
        "Waiting",
        "trainer: part of step_s without data; explorer: seconds that its units waited for weights, summed",
        "seconds",
        "down",
    ),
    "num_rows": Metric("Rows in the batch", "experiences trained in the step", "experiences", "watch"),
    "num_tokens": Metric("Tokens in the batch", "tokens of prompt and response trained in the step", "tokens", "watch"),
    "num_missing_groups": Metric(
        "Missing groups",
        "groups that a partial batch, made when max_read_timeout passed, is short of a whole one",
        "groups",
        "down",
        "Any: the explorers are slower than buffer.trainer_input.experience_buffer.max_read_timeout allows.",
    ),
    "num_reused_groups": Metric(
        "Groups used again", "groups in the batch that were trained before (replay_buffer)", "groups", "watch"
    ),
}

DIRECTIONS: dict[Direction, str] = {"up": "higher is better", "down": "lower is better", "watch": "watch for jumps"}


WINDOW = 5
"""Steps that are looked at together: one odd step says nothing."""
_FEWEST_STEPS = 3
"""A run of fewer steps is not judged."""
_MOST = 0.5
"""Share of failed, truncated or stale rollouts, or of steps without rows, above which a run is warned of."""
_COLLAPSE = 0.1
"""Entropy or length below this share of what the first steps had."""
_MISMATCH = {True: 0.01, False: 0.1}
"""Nats a token, by whether the batches are on-policy; of stale ones the policy itself has moved on."""
_NO_SPREAD = "the tasks are too easy or too hard, or the reward tells no two answers apart"

Row = Mapping[str, float]
"""Metrics of one step by name; a missing one and NaN are the same."""


def warn_of_learning(trainer: Sequence[Row], explorer: Sequence[Row]) -> dict[str, str]:
    """Say why a run learns nothing, or not what it should: a line for each metric that tells so, by its name.

    trainer, explorer: rows of the steps in order; only the first and the last WINDOW of them count.
    """
    found: dict[str, str] = {}

    def values(rows: Sequence[Row], name: str) -> list[float]:
        return [row[name] for row in rows if not math.isnan(row.get(name, math.nan))]

    if len(last := explorer[-WINDOW:]) >= _FEWEST_STEPS:
        for name, advice in (
            ("failed", "see their errors in rftdask view, and log/"),
            ("truncated", "raise model.max_response_tokens, or reward shorter answers"),
        ):
            if (measured := values(last, name)) and (share := fmean(measured)) > _MOST:
                found[name] = f"{share:.0%} of the rollouts of the last {len(last)} explore steps {name}: {advice}"
    if len(last := trainer[-WINDOW:]) < _FEWEST_STEPS:
        return found
    steps = f"the last {len(last)} steps"

    rows = values(last, "num_rows")
    # Steps that were made of nothing: every group failed, was stale or was filtered.
    if (empty := rows.count(0.0)) > _MOST * len(last):
        found["num_rows"] = f"{empty} of {steps} trained no row: see what was dropped, and why, in rftdask status"
    stale = sum(values(last, "num_dropped_stale"))
    if stale > _MOST * (stale + sum(rows)):
        share = stale / (stale + sum(rows))
        found["num_dropped_stale"] = (
            f"{share:.0%} of the rows of {steps} were dropped as stale: raise synchronizer.max_staleness, or publish "
            "weights more often (sync_interval)"
        )
    flat, rewards = values(last, "flat_groups"), values(last, "reward")
    # Equal to the last bit, over several batches: no noise of sampling is left, so it is the reward itself.
    if len(rewards) >= _FEWEST_STEPS and len(set(rewards)) == 1 and min(flat, default=1.0) == 1.0:
        found["reward"] = f"all rewards of {steps} are {rewards[0]:.4g}: {_NO_SPREAD}"
    elif len(flat) >= _FEWEST_STEPS and min(flat) == 1.0:
        found["flat_groups"] = f"100% of the groups of {steps} have no spread: {_NO_SPREAD}"

    for name, advice in (
        ("entropy", "the policy no longer explores: lower the learning rate, or raise entropy_coef"),
        ("response_length", "look at the answers in rftdask view: the reward may pay for saying nothing"),
    ):
        first, now = values(trainer[:WINDOW], name), values(last, name)
        # Two windows that do not overlap, so that a short run is not compared with itself.
        if len(trainer) >= 2 * WINDOW and first and now and fmean(now) < _COLLAPSE * fmean(first):
            label = METRICS[name].label.lower()
            found[name] = f"{label} fell from {fmean(first):.3g} to {fmean(now):.3g} {METRICS[name].unit}: {advice}"
    # A stale batch was sampled by other weights, so trainer and engine differ there by training too.
    on_policy = max(values(last, "staleness_max"), default=0.0) == 0.0
    mismatch = values(last, "mismatch_kl")
    if mismatch and fmean(mismatch) > _MISMATCH[on_policy]:
        found["mismatch_kl"] = (
            f"mismatch_kl is {fmean(mismatch):.3g} nats per token over {steps}: the engine samples from another policy "
            "than the trainer trains; see its dtype and docs/engines.md"
        )
    return found
