"""Which keys of an engine's section mean something for which engine. Pure; it knows neither engines nor what they need
beside the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator

from rftdask.config.schema.explorer import InferenceModelConfig
from rftdask.config.schema.run import Config
from rftdask.config.yaml_source import Problem

_SPLITS = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "enable_expert_parallel")
_REFUSED = (*_SPLITS, "extra_engine_args")
"""What the engine would have to do otherwise: refused where it cannot."""
_IGNORED = ("enforce_eager", "enable_prefix_caching", "enable_chunked_prefill", "gpu_memory_utilization")
"""How fast it does the same: a warning where it has no effect."""


def engine_sections(config: Config) -> list[tuple[str, InferenceModelConfig]]:
    """(path, section) of the policy's engines and of the auxiliary ones."""
    explorer = config.explorer
    auxiliary = [(f"explorer.auxiliary_models[{i}]", model) for i, model in enumerate(explorer.auxiliary_models)]
    return [("explorer.rollout_model", explorer.rollout_model), *auxiliary]


def engine_problems(config: Config) -> Iterator[Problem]:
    """(path, message) of keys that the engine cannot follow."""
    for path, section in engine_sections(config):
        for key in _REFUSED if section.engine_type != "vllm" else ():
            if getattr(section, key) != _default(key):
                yield f"{path}.{key}", f"engine_type {section.engine_type} cannot do it; leave it out or use vllm"
    loras = config.model.lora_configs or ()
    if config.explorer.rollout_model.engine_type == "vllm" and any(lora.use_dora for lora in loras):
        yield "model.lora_configs[0].use_dora", "vLLM has no DoRA; use engine_type transformers"


def engine_warnings(config: Config) -> Iterator[Problem]:
    """(path, message) of keys without effect."""
    for path, section in engine_sections(config):
        for key in _IGNORED if section.engine_type != "vllm" else ():
            if getattr(section, key) != _default(key):
                yield f"{path}.{key}", f"ignored: it tunes vLLM, and engine_type is {section.engine_type}"


def gpus_of(section: InferenceModelConfig) -> int:
    """GPUs that one engine needs, where there are any."""
    return section.tensor_parallel_size * section.pipeline_parallel_size * section.data_parallel_size


def _default(key: str) -> object:
    return InferenceModelConfig.model_fields[key].get_default(call_default_factory=True)
