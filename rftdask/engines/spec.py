"""Engine of a model section: which engine runs it, its sampling parameters, and which models sit behind an API.

Pure functions of the configuration.
"""

from __future__ import annotations

import os
from dataclasses import replace

from rftdask.config import Config, fill_from_environment
from rftdask.config.schema.buffer import TasksetConfig
from rftdask.config.schema.explorer import InferenceModelConfig
from rftdask.config.schema.model import ModelConfig
from rftdask.engines.base import POLICY, SamplingParams
from rftdask.engines.client import EngineSpec
from rftdask.processes.child import LOG_LEVEL
from rftdask.processes.device_lock import DEVICES_VARIABLE


def engine_spec(section: InferenceModelConfig, config: Config, threads: int, log_file: str | None) -> EngineSpec:
    """The engine of `section`, the policy's or that of an auxiliary model."""
    env = tuple(sorted({**fill_from_environment(config.explorer.env_vars), LOG_LEVEL: config.log.level}.items()))
    model, is_policy = config.model, section.model_path is None
    if not is_policy:  # a frozen model beside the policy
        model = section.own_model(model)
        samplings = [model_sampling(model)]
    else:
        source = config.buffer.explorer_input
        samplings = [sampling_params(each, config) for each in (*source.train_tasksets, *source.eval_tasksets)]
        if config.algorithm.greedy_baseline:
            # Greedy baselines, too: the engine answers a short request of each kind before it counts as ready.
            samplings += [replace(each, temperature=0.0) for each in samplings]
    # Each once, in a fixed order: equal specs must compare as equal.
    kinds = tuple(dict.fromkeys(samplings))
    # The cluster that started this worker says whether it shares its device, or the config does.
    colocated = bool(config.cluster.colocate) and (is_policy or not section.is_apart)
    turn_s = config.synchronizer.sync_timeout if colocated or DEVICES_VARIABLE in os.environ else 0.0
    folders = config.explorer.plugin_dirs
    records_experts = is_policy and config.algorithm.enable_router_replay
    return EngineSpec(section, model, threads, log_file, folders, env, turn_s, colocated, records_experts, kinds)


def sampling_params(taskset: TasksetConfig, config: Config, explore_step: int = 1) -> SamplingParams:
    """How the policy samples for tasks of the taskset at an explore step."""
    arguments, model = taskset.rollout_args, config.model
    return SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature_at(explore_step),
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_tokens=model.min_response_tokens,
        repetition_penalty=model.repetition_penalty,
    )


def remote_models(config: Config) -> dict[str, InferenceModelConfig]:
    """The models behind an API by the name under which workflows ask them; POLICY is the one that is evaluated in place
    of the policy, whose name at the service `model.external_model` has."""
    policy = {POLICY: config.explorer.rollout_model} if config.is_external else {}
    return policy | {m.asked_name: m for m in config.explorer.auxiliary_models if m.traits.is_external}


def is_asked_in_calls(section: InferenceModelConfig, config: Config) -> bool:
    """Whether what an engine computes together is decided by who asks: where a run is to repeat its bits."""
    # An engine that never repeats its bits, such as vLLM, has nothing to lose by taking requests as they come.
    return config.synchronizer.sync_style == "fixed" and section.traits.repeats_bits


def model_sampling(model: ModelConfig) -> SamplingParams:
    """How a model samples by its own section."""
    return SamplingParams(
        max_tokens=model.max_response_tokens,
        temperature=model.temperature,
        top_p=model.top_p,
        top_k=model.top_k,
        min_tokens=model.min_response_tokens,
        repetition_penalty=model.repetition_penalty,
    )
