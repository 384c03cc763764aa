"""Explanations of metrics: the one place that names all that the package writes, and that says when their numbers mean
that a run learns nothing.

Workflows, reward functions and operators may write more metrics; such metrics are stored and tracked all the same.
"""

from __future__ import annotations

import math
import re
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
    "router_aux_loss": Metric(
        "Use of the experts",
        "router_aux_loss_coef x experts x sum over experts of (share of the tokens that go there) x mean probability",
        "nats",
        "down",
        "Least where all experts are used alike: the coefficient x the experts that a token takes.",
    ),
    "router_agreement": Metric(
        "Routers that agree",
        "share of the experts that the engine's tokens took which the trainer's routers would have chosen, too",
        "share",
        "watch",
        "Below 1 by rounding and by the updates since, which router replay mends. Falling: the engine is behind.",
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
    "num_turns": Metric("Turns", "calls of the policy in a rollout, mean", "turns", "watch"),
    **{
        f"branches/{reason}": Metric(
            f"Rows begun: {label}",
            f"rows of a rollout that begin because {why}, mean",
            "rows",
            "down",
            "Each trains its whole prompt again; a template that keeps history, or an agent that appends, has none.",
        )
        for reason, label, why in (
            ("answer", "answer rewritten", "an answer is not in the prompt as it was sampled"),
            ("history", "history rewritten", "what stood before is not in the prompt, or another chat began"),
            ("forked", "forked", "another call has gone on from there already, or the prompt is asked again"),
            ("sampling", "other sampling", "temperature, top_p or top_k is another"),
            ("truncated", "prompt cut", "the prompt lost its beginning to max_prompt_tokens"),
        )
    },
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
    # ---- what a batch is
    "num_trained_tokens": Metric("Trained tokens", "tokens in the batch that the loss is taken of", "tokens", "watch"),
    "num_rollouts": Metric("Rollouts", "rollouts that were trained, or rolled out, or evaluated", "rollouts", "watch"),
    "num_groups": Metric("Groups", "tasks of which the batch has trainable rollouts", "groups", "watch"),
    "singleton_groups": Metric(
        "Groups of one", "groups with one trainable rollout, which has nothing to be compared with", "groups", "down"
    ),
    "num_anchors": Metric("Anchor states", "environment states that several rollouts share (gigpo)", "states", "up"),
    "singleton_anchors": Metric(
        "Anchor states of one", "states that one rollout alone was in (gigpo)", "states", "down"
    ),
    "num_masked": Metric(
        "Rows without a trained token", "such as truncated responses that are masked", "rows", "watch"
    ),
    "weight_sum": Metric("Sum of token weights", "sum of the weights that tokens have in the loss", "-", "watch"),
    "num_skipped_steps": Metric(
        "Steps without an update", "1 where the gradient was not finite, so that no weight changed", "steps", "down"
    ),
    # ---- what losses say of themselves
    "clip_frac": Metric(
        "Clipped tokens",
        "trained tokens whose probability ratio was clipped, so that they have no gradient / trained tokens",
        "fraction, 0 to 1",
        "watch",
        "Above about 0.2 the steps are too large or the data too stale.",
    ),
    "dual_clip_frac": Metric(
        "Tokens at the outer clip",
        "trained tokens of negative advantage whose ratio is above clip_ratio_c / trained tokens",
        "fraction, 0 to 1",
        "watch",
    ),
    "mask_clip_frac": Metric(
        "Masked tokens of CISPO", "tokens left out for their ratio / trained tokens", "fraction, 0 to 1", "watch"
    ),
    "sequence_mask_frac": Metric(
        "Masked sequences",
        "tokens of failures that the policy has moved far away from / trained tokens",
        "fraction, 0 to 1",
        "watch",
    ),
    "token_filter_frac": Metric(
        "Filtered tokens", "tokens that the advantage leaves out / trained tokens", "fraction, 0 to 1", "watch"
    ),
    "ppo_kl": Metric(
        "KL to the old policy",
        "mean of log p_old - log p_policy of the sampled token, an estimate of KL(old || policy)",
        "nats per token",
        "watch",
        "Far from 0 the batch is stale, or its updates are large.",
    ),
    "kl_coef": Metric("KL coefficient", "weight of the KL term in this step", "-", "watch"),
    "kl_penalty": Metric("KL penalty", "mean KL to the reference that was taken off the rewards", "nats", "watch"),
    "kl_penalty_coef": Metric("KL penalty coefficient", "weight of the KL that is taken off the rewards", "-", "watch"),
    "is_weight": Metric(
        "Importance weight", "mean of the rollout correction's factors of the trained tokens", "-", "watch"
    ),
    "is_clip_frac": Metric(
        "Corrected tokens out of bounds",
        "tokens whose importance weight was cut or left out / trained tokens",
        "fraction, 0 to 1",
        "watch",
    ),
    "behavior_weight": Metric(
        "Weight of the sampler", "mean of p_proximal / p_sampler of the tokens that count (decoupled_ppo)", "-", "watch"
    ),
    "behavior_cap_frac": Metric(
        "Tokens over the cap",
        "tokens dropped since p_proximal / p_sampler is above behavior_weight_cap / trained tokens",
        "fraction, 0 to 1",
        "watch",
    ),
    "soft_gate": Metric("Soft gate of SAPO", "mean of the gate that takes the place of the clip", "-", "watch"),
    "topr_alpha": Metric("Taper of TOPR", "mean factor of the tokens; failures have at most 1", "-", "watch"),
    "vespo_phi": Metric("Weight of VESPO", "mean of phi, the weight of a sequence's tokens", "-", "watch"),
    "usual_loss": Metric("Loss of own rollouts", "policy loss of the rows that the policy sampled", "nats", "watch"),
    "expert_loss": Metric("Loss of demonstrations", "imitation loss of the expert's rows", "nats", "down"),
    "sft_nll": Metric(
        "Negative log-likelihood", "mean of -log p of the trained tokens of the dataset", "nats per token", "down"
    ),
    "jsd": Metric(
        "Divergence from the teacher", "mean over positions of the divergence over the vocabulary", "nats", "down"
    ),
    "teacher_kl": Metric(
        "KL to the teacher", "mean of log p_sampler - log p_teacher of the sampled tokens", "nats per token", "down"
    ),
    "reward_chosen": Metric("Reward of the chosen", "mean implicit reward, or score, of chosen responses", "-", "up"),
    "reward_rejected": Metric("Reward of the rejected", "the same of rejected responses", "-", "watch"),
    "kl_baseline": Metric("KL baseline of KTO", "z0, from responses paired with other prompts", "nats", "watch"),
    "value_mean": Metric("Mean value", "mean of the critic's values of the trained tokens", "reward units", "watch"),
    "critic_loss": Metric("Loss of the critic", "clipped squared error of the values", "squared reward units", "down"),
    "critic_error": Metric(
        "Error of the critic", "mean squared difference of return and value", "squared reward units", "down"
    ),
    "critic_explained_variance": Metric(
        "What the critic explains",
        "1 - variance of (return - value) / variance of the returns",
        "1 at most",
        "up",
        "At 0 or below the critic is no better than a constant.",
    ),
    "critic_grad_norm": Metric("Gradient norm of the critic", "as grad_norm, of the critic", "L2 norm", "watch"),
    "critic_lr": Metric("Learning rate of the critic", "step size its optimizer used", "-", "watch"),
    "critic_num_skipped_steps": Metric(
        "Steps without an update of the critic", "as num_skipped_steps", "steps", "down"
    ),
    # ---- where the time goes
    "train_s": Metric("Training", "part of step_s in forward and backward passes and the update", "seconds", "down"),
    "publish_s": Metric("Publishing", "part of step_s in which weights for the engines were made", "seconds", "down"),
    "checkpoint_s": Metric("Checkpoints", "part of step_s in which a checkpoint was made", "seconds", "down"),
    "generate_s": Metric(
        "Generating", "seconds that units of the step were in their engines, summed over the units", "seconds", "down"
    ),
    "occupancy": Metric(
        "Slots in use",
        "requests under way in an engine / explorer.slots_per_engine, mean over the time from work unit to work unit",
        "fraction, 0 to 1",
        "up",
    ),
    "load_s": Metric(
        "Loading of weights", "seconds that engines loaded a version, summed over units", "seconds", "down"
    ),
    "policy_version": Metric("Policy version", "newest version that a unit of the step used", "steps", "watch"),
    "num_prompt_tokens": Metric("Prompt length", "mean over turns", "tokens", "watch"),
    "num_response_tokens": Metric("Length of a turn", "response tokens, mean over turns", "tokens", "watch"),
    "prompt_truncated": Metric(
        "Cut prompts", "prompts that were longer than max_prompt_tokens / prompts", "fraction, 0 to 1", "down"
    ),
}

