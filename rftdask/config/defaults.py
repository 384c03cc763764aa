"""What an absent key is filled with, where that depends on other keys.

Pure: a Config in, values out.
"""

import math
from typing import Any

from rftdask.config.cross_checks.rule import is_natural
from rftdask.config.schema.algorithm import takes_demonstrations
from rftdask.config.schema.buffer import TasksetConfig
from rftdask.config.schema.run import Config, count_demonstrations

Fills = dict[tuple[str | int, ...], Any]
"""Location -> value for a key that was absent."""


def fill(config: Config) -> Fills:
    """Values for the absent keys marked Filled. `config` has None there; what cannot be computed is left out."""
    fills: Fills = {}
    _fill_lengths(config, fills)
    _fill_batches(config, fills)
    _fill_synchronizer(config, fills)
    _fill_gradient_norm(config, fills)
    response = config.model.max_response_tokens or fills.get(("model", "max_response_tokens"))
    repeat_times = config.algorithm.repeat_times or fills["algorithm", "repeat_times"]
    source = config.buffer.explorer_input
    here: tuple[str | int, ...] = ("buffer", "explorer_input")
    if source.taskset is not None:
        _fill_taskset(config, source.taskset, (*here, "taskset"), "taskset_0", repeat_times, response, fills)
    for i, taskset in enumerate(source.tasksets):
        _fill_taskset(config, taskset, (*here, "tasksets", i), f"taskset_{i}", repeat_times, response, fills)
    for i, taskset in enumerate(source.eval_tasksets):
        _fill_taskset(config, taskset, (*here, "eval_tasksets", i), f"eval_taskset_{i}", 1, response, fills)
    return fills


def _fill_lengths(config: Config, fills: Fills) -> None:
    total, prompt, response = (
        config.model.max_model_len,
        config.model.max_prompt_tokens,
        config.model.max_response_tokens,
    )
    if total is None and prompt is not None and response is not None:
        fills["model", "max_model_len"] = prompt + response
    if total is not None and prompt is None:
        fills["model", "max_prompt_tokens"] = total - response if response is not None else total // 2
    if total is not None and response is None:
        fills["model", "max_response_tokens"] = total - (prompt if prompt is not None else total // 2)


def _fill_batches(config: Config, fills: Fills) -> None:
    explores = config.algorithm.schema_type == "experience"
    repeat_times = config.algorithm.repeat_times
    if repeat_times is None:
        repeat_times = fills["algorithm", "repeat_times"] = config.algorithm.usual_repeat_times
    strategy = config.algorithm.sample_strategy
    if strategy is None:
        strategy = fills["algorithm", "sample_strategy"] = config.algorithm.usual_sample_strategy
    if config.buffer.train_batch_size is None:
        rollouts = config.buffer.batch_size * (repeat_times if explores else 1)
        ratio = config.algorithm.expert_ratio if takes_demonstrations(strategy) else 0.0
        fills["buffer", "train_batch_size"] = _with_demonstrations(rollouts, ratio)
    source = config.buffer.trainer_input
    if source.experience_buffer.storage_type is None:
        storage_type = "queue" if explores else "file"
        fills["buffer", "trainer_input", "experience_buffer", "storage_type"] = storage_type
    for name, buffer in source.auxiliary_buffers.items():
        if buffer.storage_type is None:
            fills["buffer", "trainer_input", "auxiliary_buffers", name, "storage_type"] = "file"


def _with_demonstrations(rollouts: int, ratio: float) -> int:
    """The smallest batch that holds so many rollouts beside its share of demonstrations."""
    size = math.floor(rollouts / (1.0 - ratio))
    while size - count_demonstrations(size, ratio) < rollouts:
        size += 1
    return size


def _fill_synchronizer(config: Config, fills: Fills) -> None:
    for key in ("explorer_sync_interval", "trainer_sync_interval"):
        if getattr(config.synchronizer, key) is None:
            fills["synchronizer", key] = config.synchronizer.sync_interval
    # A strategy that bounds the staleness has the bound as an argument; it is the same as the synchronizer's.
    bound = (config.algorithm.sample_strategy_args or {}).get("max_staleness")
    if is_natural(bound) and config.synchronizer.max_staleness is None:
        fills["synchronizer", "max_staleness"] = bound


def _fill_gradient_norm(config: Config, fills: Fills) -> None:
    ours, reference = config.trainer.grad_clip, config.algorithm.optimizer.clip_grad
    if ours is None:
        fills["trainer", "grad_clip"] = 1.0 if reference is None else reference
    if reference is None:
        fills["algorithm", "optimizer", "clip_grad"] = 1.0 if ours is None else ours


def _fill_taskset(
    config: Config,
    taskset: TasksetConfig,
    loc: tuple[str | int, ...],
    name: str,
    repeat_times: int,
    max_tokens: int | None,
    fills: Fills,
) -> None:
    source = config.buffer.explorer_input
    workflow = source.default_workflow_type
    if "eval_tasksets" in loc:
        workflow = source.default_eval_workflow_type or workflow
    values = {
        ("name",): name,
        ("repeat_times",): repeat_times,
        ("default_workflow_type",): workflow,
        ("default_reward_fn_type",): source.default_reward_fn_type,
        ("rollout_args", "temperature"): config.model.temperature,
        ("rollout_args", "top_p"): config.model.top_p,
        ("rollout_args", "top_k"): config.model.top_k,
        ("rollout_args", "max_tokens"): max_tokens,
    }
    for keys, value in values.items():
        holder = taskset.rollout_args if keys[0] == "rollout_args" else taskset
        if getattr(holder, keys[-1]) is None and value is not None:
            fills[loc + keys] = value
