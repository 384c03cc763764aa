"""Engine of a model section: which engine runs it, its sampling parameters, and which models sit behind an API."""

from __future__ import annotations

import os
from dataclasses import replace

from rftdask.config import Config, fill_from_environment
from rftdask.config.schema.buffer import TasksetConfig
from rftdask.config.schema.explorer import EngineTraits, InferenceModelConfig
from rftdask.config.schema.model import ModelConfig
from rftdask.engines.base import POLICY, SamplingParams
from rftdask.engines.client import EngineSpec
from rftdask.processes.child import LOG_LEVEL
from rftdask.processes.device_lock import DEVICES_VARIABLE


class ExternalEngine(EngineTraits):
    """Traits of a model behind an OpenAI-compatible API, which is evaluated and never trained.

    It works on text, so there is no engine process and no `Engine`; rollouts/policy/remote_model.py calls the service.
    """

    engine_type = "external"
    is_external = True


def engine_spec(section: InferenceModelConfig, config: Config, threads: int, log_file: str | None) -> EngineSpec:
    """Spec of the engine of `section`, which is the policy's or an auxiliary model's."""
    env = tuple(sorted({**fill_from_environment(config.explorer.env_vars), LOG_LEVEL: config.log.level}.items()))
    model, is_policy = config.model, section.model_path is None
    if not is_policy:  # a frozen auxiliary model
        model = section.own_model(model)
        samplings = [model_sampling(model)]
    else:
        source = config.buffer.explorer_input
        samplings = [sampling_params(each, config) for each in (*source.train_tasksets, *source.eval_tasksets)]
        if config.algorithm.greedy_baseline:
            # Includes greedy baselines: the engine serves a smoke test request of each kind before it is ready.
            samplings += [replace(each, temperature=0.0) for each in samplings]
    # Unique and in a fixed order, so that equal specs compare as equal.
    kinds = tuple(dict.fromkeys(samplings))
    # The device is shared according to the cluster that started this worker, or to the config.
    colocated = bool(config.cluster.colocate) and (is_policy or not section.is_apart)
    turn_s = config.synchronizer.sync_timeout if colocated or DEVICES_VARIABLE in os.environ else 0.0
    folders = config.explorer.plugin_dirs
    records_experts = is_policy and config.algorithm.enable_router_replay
    return EngineSpec(section, model, threads, log_file, folders, env, turn_s, colocated, records_experts, kinds)


def sampling_params(taskset: TasksetConfig, config: Config, explore_step: int = 1) -> SamplingParams:
    """Sampling parameters of the policy for a taskset at an explore step."""
    arguments = taskset.rollout_args
    return replace(
        model_sampling(config.model),
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature_at(explore_step),
        top_p=arguments.top_p,
        top_k=arguments.top_k,
    )


def remote_models(config: Config) -> dict[str, InferenceModelConfig]:
    """API-backed models by name. The POLICY entry replaces the local policy; its remote name is
    `model.external_model.model_name`."""
    policy = {POLICY: config.explorer.rollout_model} if config.is_external else {}
    return policy | {m.asked_name: m for m in config.explorer.auxiliary_models if m.traits.is_external}


def is_asked_in_calls(section: InferenceModelConfig, config: Config) -> bool:
    """True if callers decide which requests are batched together, so that the run is bit-repeatable."""
    # An engine that is not bit-repeatable, such as vLLM, takes requests as they arrive.
    return config.synchronizer.sync_style == "fixed" and section.traits.repeats_bits


def model_sampling(model: ModelConfig) -> SamplingParams:
    """Sampling parameters of a model section."""
    return SamplingParams(
        max_tokens=model.max_response_tokens,
        temperature=model.temperature,
        top_p=model.top_p,
        top_k=model.top_k,
        min_tokens=model.min_response_tokens,
        repetition_penalty=model.repetition_penalty,
    )
