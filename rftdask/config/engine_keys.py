"""Which keys of an engine's section mean something for which engine. It knows the traits of engines and no name."""

from __future__ import annotations

from collections.abc import Iterator

from rftdask.config.base import default_of
from rftdask.config.engine_traits import registered_engines
from rftdask.config.schema.explorer import InferenceModelConfig
from rftdask.config.schema.run import Config
from rftdask.config.yaml_source import Problem

_SPLITS = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "enable_expert_parallel")
_REFUSED = (*_SPLITS, "extra_engine_args")
"""Keys that change what an engine computes on: an error where it does not follow them."""
_IGNORED = ("enforce_eager", "enable_prefix_caching", "enable_chunked_prefill", "gpu_memory_utilization")
"""Keys that change how fast it computes the same: a warning where it does not follow them."""


def engine_sections(config: Config) -> list[tuple[str, InferenceModelConfig]]:
    """(path, section) of the policy's engines and of the auxiliary ones."""
    explorer = config.explorer
    auxiliary = [(f"explorer.auxiliary_models[{i}]", model) for i, model in enumerate(explorer.auxiliary_models)]
    return [("explorer.rollout_model", explorer.rollout_model), *auxiliary]


def engine_problems(config: Config) -> Iterator[Problem]:
    """(path, message) of keys that the engine cannot follow."""
    for path, section in engine_sections(config):
        for key in _set_without_effect(section, _REFUSED):
            remedy = f"leave it out or use {' or '.join(_engines_that_follow(key))}"
            yield f"{path}.{key}", f"engine_type {section.engine_type} cannot do it; {remedy}"
    engine, loras = config.explorer.rollout_model, config.model.lora_configs or ()
    if any(lora.use_dora for lora in loras) and not engine.traits.takes_dora:
        yield "model.lora_configs[0].use_dora", f"engine_type {engine.engine_type} has no DoRA; use transformers"


def engine_warnings(config: Config) -> Iterator[Problem]:
    """(path, message) of keys without effect."""
    for path, section in engine_sections(config):
        for key in _set_without_effect(section, _IGNORED):
            tuned = " and ".join(_engines_that_follow(key))
            yield f"{path}.{key}", f"ignored: it tunes {tuned}, and engine_type is {section.engine_type}"


def _set_without_effect(section: InferenceModelConfig, keys: tuple[str, ...]) -> list[str]:
    """Those of `keys` that differ from their defaults and that the section's engine does not follow."""
    defaults = {key: default_of(InferenceModelConfig.model_fields[key]) for key in keys}
    return [key for key in keys if key not in section.traits.config_keys and getattr(section, key) != defaults[key]]


def _engines_that_follow(key: str) -> list[str]:
    return [name for name, part in registered_engines().items() if key in part.traits.get("config_keys", ())]
