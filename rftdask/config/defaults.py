"""Values of absent keys that depend on other keys. Pure: takes a Config, returns values."""

import math
from typing import Any

from rftdask.config.base import Location, is_natural
from rftdask.config.schema.algorithm import takes_demonstrations
from rftdask.config.schema.run import MADE_ROWS, Config, count_demonstrations

Fills = dict[Location, Any]
"""Location -> value of an absent key."""


def fill(config: Config) -> Fills:
    """Return values for absent keys marked Computed, which are None in `config`. Unknown values are left out."""
    fills: Fills = {}
    algorithm, model, sync = config.algorithm, config.model, config.synchronizer
    explores = algorithm.schema_type == "experience"

    # Absent lengths: what the others leave, or half of it.
    total, prompt, response = model.max_model_len, model.max_prompt_tokens, model.max_response_tokens
    if total is None and prompt is not None and response is not None:
        fills["model", "max_model_len"] = prompt + response
    if total is not None and prompt is None:
        fills["model", "max_prompt_tokens"] = total - response if response is not None else total // 2
    if total is not None and response is None:
        response = fills["model", "max_response_tokens"] = total - (prompt if prompt is not None else total // 2)

    repeat_times, strategy = algorithm.repeat_times, algorithm.sample_strategy
    if repeat_times is None:
        repeat_times = fills["algorithm", "repeat_times"] = algorithm.usual_repeat_times
    if strategy is None:
        strategy = fills["algorithm", "sample_strategy"] = algorithm.usual_sample_strategy
    if config.buffer.train_batch_size is None:
        rollouts = config.buffer.batch_size * (repeat_times if explores else 1)
        ratio = algorithm.expert_ratio if takes_demonstrations(strategy) else 0.0
        # The smallest batch with this many rollouts and its share of demonstrations.
        size = math.floor(rollouts / (1.0 - ratio))
        while size - count_demonstrations(size, ratio) < rollouts:
            size += 1
        fills["buffer", "train_batch_size"] = size
    if config.buffer.trainer_input.experience_buffer.storage_type is None:
        fills["buffer", "trainer_input", "experience_buffer", "storage_type"] = "queue" if explores else "file"
    for place, buffer in config.buffer.trainer_input.side_places.items():
        if buffer.storage_type is None:
            fills[(*place, "storage_type")] = "file"

    for key in ("explorer_sync_interval", "trainer_sync_interval"):
        if getattr(sync, key) is None:
            # One interval for both sides by default.
            fills["synchronizer", key] = sync.sync_interval
    # The staleness bound of a strategy is also the synchronizer's.
    bound = (algorithm.sample_strategy_args or {}).get("max_staleness")
    if is_natural(bound) and sync.max_staleness is None:
        fills["synchronizer", "max_staleness"] = bound

    # Two names of one limit.
    ours, reference = config.trainer.grad_clip, algorithm.optimizer.clip_grad
    if ours is None:
        fills["trainer", "grad_clip"] = 1.0 if reference is None else reference
    if reference is None:
        fills["algorithm", "optimizer", "clip_grad"] = 1.0 if ours is None else ours

    return (
        fills
        | _fill_engines(config)
        | _fill_seeds(config)
        | _fill_pipeline(config)
        | _fill_tasksets(config, repeat_times, response)
    )


def _fill_pipeline(config: Config) -> Fills:
    # A pipeline writes its dataset to one place. Another path in the file is its input.
    pipeline, place, dataset = config.data_processor.task_pipeline, config.pipeline_place, config.pipeline_dataset
    if place is None or dataset is None:
        return {}
    made = f"{config.checkpoint_job_dir}/{MADE_ROWS}"
    fills: Fills = {(*place, "path"): made}
    if not pipeline.inputs and pipeline.config_path is None and dataset.path not in (None, made):
        fills["data_processor", "task_pipeline", "inputs"] = [dataset.path]
    return fills


def _fill_engines(config: Config) -> Fills:
    # By default an auxiliary model is loaded with the policy.
    fills: Fills = {}
    for number, model in enumerate(config.explorer.auxiliary_models):
        if model.engine_num is None:
            fills["explorer", "auxiliary_models", number, "engine_num"] = 0
    if config.explorer.rollout_model.engine_num is None:
        fills["explorer", "rollout_model", "engine_num"] = 1
    return fills


def _fill_seeds(config: Config) -> Fills:
    # Samplers have the run's seed, so that another seed gives another run. Tasksets follow below.
    trained = config.buffer.trainer_input
    seeded: dict[Location, int | None] = {
        ("explorer", "rollout_model"): config.explorer.rollout_model.seed,
        ("buffer", "trainer_input", "experience_buffer", "data_selector"): trained.experience_buffer.data_selector.seed,
    }
    for i, model in enumerate(config.explorer.auxiliary_models):
        seeded["explorer", "auxiliary_models", i] = model.seed
    for place, buffer in trained.side_places.items():
        seeded[(*place, "data_selector")] = buffer.data_selector.seed
    return {(*place, "seed"): config.seed for place, seed in seeded.items() if seed is None}


def _fill_tasksets(config: Config, repeat_times: int, response: int | None) -> Fills:
    source, model = config.buffer.explorer_input, config.model
    fills: Fills = {}
    for place, taskset in (source.train_places | source.eval_places).items():
        number = place[3] if len(place) > 3 else 0
        name, workflow, times = f"taskset_{number}", source.default_workflow_type, repeat_times
        if place[2] == "eval_tasksets":
            name, times = f"eval_{name}", 1
            workflow = source.default_eval_workflow_type or workflow
        values = {
            ("name",): name,
            ("repeat_times",): times,
            ("default_workflow_type",): workflow,
            ("default_reward_fn_type",): source.default_reward_fn_type,
            ("rollout_args", "temperature"): model.temperature,
            ("rollout_args", "top_p"): model.top_p,
            ("rollout_args", "top_k"): model.top_k,
            ("rollout_args", "max_tokens"): response,
            ("data_selector", "seed"): config.seed,
        }
        for keys, value in values.items():
            # Only absent keys: a given value wins, also 0 and "".
            holder = taskset if len(keys) == 1 else getattr(taskset, keys[0])
            if getattr(holder, keys[-1]) is None and value is not None:
                fills[(*place, *keys)] = value
    return fills