FAMILIES: dict[str, Metric] = {
    r"pass@\d+": Metric(
        "Pass at k",
        "probability that one of k rollouts of a task has a reward of 1 or more, mean over the tasks; arXiv:2107.03374",
        "fraction, 0 to 1",
        "up",
    ),
    r".+/mean@\d+": Metric(
        "Mean of n", "mean over the n rollouts of a task, then over the tasks", "as the metric", "up"
    ),
    r".+/std@\d+": Metric("Spread of n", "standard deviation over the n rollouts of a task", "as the metric", "watch"),
    r".+/best@\d+": Metric("Best of k", "expected best of k drawn from a task's rollouts", "as the metric", "up"),
    r".+/worst@\d+": Metric("Worst of k", "expected worst of k drawn from a task's rollouts", "as the metric", "up"),
    r".+/(max|min|std)": Metric("Range", "over all rollouts (monitor.detailed_stats)", "as the metric", "watch"),
    r"rollout/num_retries": Metric("Retries", "attempts after the first, per rollout", "attempts", "down"),
    r"rollout/queue_s": Metric("Waiting for a place", "seconds per rollout before it began", "seconds", "down"),
    r"rollout/generate_s": Metric(
        "Calls of models", "seconds per rollout, of several at once the sum", "seconds", "down"
    ),
    r"rollout/(tool|reward)_s": Metric(
        "Tools, rewards", "seconds per rollout that the workflow counts", "seconds", "down"
    ),
    r"rollout/total_s": Metric("Time of a rollout", "seconds from its first attempt to its end", "seconds", "down"),
    r"(num_dropped_|dropped/).+": Metric(
        "Dropped rows", "experiences of the batch that are not trained, by their reason; `total`: all", "rows", "down"
    ),
}
"""What a name says that is a pattern, for the names that are made: they match it whole."""


def explain(name: str) -> Metric | None:
    """The explanation of a metric; None: it is none of the package's."""
    return METRICS.get(name) or next((metric for p, metric in FAMILIES.items() if re.fullmatch(p, name)), None)


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
    # From here on of the trainer, which may be some steps behind the explorer.
    if len(last := trainer[-WINDOW:]) < _FEWEST_STEPS:
        return found
    steps = f"the last {len(last)} steps"

    rows = values(last, "num_rows")
    # Steps that were made of nothing: every group failed, was stale or was filtered.
    if (empty := rows.count(0.0)) > _MOST * len(last):
        found["num_rows"] = f"{empty} of {steps} trained no row: see what was dropped, and why, in rftdask status"
    # Of rows that were trained or dropped as stale: other drops have their own reasons.
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
    # A mean over the window: one odd step is not the engine's.
    if mismatch and fmean(mismatch) > _MISMATCH[on_policy]:
        found["mismatch_kl"] = (
            f"mismatch_kl is {fmean(mismatch):.3g} nats per token over {steps}: the engine samples from another policy "
            "than the trainer trains; see its dtype and docs/engines.md"
        )
    return found
