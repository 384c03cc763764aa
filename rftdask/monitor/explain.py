"""Explanations of metrics: the one place that names those which plots, reports and documentation know.

Roles may write more metrics than these; such metrics are stored and tracked all the same, but nobody explains them.
"""

from __future__ import annotations

from dataclasses import dataclass
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
