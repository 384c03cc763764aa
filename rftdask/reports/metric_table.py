"""Explanations of metrics: the one place that names all that the package writes, and that says when their numbers mean
that a run learns nothing.

Workflows, reward functions and operators may write more metrics; such metrics are stored and tracked all the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    source: str = field(kw_only=True)
    """Where the formula is from: modules below rftdask/ that compute it, and what it follows, separated by "; "."""


METRICS: dict[str, Metric] = {
    "reward": Metric(
        "Reward",
        "mean of the rewards of all trainable rollouts in the batch, each once, whatever its turns",
        "reward units",
        "up",
        "Flat at its minimum: the tasks are too hard for the policy or the reward function rejects every answer.",
        source="trainer/trainer.py, rollouts/work_unit_task.py",
    ),
    "reward_std": Metric(
        "Reward spread",
        "mean over groups of the standard deviation of the rewards within one group",
        "reward units",
        "watch",
        "Near 0 nothing can be learned: all siblings of a group got the same reward.",
        source="trainer/trainer.py; the sigma of GRPO, arXiv:2402.03300",
    ),
    "flat_groups": Metric(
        "Groups without spread",
        "groups of several rollouts that all got the same reward / such groups",
        "fraction, 0 to 1",
        "down",
        "At 1 nothing is learned: the tasks are too easy or too hard, or the reward tells no two answers apart.",
        source="trainer/trainer.py; what DAPO filters, arXiv:2503.14476",
    ),
    "accuracy": Metric(
        "Accuracy",
        "correct answers / answers, over the whole eval taskset",
        "fraction, 0 to 1",
        "up",
        source="explorer/evaluation.py",
    ),
    "loss": Metric(
        "Loss",
        "the loss whose gradient was taken: policy loss + KL and entropy terms, over trained tokens",
        "nats",
        "watch",
        "In reinforcement learning it need not fall; in SFT and DPO it should.",
        source="algorithm/algorithm.py",
    ),
    "reward_accuracy": Metric(
        "Preferences in order",
        "pairs whose chosen response has the higher reward / pairs; kto: responses on the side of their verdict",
        "fraction, 0 to 1",
        "up",
        "At 0.5 nothing is learned. dpo begins at 0, since policy and reference are equal.",
        source="algorithm/losses/preference; DPO, arXiv:2305.18290",
    ),
    "eval_loss": Metric(
        "Held-out loss",
        "the same loss on the rows of buffer.trainer_input.eval_buffer, which are not trained, without dropout",
        "nats",
        "down",
        "Rising while the loss falls: the policy learns its rows by heart; stop earlier or take more data.",
        source="trainer/trainer.py",
    ),
    "router_aux_loss": Metric(
        "Use of the experts",
        "router_aux_loss_coef x experts x sum over experts of (share of the tokens that go there) x mean probability",
        "nats",
        "down",
        "Least where all experts are used alike: the coefficient x the experts that a token takes.",
        source="models/routers.py; Switch Transformer, arXiv:2101.03961",
    ),
    "router_agreement": Metric(
        "Routers that agree",
        "share of the experts that the engine's tokens took which the trainer's routers would have chosen, too",
        "share",
        "watch",
        "Below 1 by rounding and by the updates since, which router replay mends. Falling: the engine is behind.",
        source="trainer/engines/torch_engine.py",
    ),
    "policy_loss": Metric(
        "Policy loss", "the loss without its KL and entropy terms", "nats", "watch", source="algorithm/algorithm.py"
    ),
    "kl": Metric(
        "KL to the reference",
        "estimate of KL(policy || reference) per token, from policy_logprobs and ref_logprobs",
        "nats per token",
        "watch",
        "A fast rise: the policy leaves the reference; raise the KL coefficient or lower the learning rate.",
        source="algorithm/kl.py; k1, k2, k3, Schulman 2020",
    ),
    "entropy": Metric(
        "Entropy",
        "mean over trained tokens of -sum_v p(v) log p(v)",
        "nats per token",
        "watch",
        "Falling to 0 early: the policy no longer explores.",
        source="algorithm/algorithm.py; Shannon 1948",
    ),
    "rollout_entropy": Metric(
        "Entropy when sampled",
        "mean of -log p_engine of the trained tokens as they were sampled, an estimate of the rollouts' entropy",
        "nats per token",
        "watch",
        "Falling to 0 early: the policy no longer explores. Where the loss has an entropy term, `entropy` is exact.",
        source="trainer/trainer.py; Monte Carlo",
    ),
    "grad_norm": Metric(
        "Gradient norm",
        "L2 norm of the gradient of all parameters, before clipping",
        "L2 norm",
        "watch",
        "Spikes: lower the learning rate or check the batch for outliers.",
        source="trainer/engines/optimizer.py",
    ),
    "mismatch_kl": Metric(
        "Mismatch of trainer and engine",
        "mean over sampled trained tokens of w - 1 - log w, w = p_trainer / p_engine of the sampled token",
        "nats per token",
        "watch",
        "Above 0.01 at staleness 0 the engine computes another policy than the trainer; both in float32 give 1e-10.",
        source="trainer/engines/torch_engine.py; k3, Schulman 2020",
    ),
    "lr": Metric("Learning rate", "step size the optimizer used", "-", "watch", source="trainer/engines/optimizer.py"),
    "staleness": Metric(
        "Staleness",
        "mean over the batch of trainer's policy_version - min_policy_version",
        "optimizer steps",
        "down",
        "0 is on-policy; the bound in the configuration is never passed.",
        source="trainer/trainer.py",
    ),
    "staleness_max": Metric(
        "Largest staleness", "largest staleness in the batch", "optimizer steps", "down", source="trainer/trainer.py"
    ),
    "response_length": Metric(
        "Response length",
        "mean number of response tokens of a rollout, all its turns together",
        "tokens",
        "watch",
        "Growing into the token limit: see the truncated share.",
        source="trainer/trainer.py, rollouts/work_unit_task.py",
    ),
    "num_turns": Metric(
        "Turns", "calls of the policy in a rollout, mean", "turns", "watch", source="rollouts/work_unit_task.py"
    ),
    **{
        f"branches/{reason}": Metric(
            f"Rows begun: {label}",
            f"rows of a rollout that begin because {why}, mean",
            "rows",
            "down",
            "Each trains its whole prompt again; a template that keeps history, or an agent that appends, has none.",
            source="rollouts/policy/recording.py",
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
        "Truncated responses",
        "rollouts that met the token limit / rollouts",
        "fraction, 0 to 1",
        "down",
        source="rollouts/work_unit_task.py",
    ),
    "failed": Metric(
        "Failed rollouts",
        "rollouts that failed or timed out / rollouts",
        "fraction, 0 to 1",
        "down",
        source="rollouts/work_unit_task.py",
    ),
    "tokens_per_s": Metric(
        "Throughput",
        "trainer: tokens trained / step_s; explorer: response tokens of one engine / seconds that it had its weights",
        "tokens per second",
        "up",
        source="trainer/trainer.py, rollouts/work_unit_task.py",
    ),
    "step_s": Metric(
        "Time of a step",
        "wall time from the end of one step to the end of the next",
        "seconds",
        "down",
        source="trainer/trainer.py, rollouts/work_unit_task.py",
    ),
    "wait_s": Metric(
        "Waiting",
        "trainer: part of step_s without data; explorer: seconds that its units waited for weights, summed",
        "seconds",
        "down",
        source="trainer/trainer.py, rollouts/work_unit_task.py",
    ),
    "num_rows": Metric(
        "Rows in the batch", "experiences trained in the step", "experiences", "watch", source="trainer/trainer.py"
    ),
    "num_tokens": Metric(
        "Tokens in the batch",
        "tokens of prompt and response trained in the step",
        "tokens",
        "watch",
        source="trainer/trainer.py",
    ),
    "num_missing_groups": Metric(
        "Missing groups",
        "groups that a partial batch, made when max_read_timeout passed, is short of a whole one",
        "groups",
        "down",
        "Any: the explorers are slower than buffer.trainer_input.experience_buffer.max_read_timeout allows.",
        source="buffer/batches/log_source.py",
    ),
    "num_reused_groups": Metric(
        "Groups used again",
        "groups in the batch that were trained before (replay_buffer)",
        "groups",
        "watch",
        source="buffer/batches/log_source.py",
    ),
    # ---- what a batch is
    "num_trained_tokens": Metric(
        "Trained tokens",
        "tokens in the batch that the loss is taken of",
        "tokens",
        "watch",
        source="trainer/trainer.py",
    ),
    "num_rollouts": Metric(
        "Rollouts",
        "rollouts that were trained, or rolled out, or evaluated",
        "rollouts",
        "watch",
        source="trainer/trainer.py, rollouts/work_unit_task.py",
    ),
    "num_groups": Metric(
        "Groups",
        "tasks of which the batch has trainable rollouts",
        "groups",
        "watch",
        source="algorithm/advantages/base.py",
    ),
    "singleton_groups": Metric(
        "Groups of one",
        "groups with one trainable rollout, which has nothing to be compared with",
        "groups",
        "down",
        source="algorithm/advantages/base.py",
    ),
    "num_anchors": Metric(
        "Anchor states",
        "environment states that several rollouts share (gigpo)",
        "states",
        "up",
        source="GiGPO, arXiv:2505.10978",
    ),
    "singleton_anchors": Metric(
        "Anchor states of one",
        "states that one rollout alone was in (gigpo)",
        "states",
        "down",
        source="GiGPO, arXiv:2505.10978",
    ),
    "num_masked": Metric(
        "Rows without a trained token",
        "such as truncated responses that are masked",
        "rows",
        "watch",
        source="trainer/trainer.py",
    ),
    "weight_sum": Metric(
        "Sum of token weights",
        "sum of the weights that tokens have in the loss",
        "-",
        "watch",
        source="algorithm/algorithm.py; algorithm/aggregation.py",
    ),
    "num_skipped_steps": Metric(
        "Steps without an update",
        "1 where the gradient was not finite, so that no weight changed",
        "steps",
        "down",
        source="trainer/engines/optimizer.py",
    ),
    # ---- what losses say of themselves
    "clip_frac": Metric(
        "Clipped tokens",
        "trained tokens whose probability ratio was clipped, so that they have no gradient / trained tokens",
        "fraction, 0 to 1",
        "watch",
        "Above about 0.2 the steps are too large or the data too stale.",
        source="PPO, arXiv:1707.06347, equation 7",
    ),
    "dual_clip_frac": Metric(
        "Tokens at the outer clip",
        "trained tokens of negative advantage whose ratio is above clip_ratio_c / trained tokens",
        "fraction, 0 to 1",
        "watch",
        source="dual clip, arXiv:1912.09729, equation 5",
    ),
    "mask_clip_frac": Metric(
        "Masked tokens of CISPO",
        "tokens left out for their ratio / trained tokens",
        "fraction, 0 to 1",
        "watch",
        source="CISPO, arXiv:2506.13585",
    ),
    "sequence_mask_frac": Metric(
        "Masked sequences",
        "tokens of failures that the policy has moved far away from / trained tokens",
        "fraction, 0 to 1",
        "watch",
        source="DeepSeek-V3.2, arXiv:2512.02556, section 3.1",
    ),
    "token_filter_frac": Metric(
        "Filtered tokens",
        "tokens that the advantage leaves out / trained tokens",
        "fraction, 0 to 1",
        "watch",
        source="Clip_V, arXiv:2602.03392",
    ),
    "ppo_kl": Metric(
        "KL to the old policy",
        "mean of log p_old - log p_policy of the sampled token, an estimate of KL(old || policy)",
        "nats per token",
        "watch",
        "Far from 0 the batch is stale, or its updates are large.",
        source="algorithm/losses/base.py; k1, Schulman 2020",
    ),
    "kl_coef": Metric(
        "KL coefficient", "weight of the KL term in this step", "-", "watch", source="trainer/engines/torch_engine.py"
    ),
    "kl_penalty": Metric(
        "KL penalty",
        "mean KL to the reference that was taken off the rewards",
        "nats",
        "watch",
        source="Ziegler et al., arXiv:1909.08593, section 2.2",
    ),
    "kl_penalty_coef": Metric(
        "KL penalty coefficient",
        "weight of the KL that is taken off the rewards",
        "-",
        "watch",
        source="Ziegler et al., arXiv:1909.08593, section 2.2",
    ),
    "is_weight": Metric(
        "Importance weight",
        "mean of the rollout correction's factors of the trained tokens",
        "-",
        "watch",
        source="algorithm/correction.py; arXiv:2510.18855",
    ),
    "is_clip_frac": Metric(
        "Corrected tokens out of bounds",
        "tokens whose importance weight was cut or left out / trained tokens",
        "fraction, 0 to 1",
        "watch",
        source="algorithm/correction.py; arXiv:2510.18855",
    ),
    "behavior_weight": Metric(
        "Weight of the sampler",
        "mean of p_proximal / p_sampler of the tokens that count (decoupled_ppo)",
        "-",
        "watch",
        source="AReaL, arXiv:2505.24298",
    ),
    "behavior_cap_frac": Metric(
        "Tokens over the cap",
        "tokens dropped since p_proximal / p_sampler is above behavior_weight_cap / trained tokens",
        "fraction, 0 to 1",
        "watch",
        source="AReaL, arXiv:2505.24298",
    ),
    "soft_gate": Metric(
        "Soft gate of SAPO",
        "mean of the gate that takes the place of the clip",
        "-",
        "watch",
        source="SAPO, arXiv:2511.20347, equations 5 and 6",
    ),
    "topr_alpha": Metric(
        "Taper of TOPR",
        "mean factor of the tokens; failures have at most 1",
        "-",
        "watch",
        source="TOPR, arXiv:2503.14286",
    ),
    "vespo_phi": Metric(
        "Weight of VESPO",
        "mean of phi, the weight of a sequence's tokens",
        "-",
        "watch",
        source="VESPO, arXiv:2602.10693",
    ),
    "usual_loss": Metric(
        "Loss of own rollouts",
        "policy loss of the rows that the policy sampled",
        "nats",
        "watch",
        source="CHORD, arXiv:2508.11408",
    ),
    "expert_loss": Metric(
        "Loss of demonstrations",
        "imitation loss of the expert's rows",
        "nats",
        "down",
        source="CHORD, arXiv:2508.11408",
    ),
    "sft_nll": Metric(
        "Negative log-likelihood",
        "mean of -log p of the trained tokens of the dataset",
        "nats per token",
        "down",
        source="algorithm/losses/imitation/sft.py",
    ),
    "jsd": Metric(
        "Divergence from the teacher",
        "mean over positions of the divergence over the vocabulary",
        "nats",
        "down",
        source="GKD, arXiv:2306.13649, equation 1",
    ),
    "teacher_kl": Metric(
        "KL to the teacher",
        "mean of log p_sampler - log p_teacher of the sampled tokens",
        "nats per token",
        "down",
        source="algorithm/advantages/tokens.py; MiniLLM, arXiv:2306.08543",
    ),
    "reward_chosen": Metric(
        "Reward of the chosen",
        "mean implicit reward, or score, of chosen responses",
        "-",
        "up",
        source="DPO, arXiv:2305.18290",
    ),
    "reward_rejected": Metric(
        "Reward of the rejected", "the same of rejected responses", "-", "watch", source="DPO, arXiv:2305.18290"
    ),
    "kl_baseline": Metric(
        "KL baseline of KTO",
        "z0, from responses paired with other prompts",
        "nats",
        "watch",
        source="KTO, arXiv:2402.01306, equations 7 and 8",
    ),
    "value_mean": Metric(
        "Mean value",
        "mean of the critic's values of the trained tokens",
        "reward units",
        "watch",
        source="GAE, arXiv:1506.02438",
    ),
    "critic_loss": Metric(
        "Loss of the critic",
        "clipped squared error of the values",
        "squared reward units",
        "down",
        source="trainer/engines/critic.py; arXiv:2005.12729",
    ),
    "critic_error": Metric(
        "Error of the critic",
        "mean squared difference of return and value",
        "squared reward units",
        "down",
        source="trainer/engines/critic.py",
    ),
    "critic_explained_variance": Metric(
        "What the critic explains",
        "1 - variance of (return - value) / variance of the returns",
        "1 at most",
        "up",
        "At 0 or below the critic is no better than a constant.",
        source="trainer/engines/critic.py",
    ),
    "critic_grad_norm": Metric(
        "Gradient norm of the critic",
        "as grad_norm, of the critic",
        "L2 norm",
        "watch",
        source="trainer/engines/critic.py",
    ),
    "critic_lr": Metric(
        "Learning rate of the critic", "step size its optimizer used", "-", "watch", source="trainer/engines/critic.py"
    ),
    "critic_num_skipped_steps": Metric(
        "Steps without an update of the critic",
        "as num_skipped_steps",
        "steps",
        "down",
        source="trainer/engines/critic.py",
    ),
    # ---- where the time goes
    "train_s": Metric(
        "Training",
        "part of step_s in forward and backward passes and the update",
        "seconds",
        "down",
        source="trainer/trainer.py",
    ),
    "publish_s": Metric(
        "Publishing",
        "part of step_s in which weights for the engines were made",
        "seconds",
        "down",
        source="trainer/trainer.py",
    ),
    "checkpoint_s": Metric(
        "Checkpoints", "part of step_s in which a checkpoint was made", "seconds", "down", source="trainer/trainer.py"
    ),
    "generate_s": Metric(
        "Generating",
        "seconds that units of the step were in their engines, summed over the units",
        "seconds",
        "down",
        source="rollouts/work_unit_task.py",
    ),
    "occupancy": Metric(
        "Slots in use",
        "requests under way in an engine / explorer.slots_per_engine, mean over the time from work unit to work unit",
        "fraction, 0 to 1",
        "up",
        source="rollouts/work_unit_task.py",
    ),
    "load_s": Metric(
        "Loading of weights",
        "seconds that engines loaded a version, summed over units",
        "seconds",
        "down",
        source="rollouts/work_unit_task.py",
    ),
    "policy_version": Metric(
        "Policy version",
        "newest version that a unit of the step used",
        "steps",
        "watch",
        source="rollouts/work_unit_task.py",
    ),
    "num_prompt_tokens": Metric("Prompt length", "mean over turns", "tokens", "watch", source="rollouts/rollout.py"),
    "num_response_tokens": Metric(
        "Length of a turn", "response tokens, mean over turns", "tokens", "watch", source="rollouts/rollout.py"
    ),
    "prompt_truncated": Metric(
        "Cut prompts",
        "prompts that were longer than max_prompt_tokens / prompts",
        "fraction, 0 to 1",
        "down",
        source="rollouts/rollout.py",
    ),
    # ---- what processes and their machines have in use, a curve for each worker
    "cpu_cores": Metric(
        "Cores in use",
        "CPU seconds of a worker and of all processes that it started / seconds, over some seconds",
        "cores",
        "watch",
        source="processes/usage.py",
    ),
    "host_cpu": Metric(
        "CPU of the machine",
        "busy cores / cores, over some seconds",
        "fraction, 0 to 1",
        "watch",
        "Near 1 with idle GPUs: rewards, tools or tokenizers hold the run up.",
        source="processes/usage.py",
    ),
    "host_free_gib": Metric(
        "Host memory left",
        "what the machine, or the limit of the job or container, still has for this process",
        "GiB",
        "watch",
        "Near 0 the kernel ends the largest process.",
        source="processes/usage.py",
    ),
    "process_gib": Metric(
        "Memory of a process",
        "resident memory of the largest process of a worker: its engine or rank",
        "GiB",
        "watch",
        "Growing without end: a leak, in a workflow or a reward that keeps what it has seen.",
        source="processes/usage.py",
    ),
    "gpu_busy": Metric(
        "GPU in use",
        "share of the last moment in which a kernel ran (NVML), mean over the GPUs of a worker",
        "fraction, 0 to 1",
        "up",
        "It says that something ran, not how much of the GPU it filled.",
        source="processes/usage.py",
    ),
    "gpu_memory": Metric(
        "GPU memory in use",
        "used / total (NVML), over the GPUs of a worker, other processes included",
        "fraction, 0 to 1",
        "watch",
        source="processes/usage.py",
    ),
    "gpu_gib": Metric(
        "GPU memory", "used (NVML), sum over the GPUs of a worker", "GiB", "watch", source="processes/usage.py"
    ),
    "num_gpus": Metric(
        "GPUs", "GPUs that a worker sees and that NVML answers for", "GPUs", "watch", source="processes/usage.py"
    ),
}

FAMILIES: dict[str, Metric] = {
    r"pass@\d+": Metric(
        "Pass at k",
        "probability that one of k rollouts of a task has a reward of 1 or more, mean over the tasks; arXiv:2107.03374",
        "fraction, 0 to 1",
        "up",
        source="Chen et al., arXiv:2107.03374, equation 1",
    ),
    r"auxiliary/.+/(calls|failures)": Metric(
        "Calls of a model",
        "questions to an auxiliary model in the step, and those of them that failed, by all attempts at rollouts",
        "calls",
        "watch",
        source="rollouts/policy/recording.py",
    ),
    r"auxiliary/.+/(prompt|response)_tokens": Metric(
        "Tokens of a model",
        "tokens of the questions that an auxiliary model answered in the step, or of its answers",
        "tokens",
        "watch",
        source="rollouts/policy/recording.py",
    ),
    r"auxiliary/.+/cost": Metric(
        "Cost of a model",
        "(prompt_price x prompt tokens + response_price x response tokens) / 1,000,000",
        "as the prices",
        "down",
        source="rollouts/policy/recording.py",
    ),
    r"taskset/[^/]+/reward": Metric(
        "Reward of a taskset",
        "mean over the rollouts of one taskset that may be trained, in steps that had tasks of several",
        "as the reward",
        "up",
        source="rollouts/work_unit_task.py",
    ),
    r".+/mean@\d+": Metric(
        "Mean of n",
        "mean over the n rollouts of a task, then over the tasks",
        "as the metric",
        "up",
        source="explorer/evaluation.py",
    ),
    r".+/std@\d+": Metric(
        "Spread of n",
        "standard deviation over the n rollouts of a task",
        "as the metric",
        "watch",
        source="explorer/evaluation.py",
    ),
    r".+/best@\d+": Metric(
        "Best of k",
        "expected best of k drawn from a task's rollouts",
        "as the metric",
        "up",
        source="explorer/evaluation.py",
    ),
    r".+/worst@\d+": Metric(
        "Worst of k",
        "expected worst of k drawn from a task's rollouts",
        "as the metric",
        "up",
        source="explorer/evaluation.py",
    ),
    r".+/(max|min|std)": Metric(
        "Range", "over all rollouts (monitor.detailed_stats)", "as the metric", "watch", source="explorer/evaluation.py"
    ),
    r"rollout/num_retries": Metric(
        "Retries", "attempts after the first, per rollout", "attempts", "down", source="rollouts/rollout.py"
    ),
    r"rollout/queue_s": Metric(
        "Waiting for a place", "seconds per rollout before it began", "seconds", "down", source="rollouts/rollout.py"
    ),
    r"rollout/generate_s": Metric(
        "Calls of models",
        "seconds per rollout, of several at once the sum",
        "seconds",
        "down",
        source="rollouts/rollout.py",
    ),
    r"rollout/(tool|reward)_s": Metric(
        "Tools, rewards",
        "seconds per rollout that the workflow counts",
        "seconds",
        "down",
        source="rollouts/rollout.py",
    ),
    r"rollout/total_s": Metric(
        "Time of a rollout",
        "seconds from its first attempt to its end",
        "seconds",
        "down",
        source="rollouts/rollout.py",
    ),
    r"(num_dropped_|dropped/).+": Metric(
        "Dropped rows",
        "experiences of the batch that are not trained, by their reason; `total`: all",
        "rows",
        "down",
        source="trainer/trainer.py",
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
